"""One worker in this process: a service, its step loop and its server, as the shell joins them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.harness.pair.fake_engine import fake_engine
from tests.harness.pair.ledger import WorkerLedger

from ferryman.engine.engine import Engine
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.ids import make_epoch, make_life_secret, worker_id_of
from ferryman.runtime.background import Background
from ferryman.runtime.life import alongside
from ferryman.runtime.lifecycle import LifecyclePublisher, Publisher, decode_event
from ferryman.runtime.metrics import Metrics
from ferryman.schedule.events import Event
from ferryman.settings.workers import NixlSettings
from ferryman.wire.grpc import rpc
from ferryman.wire.grpc.rpc import Channels, listening
from ferryman.wire.handoff.nixl_agent import NixlAgent
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.plane_values import PlaneChoice
from ferryman.worker.cache_metrics import CacheMetrics
from ferryman.worker.host import NoHostTier
from ferryman.worker.loop import StepLoop
from ferryman.worker.numeric_watch import NumericWatch
from ferryman.worker.planes import MakeAgent, NixlSide, plane_side
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode import handoff_receiver, nixl_receiver

MakeService = Callable[[WorkerContext], Any]
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

    def put_forward(self, seconds: float) -> None:
        self.ahead += seconds


class SilentPublisher(LifecyclePublisher):
    """Keeps the last 1,000 events in `sent`, and has no broker."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(self._keep, Subjects("test"), publisher)
        self.sent: deque[LifecycleEntry] = deque(maxlen=1000)

    def _keep(self, _subject: str, payload: bytes, _headers: Mapping[str, str]) -> None:
        self.sent.append(decode_event(payload))


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

    def events(self) -> list[LifecycleEntry]:
        """Its lifecycle events, in order."""
        publisher = self.parts.lifecycle
        assert isinstance(publisher, SilentPublisher)
        return list(publisher.sent)

    def facts(self, name: str) -> list[Mapping[str, object]]:
        """The facts of the lifecycle events of that name, in order."""
        return [event.facts for event in self.events() if event.name == name]

    @property
    def engine(self) -> Engine:
        return self.parts.engine

    def leased(self) -> set[str]:
        """The roles that hold slots besides the tree."""
        ledgers = self.engine.scheduler.ledgers().values()
        return {role for ledger in ledgers for role in ledger.by_role} - {"tree"}


@asynccontextmanager
async def worker(
    role: str,
    make: MakeService,
    num_slots: int = 60,
    planes: PlaneChoice = "grpc",
    *,
    gate: threading.Event | None = None,
    make_agent: MakeAgent = NixlAgent,
) -> AsyncIterator[PairWorker]:
    """A worker on a fake engine; its steps wait for the gate, which is open unless it is given."""
    if gate is None:
        gate = open_gate()
    with fake_engine(num_slots=num_slots, pace=lambda _plan: held_by(gate)) as engine:
        async with worker_on(engine, role, make, planes, gate=gate, make_agent=make_agent) as found:
            yield found


@asynccontextmanager
async def worker_on(
    engine: Engine,
    role: str,
    make: MakeService,
    planes: PlaneChoice = "grpc",
    *,
    gate: threading.Event | None = None,
    make_agent: MakeAgent = NixlAgent,
) -> AsyncIterator[PairWorker]:
    """A worker on an engine that runs; its leases are long ones."""
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
            gate.set()
            await WorkerLedger(found.service, parts, clock.put_forward).settle()
        finally:
            gate.set()
            monkeypatch.undo()


def open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


def held_by(gate: threading.Event) -> None:
    gate.wait(30)


@asynccontextmanager
async def _served(
    service: Any, parts: WorkerContext, clock: PairClock, gate: threading.Event
) -> AsyncIterator[PairWorker]:
    def on_events(events: list[Event]) -> None:
        service.on_events(events)

    engine = parts.engine
    loop = StepLoop(engine.scheduler, engine.stream.submit, parts.wake, on_events, clock)
    async with (
        listening("127.0.0.1:0", service.register, grace=0.5) as server,
        alongside(loop.run(), *service.jobs()),
    ):
        address = f"127.0.0.1:{server.port}"
        service.listens_at(address)
        yield PairWorker(service, parts, address, clock, gate)


@asynccontextmanager
async def parts_of(
    role: str,
    engine: Engine,
    clock: Callable[[], float] = time.monotonic,
    planes: PlaneChoice = "grpc",
    make: MakeAgent = NixlAgent,
) -> AsyncIterator[WorkerContext]:
    """The parts of a service, without a broker and a host tier."""
    side = plane_side(planes, engine.places, ("127.0.0.1", "127.0.0.1"), NixlSettings(), {})
    if isinstance(side, NixlSide):
        side = replace(side, make=make)
    who = role, worker_id_of(role, make_life_secret()), make_epoch()
    metrics = Metrics(role)
    async with Channels() as channels, Background() as background:
        yield WorkerContext(
            *who,
            engine=engine,
            wake=asyncio.Event(),
            host=NoHostTier(),
            lifecycle=SilentPublisher(Publisher(*who)),
            channels=channels,
            background=background,
            metrics=metrics,
            cache_metrics=CacheMetrics(engine.manifest, metrics),
            numeric_watch=NumericWatch(who[1], lambda: None),
            clock=clock,
            planes=side,
        )
