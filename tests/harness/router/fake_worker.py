"""The base of fake workers: an address, an epoch, beats, faults, and a way to die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import grpc.aio
from tests.harness.router.faults import Fault, Moment

from ferryman.cache.manifest import Kind
from ferryman.ids import make_epoch, make_life_secret, worker_id_of
from ferryman.wire.codec.caches import CacheSnapshot, cache_snapshot_to_bytes
from ferryman.wire.grpc.rpc import listening
from ferryman.wire.nats.bus import Bus, BusMessage
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState, beat_to_bytes
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.values import PrefillOrder, ReserveOrder, WorkerAddress

PAGE_SIZE = 16
STATE = ServedState("f" * 32, PAGE_SIZE, "d" * 32, (Kind.FULL, Kind.RECURRENT))
BEAT_SECONDS = 0.2
MAX_LEN = 512

F = TypeVar("F", bound=Fault)


class FakeRouterWorker:
    """The base of both roles: an address, an epoch, beats, and a way to die."""

    role = ""

    def __init__(self, script: tuple[int, ...], worker_id: str = "") -> None:
        self.script = script
        self.worker_id = worker_id or worker_id_of(self.role, make_life_secret())
        self.epoch = make_epoch()
        self.faults: list[Fault] = []
        self.address = ""
        self.is_ready = True
        self.is_silent = False
        self.state = STATE
        self.max_len = MAX_LEN
        self.node = ""
        self.seconds_per_token = 0.0
        self.start_seconds = 0.05
        self.max_running = 64
        self.dead = asyncio.Event()

    @property
    def beat(self) -> Heartbeat:
        return Heartbeat(
            self.role,
            self.worker_id,
            self.epoch,
            self.address,
            self.is_ready,
            self.state,
            self.max_len,
            max_running=self.max_running,
            node=self.node,
            seconds_per_token=self.seconds_per_token,
            start_seconds=self.start_seconds,
        )

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def die(self) -> None:
        """As by SIGKILL: connections break, beats end."""
        self.dead.set()

    def held(self) -> dict[str, object]:
        """The things that it holds for requests, by holder; none once they have ended."""
        return {}

    def suffers(self, fault: F) -> F:
        """From now on the worker has this fault; returns it."""
        self.faults.append(fault)
        return fault

    async def meet(self, moment: Moment) -> None:
        """Lets the faults of this moment take effect, in the order in which they were given."""
        for fault in self.faults:
            if fault.is_due(moment):
                await fault.strike(self)

    async def live(self, bus: Bus, subjects: Subjects, up: asyncio.Event) -> None:
        """Serves and beats until it dies or is cancelled."""
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(
                listening("127.0.0.1:0", self.register, grace=0, worker_id=self.worker_id)
            )
            self.address = f"127.0.0.1:{server.port}"
            control = subjects.control(self.worker_id, "snapshot")
            await stack.enter_async_context(bus.answering(control, self._snapshot))
            up.set()
            while not self.dead.is_set():
                if not self.is_silent:
                    bus.offer(subjects.beat(self.role, self.worker_id), beat_to_bytes(self.beat))
                try:
                    async with asyncio.timeout(BEAT_SECONDS):
                        await self.dead.wait()
                except TimeoutError:
                    continue

    async def _snapshot(self, message: BusMessage) -> bytes:
        return cache_snapshot_to_bytes(CacheSnapshot(self.worker_id, self.epoch, 0, {}))


def reserve_order(order: PrefillOrder, writer: FakeRouterWorker) -> ReserveOrder:
    return ReserveOrder(
        order.context,
        order.decode.epoch,
        WorkerAddress(writer.worker_id, writer.address, writer.epoch),
        order.router_id,
        order.request,
        order.manifest_digest,
        "",
    )


@asynccontextmanager
async def living(worker: FakeRouterWorker, bus: Bus, subjects: Subjects) -> AsyncIterator[None]:
    """The worker serves while the block runs, unless it dies before."""
    up = asyncio.Event()
    task = asyncio.get_running_loop().create_task(worker.live(bus, subjects, up))
    try:
        await up.wait()
        yield
    finally:
        worker.dead.set()
        await task
