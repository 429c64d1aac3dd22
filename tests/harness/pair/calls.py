"""Two workers as a router sees them: its orders, its calls, and the tokens that it reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import pytest
from tests.doubles.stamps import fake_tokens
from tests.harness.pair.fake_engine import VOCAB
from tests.harness.pair.worker import PATIENT_SECONDS, PairWorker
from tests.planes import plane_in, plane_of
from tests.waiting import until

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.llm import Completion
from ferryman.schedule.request import Request, SamplingParams
from ferryman.wire.codec.handoff import abort_order_to_wire, reserve_order_to_wire
from ferryman.wire.codec.prefill import prefill_order_to_wire
from ferryman.wire.codec.tokens import request_tokens_from_wire
from ferryman.wire.grpc.rpc import channel, ending
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.plane_values import PlaneChoice
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from ferryman.wire.values import (
    AbortOrder,
    PrefillOrder,
    RequestContext,
    RequestTokens,
    ReserveOrder,
    StreamContinues,
    WorkerAddress,
)

Tokens = grpc.aio.UnaryStreamCall[decode_pb2.TokensRequest, decode_pb2.TokensResponse]


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """A request's answer so far, from offset `base` on: tokens, and log probabilities if it asked
    for some."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, float]] = field(default_factory=list)
    base: int = 0

    def take(self, tokens: RequestTokens) -> None:
        known = self.base + len(self.token_ids) - tokens.frame.offset
        self.token_ids.extend(tokens.frame.token_ids[known:])
        self.logprobs.extend(tokens.logprobs[known:])


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """Both workers, and stubs to call them as a router does."""

    prefill: PairWorker
    decode: PairWorker
    prefill_stub: prefill_pb2_grpc.PrefillServiceStub
    decode_stub: decode_pb2_grpc.DecodeServiceStub

    @property
    def digest(self) -> str:
        """Of the state that both hold."""
        return self.decode.engine.manifest.digest

    def leased(self) -> set[str]:
        """The roles that hold slots of either worker besides the trees."""
        return self.prefill.leased() | self.decode.leased()

    def order(self, request: Request, attempt: int = 1, deadline: float = 60.0) -> PrefillOrder:
        context = RequestContext(request.request_id, attempt, deadline)
        parts = self.decode.parts
        where = WorkerAddress(parts.worker_id, self.decode.address, parts.epoch)
        epoch = self.prefill.parts.epoch
        return PrefillOrder(context, epoch, where, "router-1", request, self.digest)

    def wish(self, request: Request, attempt: int = 1, deadline: float = 60.0) -> ReserveOrder:
        """The reservation that a prefill worker would ask decode for."""
        order, me = self.order(request, attempt, deadline), self.prefill.parts
        writer = WorkerAddress(me.worker_id, "", me.epoch)
        epoch = self.decode.parts.epoch
        return ReserveOrder(order.context, epoch, writer, "router-1", request, self.digest, "")

    async def reserve(self, wish: ReserveOrder) -> decode_pb2.ReserveResponse:
        with typed_errors():
            answer: decode_pb2.ReserveResponse = await self.decode_stub.Reserve(
                reserve_order_to_wire(wish), timeout=PATIENT_SECONDS
            )
        return answer

    async def abort(
        self, order: AbortOrder, *, timeout_seconds: float = PATIENT_SECONDS
    ) -> decode_pb2.AbortResponse:
        """Decode's answer to a router, or to a writer, that aborts an attempt."""
        with typed_errors():
            answer: decode_pb2.AbortResponse = await self.decode_stub.Abort(
                abort_order_to_wire(order), timeout=timeout_seconds
            )
        return answer

    async def run_prefill(self, order: PrefillOrder) -> list[prefill_pb2.PrefillResponse]:
        """All progress until the hand-off; raises what ended it."""
        with typed_errors():
            with ending(self.prefill_stub.Prefill(prefill_order_to_wire(order))) as call:
                return [progress async for progress in call]

    async def read_tokens(
        self, request_id: str, attempt: int = 1, base: int = 0
    ) -> tuple[list[int], RequestTokens]:
        """Tokens of a request to its end, and the last that was said of it."""
        answer, last = await self.read_answer(request_id, attempt, base)
        return answer.token_ids, last

    async def read_answer(
        self, request_id: str, attempt: int = 1, base: int = 0
    ) -> tuple[PairAnswer, RequestTokens]:
        """As `read_tokens`, with their log probabilities."""
        found = PairAnswer(base=base)
        asked = decode_pb2.TokensRequest(router_id="router-1", worker_epoch=self.decode.parts.epoch)
        asked.resume.add(request_id=request_id, attempt=attempt, offset=0)
        with ending(self.decode_stub.Tokens(asked)) as call:
            async for message in call:
                for tokens in map(request_tokens_from_wire, message.requests):
                    if (tokens.request_id, tokens.frame.attempt) == (request_id, attempt):
                        found.take(tokens)
                        if not isinstance(tokens.ending, StreamContinues):
                            return found, tokens
        raise AssertionError("the stream ended before the request did")


