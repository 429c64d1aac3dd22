"""A pair that a test drives step by step: the services' own hand-off over stamped engines.

No sockets: what `DecodeClient` would send is handed to decode's `HandoffReceiver` directly, either
at once or, for a writer that cannot be recalled, as late as the test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tests.doubles.memory_bus import MemoryBus
from tests.harness.pair.fake_engine import engine_of
from tests.harness.schedule import ScheduledWorker, WatchedWorker

from ferryman.engine.engine import Engine
from ferryman.engine.memory.transfer import digest_of
from ferryman.handoff.effects import WriteFence, WriterId, fence_of
from ferryman.handoff.reservation import ReservationState
from ferryman.handoff.values import Reservation, UnitDigest
from ferryman.runtime.lifecycle import LifecyclePublisher, Publisher
from ferryman.runtime.metrics import Metrics
from ferryman.schedule.request import Request
from ferryman.wire.codec.handoff import ReserveAnswer
from ferryman.wire.codec.pieces import Piece, WriteHeader
from ferryman.wire.handoff.grpc_plane import Sent
from ferryman.wire.handoff.outgoing_units import AnyUnit, OutgoingUnit
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.plane_values import GrpcOnly, PlaneOffer
from ferryman.wire.values import (
    CommitOrder,
    PrefillOrder,
    RequestContext,
    ReserveOrder,
    Usage,
    WorkerAddress,
)
from ferryman.worker.cache_metrics import CacheMetrics
from ferryman.worker.decode_client import DecodeClient
from ferryman.worker.handoff_transport import HandoffTransport
from ferryman.worker.handoff_writer import SendingSide
from ferryman.worker.host import HostTier, NoHostTier
from ferryman.worker.send_leases import SendLeases, WriterStatus
from ferryman_decode.handoff_receiver import HandoffReceiver
from ferryman_prefill.prompt_attempt import PrefillContext
from ferryman_prefill.server import PrefillAttempt

EPOCH = 9
PREFILL = WorkerAddress("prefill-00000001", "", 4)
DECODE = WorkerAddress("decode-00000001", "", EPOCH)


def ignore(_: object) -> None:
    """Drops a report that no test here reads."""


class DirectDecode(DecodeClient):
    """Decode's side of one attempt, without a network; keeps the `commits` and `aborts` it got."""

    def __init__(self, order: PrefillOrder, receiver: HandoffReceiver) -> None:
        self.order = order
        self.receiver = receiver
        self.reservations: list[Reservation] = []
        self.offered: list[tuple[OutgoingUnit, bytes]] = []
        self.commits: list[CommitOrder] = []
        self.aborts: list[str] = []
        self.arrives = asyncio.Event()
        self.arrives.set()

    async def reserve(self, offer: PlaneOffer, deadline_seconds: float) -> ReserveAnswer:
        order = self.order
        wish = ReserveOrder(
            order.context, EPOCH, PREFILL, order.router_id, order.request, order.manifest_digest, ""
        )
        self.receiver.reserve(wish)
        context = order.context
        reservation = self.receiver.table.reserved(context.request_id, context.attempt)
        assert reservation is not None
        self.reservations.append(reservation)
        return ReserveAnswer(reservation)

    async def renew(self, reservation: Reservation) -> None:
        self.receiver.table.renew(fence_of(reservation), 0.0)

    async def write(
        self, reservation: Reservation, units: AsyncIterator[Sequence[AnyUnit]]
    ) -> Sent:
        """Notes each unit's bytes when it is offered; they are read when they `arrive`."""
        digest, fence = self.order.manifest_digest, fence_of(reservation)
        self.receiver.begin(WriteHeader(fence, self.order.context.request_id, digest))
        sent: list[UnitDigest] = []
        async for batch in units:
            for unit in batch:
                assert isinstance(unit, OutgoingUnit), "stamps lie in host memory"
                self.offered.append((unit, bytes(unit.content)))
                await self.arrives.wait()
                sent.append(write_unit(self.receiver, fence, unit))
        return Sent(tuple(sent), len(sent))

    async def commit(self, commit: CommitOrder) -> None:
        self.commits.append(commit)
        fence = WriteFence(commit.epoch, commit.reservation_id, commit.context.attempt)
        if self.receiver.commit(fence, commit):
            self.receiver._engine.scheduler.adopt(commit.reservation_id, commit.first, 0.0)

    async def abort(self, reservation: Reservation, cause: str, word: WriterStatus) -> bool:
        self.aborts.append(cause)
        table, fence = self.receiver.table, fence_of(reservation)
        self.receiver.carry_out(table.give_up(fence))
        self.receiver.carry_out(table.writer_stopped(fence))
        return table.state_of(reservation.reservation_id) is ReservationState.COMMITTED


