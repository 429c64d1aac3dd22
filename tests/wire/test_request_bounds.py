"""Bytes that are no message, or have far too many fields, are refused quickly as invalid."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refused_calls import answers_to

from ferryman.errors import FerrymanError, InvalidRequest, TooLarge
from ferryman.wire.grpc.interceptor import UNCOUNTED_BYTES, check_num_fields
from ferryman.wire.grpc.rpc import channel, listening
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, types_pb2

REQUEST = inference_pb2.GenerateRequest.DESCRIPTOR
LONG = "x" * UNCOUNTED_BYTES


def _chat(num_messages: int, content: str = "") -> bytes:
    messages = [inference_pb2.ChatMessage(content=content) for _ in range(num_messages)]
    prompt = inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=messages))
    return inference_pb2.GenerateRequest(model=LONG, prompt=prompt).SerializeToString()


def test_fields_are_counted_at_every_depth() -> None:
    around = 3  # model, prompt, chat
    check_num_fields(_chat(10), REQUEST, 10 + around)
    check_num_fields(_chat(10, "word"), REQUEST, 20 + around)
    for raw, most in ((_chat(10), 9 + around), (_chat(10, "word"), 19 + around)):
        with pytest.raises(TooLarge, match=f"more than {most} fields"):
            check_num_fields(raw, REQUEST, most)


class CountedBytes(bytes):
    """Counts how many of its bytes somebody looked at."""

    looks = 0

    def __getitem__(self, key: Any) -> Any:
        self.looks += 1
        return super().__getitem__(key)


def test_the_largest_message_of_nothing_but_fields_is_refused_without_reading_it_all() -> None:
    field, most = b"\x0a\x00", 16_384
    messages = CountedBytes(field * (1 << 21))
    with pytest.raises(TooLarge):
        check_num_fields(messages, inference_pb2.ChatPrompt.DESCRIPTOR, most)
    assert 0 < messages.looks <= (most + 1) * len(field)


def test_packed_numbers_are_one_field() -> None:
    sampling = types_pb2.SamplingParams(stop_token_ids=range(UNCOUNTED_BYTES))
    check_num_fields(sampling.SerializeToString(), types_pb2.SamplingParams.DESCRIPTOR, 1)


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_counted_or_refused(raw: bytes) -> None:
    padded = inference_pb2.GenerateRequest(model=LONG).SerializeToString() + raw
    is_message = True
    try:
        inference_pb2.GenerateRequest.FromString(padded)
    except Exception:
        is_message = False
    try:
        check_num_fields(padded, REQUEST, 1000)
    except InvalidRequest:
        groups = any(byte & 7 in (3, 4) for byte in raw)
        assert not is_message or groups, "groups are no longer used by anybody"


class Servicer(decode_pb2_grpc.DecodeServiceServicer):
    """Answers everything that reaches it."""

    async def Abort(self, request: Any, context: Any) -> decode_pb2.AbortResponse:
        return decode_pb2.AbortResponse()

    async def WritePages(self, requests: Any, context: Any) -> decode_pb2.WritePagesResponse:
        async for _ in requests:
            pass
        return decode_pb2.WritePagesResponse()

    async def LandPages(
        self, requests: Any, context: Any
    ) -> AsyncIterator[decode_pb2.LandPagesResponse]:
        async for _ in requests:
            yield decode_pb2.LandPagesResponse()


SERVICE = "/ferryman.wire.v1.DecodeService/"


async def test_bytes_that_are_no_protobuf_are_the_callers_mistake_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def register(server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(Servicer(), server)

    async with listening("127.0.0.1:0", register, grace=0.1) as server:
        address = f"127.0.0.1:{server.port}"
        async with channel(address) as way:
            unary: Any = way.unary_unary(SERVICE + "Abort")
            assert await unary(b"") == b"", "an empty message is one"
        for method in ("Abort", "WritePages", "LandPages"):
            with pytest.raises(FerrymanError) as caught:
                await answers_to(address, "", SERVICE + method, [b"\xff\xff"])
            assert type(caught.value) is InvalidRequest, caught.value
    assert not caplog.records, [record.getMessage() for record in caplog.records]
