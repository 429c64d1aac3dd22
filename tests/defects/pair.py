"""A prefill and a decode worker in one process: the services' own hand-off over stamped engines.

No sockets: what `DecodeSide` would send is handed to decode's `Receiving` directly, either at once
or, for a writer that cannot be recalled, as late as the test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tests.defects.watch import WatchedWorker
from tests.schedule.cluster import MAX_LEN, VOCAB, FakeWorker

from ferryman.cache.capacity import CapacityPlan
from ferryman.engine.assembly import Engine
from ferryman.engine.pipeline import Pipeline
from ferryman.engine.stream import ForwardStream
from ferryman.engine.transfer import digest_of
from ferryman.handoff.effects import Fence
from ferryman.handoff.values import Reservation, UnitDigest
from ferryman.runtime.lifecycle import LifecyclePublisher, Publisher
from ferryman.runtime.metrics import Metrics
from ferryman.schedule.request import Request
from ferryman.wire.codec.handoff import ReserveAnswer
from ferryman.wire.codec.pieces import Piece, WriteHeader
from ferryman.wire.data_plane import OutgoingUnit, Sent
from ferryman.wire.memory_bus import MemoryBus
from ferryman.wire.planes import GrpcPlane, PlaneOffer
from ferryman.wire.subjects import Subjects
from ferryman.wire.values import (
    CommitOrder,
    PrefillOrder,
    RequestContext,
    ReserveOrder,
    Usage,
    WorkerAddress,
)
from ferryman.worker.host import HostTierClient, NoHostTier
from ferryman.worker.reuse import Reuse
from ferryman_decode.receiving import Receiving
from ferryman_prefill.attempt import Attempt, Surroundings
from ferryman_prefill.decode_side import DecodeSide
from ferryman_prefill.holding import Holding, Word

EPOCH = 9
PREFILL = WorkerAddress("prefill-00000001", "", 4)
DECODE = WorkerAddress("decode-00000001", "", EPOCH)


@contextmanager
def engine_of(worker: FakeWorker) -> Iterator[Engine]:
    """The worker's scheduler and stamped slots as the engine that services are given."""
    with ForwardStream(worker.engine) as stream:
        yield Engine(
            manifest=worker.manifest,
            capacity=CapacityPlan({}, 0, "", ()),
            max_len=MAX_LEN,
            vocab_size=VOCAB,
            eos_token_ids=frozenset(),
            scheduler=worker.scheduler,
            stream=stream,
            pipeline=Pipeline(worker.scheduler, stream.submit),
            transfer=worker.engine.transfer,
            host_tier=worker.engine.host_tier,
        )


class DirectDecode(DecodeSide):
    """Decode's side of one attempt, without a network. `commits` and `aborts` are what it heard."""

    def __init__(self, order: PrefillOrder, receiving: Receiving) -> None:
        self.order = order
        self.receiving = receiving
        self.reservations: list[Reservation] = []
        self.offered: list[tuple[OutgoingUnit, bytes]] = []
        self.commits: list[CommitOrder] = []
        self.aborts: list[str] = []
        self.arrives = asyncio.Event()
        self.arrives.set()

    async def offer(self) -> PlaneOffer:
        return GrpcPlane()

    async def reserve(self, offer: PlaneOffer, deadline_seconds: float) -> ReserveAnswer:
        order = self.order
        wish = ReserveOrder(
            order.context, EPOCH, PREFILL, order.router_id, order.request, order.manifest_digest, ""
        )
        self.receiving.reserve(wish)
        context = order.context
        reservation = self.receiving.table.reserved(context.request_id, context.attempt)
        assert reservation is not None
        self.reservations.append(reservation)
        return ReserveAnswer(reservation, order.manifest_digest)

    async def renew(self, reservation: Reservation) -> None:
        self.receiving.table.renew(fence_of(reservation), 0.0)

    async def write(
        self, reservation: Reservation, units: AsyncIterator[Sequence[OutgoingUnit]]
    ) -> Sent:
        """Notes each unit's bytes when it is offered; they are read when they `arrive`."""
        digest, fence = self.order.manifest_digest, fence_of(reservation)
        self.receiving.begin(WriteHeader(fence, self.order.context.request_id, digest))
        sent: list[UnitDigest] = []
        async for batch in units:
            for unit in batch:
                self.offered.append((unit, bytes(unit.content)))
                await self.arrives.wait()
                sent.append(write_unit(self.receiving, fence, unit))
        return Sent(tuple(sent), len(sent))

    async def commit(self, commit: CommitOrder) -> None:
        self.commits.append(commit)
        fence = Fence(commit.epoch, commit.reservation_id, commit.context.attempt)
        if self.receiving.commit(fence, commit):
            self.receiving._engine.scheduler.adopt(commit.reservation_id, commit.first, 0.0)

    async def abort(self, reservation: Reservation, cause: str, word: Word) -> None:
        self.aborts.append(cause)
        self.receiving.carry_out(self.receiving.table.writer_stopped(fence_of(reservation)))