def expected(request: Request) -> list[int]:
    return fake_tokens(request.token_ids, request.sampling.max_tokens, VOCAB)


@asynccontextmanager
async def paired(
    prefill: PairWorker, decode: PairWorker, planes: PlaneChoice | None = None
) -> AsyncIterator[WorkerPair]:
    """Two workers as they are, or once their hand-offs travel on the best plane of a setting."""
    async with channel(prefill.address) as to_prefill, channel(decode.address) as to_decode:
        async with asyncio.timeout(120):
            for connection in (to_prefill, to_decode):
                await connection.channel_ready()
        if planes is not None:
            services, best = (prefill.service, decode.service), plane_of(planes)
            await until(lambda: all(plane_in(each.load().planes) == best for each in services))
        yield WorkerPair(
            prefill,
            decode,
            prefill_pb2_grpc.PrefillServiceStub(to_prefill),
            decode_pb2_grpc.DecodeServiceStub(to_decode),
        )


@asynccontextmanager
async def stream_of(pair: WorkerPair, router_id: str) -> AsyncIterator[Tokens]:
    """A router that reads its tokens."""
    asked = decode_pb2.TokensRequest(router_id=router_id, worker_epoch=pair.decode.parts.epoch)
    with ending(pair.decode_stub.Tokens(asked)) as call:
        await call.initial_metadata()
        yield call


async def read_to_the_end(
    call: Tokens,
) -> tuple[list[int], RequestTokens]:
    """All tokens of the one request of a router, and the last that was said of it."""
    found: list[int] = []
    async for message in call:
        for tokens in map(request_tokens_from_wire, message.requests):
            found += tokens.frame.token_ids
            if not isinstance(tokens.ending, StreamContinues):
                return found, tokens
    raise AssertionError("the stream ended before the request did")


async def hand_off(
    pair: WorkerPair, name: str, prompt: list[int], sampling: SamplingParams
) -> None:
    await pair.run_prefill(pair.order(request_of(pair, name, prompt, sampling)))


def request_of(pair: WorkerPair, name: str, prompt: list[int], sampling: SamplingParams) -> Request:
    """With the page keys of decode's model."""
    manifest, ids = pair.decode.engine.manifest, as_token_ids(prompt)
    keys = page_keys(root_key(manifest), ids, manifest.page_size)
    return Request(name, ids, keys, sampling)


async def check(pair: WorkerPair, name: str, cold: Completion) -> None:
    answer, _ = await pair.read_answer(name)
    assert tuple(answer.token_ids) == cold.token_ids
    for found, right in zip(answer.logprobs, cold.logprobs, strict=True):
        assert found == pytest.approx(right, abs=1e-12, rel=0)
