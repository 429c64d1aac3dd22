"""An order with a meaningless value is refused where it is read; the error names the field."""

from __future__ import annotations

from typing import Any

import pytest

from ferryman.errors import InvalidRequest
from ferryman.schedule.request import MAX_STOP_TOKEN_IDS
from ferryman.wire.codec.pieces import piece_from_wire
from ferryman.wire.codec.prefill import prefill_order_from_wire
from ferryman.wire.codec.request import context_from_wire, sampling_from_wire
from ferryman.wire.v1 import decode_pb2, prefill_pb2, types_pb2


def _prefill(address: str = "host:1", **context: Any) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        context=types_pb2.RequestContext(**{"request_id": "r", "attempt": 1, **context}),
        token_ids=b"\x01\0\0\0",
        decode=types_pb2.WorkerAddress(worker_id="decode-1", address=address, epoch=1),
    )


def test_an_order_that_means_something_is_read() -> None:
    assert prefill_order_from_wire(_prefill()).decode.address == "host:1"
    assert prefill_order_from_wire(_prefill("[::1]:80", deadline_ms=2**31 - 1)).decode.epoch == 1


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "unix:/tmp/x", "a b:1", "h:123456"])
def test_a_decode_worker_is_at_an_address(address: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prefill_order_from_wire(_prefill(address))
    assert caught.value.param == "decode.address"


@pytest.mark.parametrize("field", ["deadline_ms", "age_ms"])
def test_durations_are_ones_that_can_be_waited_for(field: str) -> None:
    for milliseconds in (2**31, 2**64 - 1):
        more: dict[str, Any] = {field: milliseconds}
        with pytest.raises(InvalidRequest) as caught:
            prefill_order_from_wire(_prefill(**more))
        assert caught.value.param == field


def test_no_request_is_called_as_none_is() -> None:
    with pytest.raises(InvalidRequest, match="request id"):
        context_from_wire(types_pb2.RequestContext(request_id="_"))


@pytest.mark.parametrize("number", [99, -1, -(1 << 31)])
def test_kinds_are_those_there_are(number: int) -> None:
    kind: Any = number
    with pytest.raises(InvalidRequest, match=f"kind {number}"):
        piece_from_wire(decode_pb2.UnitPiece(kind=kind, data=b"x"))


def test_lists_of_stops_are_bounded_before_they_are_copied() -> None:
    for sampling in (
        types_pb2.SamplingParams(stop=["a"] * 17),
        types_pb2.SamplingParams(stop_token_ids=[1] * 1025),
    ):
        with pytest.raises(InvalidRequest, match="at most"):
            sampling_from_wire(sampling)


def test_a_request_has_its_caller_s_stop_ids_and_the_model_s_and_no_more() -> None:
    order = _prefill()
    order.stop_token_ids.extend(range(2 * MAX_STOP_TOKEN_IDS))
    assert len(prefill_order_from_wire(order).request.stop_token_ids) == 2 * MAX_STOP_TOKEN_IDS
    order.stop_token_ids.append(1)
    with pytest.raises(InvalidRequest, match="at most") as caught:
        prefill_order_from_wire(order)
    assert caught.value.param == "stop_token_ids"