def fence_of(reservation: Reservation) -> Fence:
    return Fence(reservation.epoch, reservation.reservation_id, reservation.attempt)


def write_unit(receiving: Receiving, fence: Fence, unit: OutgoingUnit) -> UnitDigest:
    """One unit in one piece, as the data plane's sink does it."""
    receiving.write(fence, Piece(unit.unit, 0, bytes(unit.content)))
    receiving.written(fence, unit.unit)
    return UnitDigest(unit.unit.kind, unit.unit.index, digest_of(unit.content))


def order_for(worker: FakeWorker, asked: Request, attempt: int = 1) -> PrefillOrder:
    context = RequestContext(asked.request_id, attempt, deadline_seconds=100.0)
    return PrefillOrder(context, 4, DECODE, "router-1", asked, worker.manifest.digest)


class Pair:
    """One prefill and one decode worker, driven by the test."""

    def __init__(
        self, prefill: WatchedWorker, decode: FakeWorker, engines: tuple[Engine, Engine]
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.engine, decode_engine = engines
        self.now = 0.0
        self.receiving = Receiving(decode_engine, EPOCH, lambda: self.now, lambda name: None)
        self.holding = Holding(self.engine.scheduler, lambda: self.now)
        self.attempts: dict[str, Attempt] = {}
        self._seen = 0

    def attempt(
        self, asked: Request, host: HostTierClient | None = None, number: int = 1
    ) -> tuple[Attempt, DirectDecode]:
        order = order_for(self.prefill, asked, number)
        around = Surroundings(
            engine=self.engine,
            bell=asyncio.Event(),
            host=host or NoHostTier(),
            reuse=Reuse(self.engine.manifest, Metrics("prefill")),
            lifecycle=LifecyclePublisher(
                MemoryBus(), Subjects("local"), Publisher("prefill", "prefill-00000001", 4)
            ),
            turnstile=asyncio.Semaphore(4),
            holding=self.holding,
            clock=lambda: self.now,
        )
        side = DirectDecode(order, self.receiving)
        attempt = Attempt(order, side, around)
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
        """Plans, then runs: what is planned can be heard of before it has run."""
        await self.settle()
        self.prefill.plan()
        await self.settle()
        self.prefill.run_oldest()
        await self.settle()


@contextmanager
def pair_of(prefill: WatchedWorker, decode: FakeWorker) -> Iterator[Pair]:
    with engine_of(prefill) as first, engine_of(decode) as second:
        yield Pair(prefill, decode, (first, second))


async def hand_off(pair: Pair, asked: Request, host: NoHostTier | None = None) -> Usage:
    """One request from queue to commit; what decode was told of its prompt."""
    attempt, side = pair.attempt(asked, host)
    running = asyncio.create_task(attempt.run(0))
    for _ in range(20):
        await pair.step()
    await running
    pair.decode.drain()
    assert pair.decode.tokens[attempt.name] == pair.decode.expected(attempt.name)
    (commit,) = side.commits
    return commit.usage


async def unwrapped(running: asyncio.Task[None]) -> None:
    """Awaits an attempt; of a group of errors, raises the first."""
    try:
        await running
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
