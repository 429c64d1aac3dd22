"""A prefill and a decode worker in this process, over real gRPC on loopback.

On stamped engines, or on any others.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from tests.planes import plane_of
from tests.worker.fake_engine import VOCAB, fake_engine, parts_of

from ferryman.engine.engine import Engine
from ferryman.runtime.life import alongside
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.events import Event
from ferryman.schedule.request import Request
from ferryman.testing.stamps import fake_tokens
from ferryman.wire.codec.handoff import abort_order_to_wire, reserve_order_to_wire
from ferryman.wire.codec.prefill import prefill_order_to_wire
from ferryman.wire.codec.tokens import request_tokens_from_wire
from ferryman.wire.grpc import rpc
from ferryman.wire.grpc.rpc import channel, ending, listening
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.handoff.nixl_agent import NixlAgent
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
from ferryman.worker.loop import StepLoop
from ferryman.worker.planes import MakeAgent
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode import handoff_receiver, nixl_receiver
from ferryman_decode.server import DecodeServicer
from ferryman_prefill.server import PrefillServicer

Register = Callable[[Any], None]
# A busy machine is no lost writer.
PATIENT_SECONDS = 30.0


# How long gRPC waits for an answer to a ping, and for a connection.
_PATIENT = {
    "grpc.keepalive_timeout_ms",
    "grpc.http2.ping_timeout_ms",
    "grpc.min_reconnect_backoff_ms",
}


def patiently(options: rpc.Options) -> rpc.Options:
    """The same connection settings, but a peer on a busy machine may take its time."""
    patient_ms = int(PATIENT_SECONDS * 1000)
    return tuple((name, patient_ms if name in _PATIENT else value) for name, value in options)


class PairClock:
    """The monotonic clock, which a test can put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@dataclass(frozen=True, slots=True)
class PairWorker:
    """One worker as a test sees it."""

    service: Any
    parts: WorkerContext
    address: str
    clock: PairClock
    gate: threading.Event

    def hold(self) -> None:
        """No step runs until `go_on`."""
        self.gate.clear()

    def go_on(self) -> None:
        self.gate.set()

    def facts(self, name: str) -> list[Mapping[str, object]]:
        """The facts of the lifecycle events of that name, in order."""
        bus: Any = self.parts.lifecycle._bus
        events = [decode_event(payload) for _subject, payload in bus.said]
        return [event.facts for event in events if event.name == name]

    @property
    def engine(self) -> Engine:
        return self.parts.engine

    def leased(self) -> set[str]:
        """The roles that hold slots besides the tree."""
        ledgers = self.engine.scheduler.ledgers().values()
        return {role for ledger in ledgers for role in ledger.by_role} - {"tree"}


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
async def worker(
    role: str,
    make: Callable[[WorkerContext], Any],
    num_slots: int = 60,
    planes: PlaneChoice = "grpc",
    *,
    gate: threading.Event | None = None,
    make_agent: MakeAgent = NixlAgent,
) -> AsyncIterator[PairWorker]:
    """A service, its step loop and its server, as the shell joins them; leases are long ones."""
    is_open = gate is None
    gate = gate or threading.Event()
    if is_open:
        gate.set()
    with fake_engine(num_slots=num_slots, pace=lambda _plan: held_by(gate)) as engine:
        async with worker_on(engine, role, make, planes, gate=gate, make_agent=make_agent) as found:
            yield found