def write_unit(receiver: HandoffReceiver, fence: WriteFence, unit: OutgoingUnit) -> UnitDigest:
    """One unit in one piece, as the data plane's sink does it."""
    receiver.write(fence, Piece(unit.unit, 0, bytes(unit.content)))
    receiver.finish(fence, unit.unit)
    return UnitDigest(unit.unit.kind, unit.unit.index, digest_of(unit.content))


def order_for(worker: ScheduledWorker, asked: Request, attempt: int = 1) -> PrefillOrder:
    context = RequestContext(asked.request_id, attempt, deadline_seconds=100.0)
    return PrefillOrder(context, 4, DECODE, "router-1", asked, worker.manifest.digest)


class StampedPair:
    """One prefill and one decode worker, driven by the test."""

    def __init__(
        self, prefill: WatchedWorker, decode: ScheduledWorker, engines: tuple[Engine, Engine]
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.engine, decode_engine = engines
        self.now = 0.0
        # It loads nothing, so no load is waited for.
        self.receiver = HandoffReceiver(
            decode_engine, EPOCH, lambda: self.now, ignore, ignore, lambda _, call: call()
        )
        self.send_leases = SendLeases(self.engine.scheduler, lambda: self.now)
        self.attempts: dict[str, PrefillAttempt] = {}
        self._seen = 0

    def attempt(
        self, asked: Request, host: HostTier | None = None, number: int = 1
    ) -> tuple[PrefillAttempt, DirectDecode]:
        order = order_for(self.prefill, asked, number)
        around = PrefillContext(
            engine=self.engine,
            wake=asyncio.Event(),
            host=host or NoHostTier(),
            cache_metrics=CacheMetrics(self.engine.manifest, Metrics("prefill")),
            lifecycle=LifecyclePublisher(
                MemoryBus().publish, Subjects("local"), Publisher("prefill", "prefill-00000001", 4)
            ),
            run_limit=asyncio.Semaphore(4),
            sending=SendingSide(
                self.engine,
                asyncio.Event(),
                self.send_leases,
                HandoffTransport(
                    GrpcOnly(),
                    self.engine.shares,
                    WriterId(PREFILL.worker_id, 4),
                    lambda: self.now,
                ),
                lambda: self.now,
            ),
            clock=lambda: self.now,
        )
        side = DirectDecode(order, self.receiver)
        attempt = PrefillAttempt(order, side, around)
        self.attempts[attempt.name] = attempt
        self.prefill.requests[attempt.name] = replace(asked, request_id=attempt.name)
        self.decode.requests[attempt.name] = replace(asked, request_id=attempt.name)
        return attempt, side

    async def settle(self) -> None:
        """Lets the attempts do all they can without another step."""
        for _ in range(30):
            await asyncio.sleep(0)
            self._spread()

    def _spread(self) -> None:
        """Events go to their attempts, as the prefill service does it."""
        events = self.prefill.scheduler.take_events()
        self.prefill.events += events
        for event in self.prefill.events[self._seen :]:
            if event.request_id in self.attempts:
                self.attempts[event.request_id].inbox.put_nowait(event)
        self._seen = len(self.prefill.events)

    async def step(self) -> None:
        """Plans, then runs: the attempt can see a plan's events before the plan has run."""
        await self.settle()
        self.prefill.plan()
        await self.settle()
        self.prefill.run_oldest()
        await self.settle()

    async def hand_off(self, asked: Request, host: HostTier | None = None) -> Usage:
        """Runs one request from queue to commit; returns the usage in the commit."""
        attempt, side = self.attempt(asked, host)
        running = asyncio.create_task(attempt.run(0))
        for _ in range(20):
            await self.step()
        await running
        self.decode.drain()
        assert self.decode.tokens[attempt.name] == self.decode.expected(attempt.name)
        (commit,) = side.commits
        return commit.usage


@contextmanager
def stepped_pair(prefill: WatchedWorker, decode: ScheduledWorker) -> Iterator[StampedPair]:
    for worker in (prefill, decode):
        for pool in worker.scheduler.allocator.pools.by_kind.values():
            # The memory of a fresh slot is written by a thread, for which no step would wait.
            pool.make_ready(pool.num_free)
    with engine_of(prefill) as first, engine_of(decode) as second:
        yield StampedPair(prefill, decode, (first, second))


async def unwrapped(running: asyncio.Task[None]) -> None:
    """Awaits an attempt; of a group of errors, raises the first."""
    try:
        await running
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