@asynccontextmanager
async def worker_on(
    engine: Engine,
    role: str,
    make: Callable[[WorkerContext], Any],
    planes: PlaneChoice = "grpc",
    *,
    gate: threading.Event | None = None,
    make_agent: MakeAgent = NixlAgent,
) -> AsyncIterator[PairWorker]:
    """As `worker`, on an engine that runs."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(handoff_receiver, "LEASE_SECONDS", PATIENT_SECONDS)
    monkeypatch.setattr(nixl_receiver, "REQUIRED_SECONDS", PATIENT_SECONDS)
    for name in ("CHANNEL_OPTIONS", "SERVER_OPTIONS"):
        monkeypatch.setattr(rpc, name, patiently(getattr(rpc, name)))
    clock, gate = PairClock(), gate or threading.Event()
    async with (
        parts_of(role, engine, clock, planes, make_agent) as parts,
        _served(make(parts), parts, clock, gate) as found,
    ):
        try:
            yield found
        finally:
            gate.set()
            monkeypatch.undo()


def held_by(gate: threading.Event) -> None:
    gate.wait(30)


@asynccontextmanager
async def _served(
    service: Any, parts: WorkerContext, clock: PairClock, gate: threading.Event
) -> AsyncIterator[PairWorker]:
    def on_events(events: list[Event]) -> None:
        service.on_events(events)

    loop = StepLoop(parts.engine, parts.wake, on_events, clock)
    async with (
        listening("127.0.0.1:0", service.register, grace=0.5) as server,
        alongside(loop.run(), *service.jobs()),
    ):
        address = f"127.0.0.1:{server.port}"
        service.listens_at(address)
        yield PairWorker(service, parts, address, clock, gate)


@asynccontextmanager
async def pair_of_workers(
    make_decode: Callable[[WorkerContext], Any] = DecodeServicer,
    num_slots: int = 60,
    planes: PlaneChoice = "grpc",
    *,
    make_prefill: Callable[[WorkerContext], Any] = PrefillServicer,
) -> AsyncIterator[WorkerPair]:
    """Both workers, ready for hand-offs on the plane that is asked for."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            worker("prefill", make_prefill, num_slots, planes)
        )
        decode = await stack.enter_async_context(worker("decode", make_decode, num_slots, planes))
        both = prefill.service, decode.service
        best = plane_of(planes)
        await until(lambda: all(side.load().planes[0] == best for side in both))
        yield await stack.enter_async_context(paired(prefill, decode))


@asynccontextmanager
async def paired(prefill: PairWorker, decode: PairWorker) -> AsyncIterator[WorkerPair]:
    """Two workers, as they are."""
    async with AsyncExitStack() as stack:
        to_prefill = await stack.enter_async_context(channel(prefill.address))
        to_decode = await stack.enter_async_context(channel(decode.address))
        async with asyncio.timeout(120):
            for connection in (to_prefill, to_decode):
                await connection.channel_ready()
        yield WorkerPair(
            prefill,
            decode,
            prefill_pb2_grpc.PrefillServiceStub(to_prefill),
            decode_pb2_grpc.DecodeServiceStub(to_decode),
        )


@asynccontextmanager
async def stream_of(
    pair: WorkerPair, router_id: str
) -> AsyncIterator[grpc.aio.UnaryStreamCall[decode_pb2.TokensRequest, decode_pb2.TokensResponse]]:
    """A router that reads its tokens."""
    asked = decode_pb2.TokensRequest(router_id=router_id, worker_epoch=pair.decode.parts.epoch)
    with ending(pair.decode_stub.Tokens(asked)) as call:
        await call.initial_metadata()
        yield call


async def read_to_the_end(
    call: grpc.aio.UnaryStreamCall[decode_pb2.TokensRequest, decode_pb2.TokensResponse],
) -> tuple[list[int], RequestTokens]:
    """All tokens of the one request of a router, and the last that was said of it."""
    found: list[int] = []
    async for message in call:
        for tokens in map(request_tokens_from_wire, message.requests):
            found += tokens.frame.token_ids
            if not isinstance(tokens.ending, StreamContinues):
                return found, tokens
    raise AssertionError("the stream ended before the request did")


async def until(holds: Callable[[], bool]) -> None:
    """Waits until something that other tasks bring about is so."""
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110  # its cause sends no event
            await asyncio.sleep(0.001)


def warnings_beside_those_of_ports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of a test's workers, without those of the ports that NIXL opened."""
    warnings = (each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING)
    return [each for each in warnings if "listens without a lock" not in each]
