"""The shell of a worker process: its parts are joined, served and drained here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_settings import BaseSettings

from ferryman.cache.branch import CacheChange
from ferryman.engine.assembly import Engine, EngineOptions, running_engine
from ferryman.ids import make_epoch, make_worker_id
from ferryman.runtime.background import Background
from ferryman.runtime.life import alongside, announce_ready
from ferryman.runtime.lifecycle import LifecyclePublisher, Publisher
from ferryman.runtime.listening import listening as http_listening
from ferryman.runtime.listening import observed
from ferryman.runtime.metrics import Metrics
from ferryman.runtime.settings import BusSettings, LifeSettings, ListenSettings, WorkerSettings
from ferryman.schedule.events import Event
from ferryman.tiers.prefetch_values import PrefetchPolicy, PrefetchWish
from ferryman.tiers.write_policy import write_policy_named
from ferryman.wire.bus import Bus, Discoverable
from ferryman.wire.host_attachment import HostCacheOptions
from ferryman.wire.host_client import host_cache_client
from ferryman.wire.nats_bus import NatsOptions, nats_bus
from ferryman.wire.planes import PlaneChoice
from ferryman.wire.rpc import Channels
from ferryman.wire.rpc import listening as grpc_listening
from ferryman.wire.subjects import Subjects
from ferryman.worker.host import HostTierClient, NoHostTier, host_tier_of
from ferryman.worker.loop import Clock, StepLoop
from ferryman.worker.planes import GrpcSide, NixlSettings, PlaneSide, plane_side
from ferryman.worker.reuse import LoadTotals, Reuse
from ferryman.worker.settings import HostCacheSettings
from ferryman.worker.telemetry import Identity, Load, Telemetry, debug_endpoints

log = logging.getLogger(__name__)

GRACE_SECONDS = 1.0


class ShellSettings(BaseSettings):
    """What both kinds of worker are told. `advertise` is the host at which others reach them."""

    worker: WorkerSettings
    listen: ListenSettings = ListenSettings()
    observe: ListenSettings = ListenSettings()
    bus: BusSettings = BusSettings()
    hostcache: HostCacheSettings = HostCacheSettings()
    life: LifeSettings = LifeSettings()
    advertise: str = "127.0.0.1"
    planes: PlaneChoice = "auto"
    nixl: NixlSettings = NixlSettings()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a worker's service is made from. Setting `bell` has the step loop look for work."""

    role: str
    worker_id: str
    epoch: int
    engine: Engine
    bell: asyncio.Event
    host: HostTierClient
    lifecycle: LifecyclePublisher
    channels: Channels
    background: Background
    metrics: Metrics
    reuse: Reuse
    clock: Clock
    planes: PlaneSide = field(default_factory=GrpcSide)


class WorkerService(Protocol):
    """What is different about a prefill and a decode worker."""

    def register(self, server: Any) -> None: ...

    def on_events(self, events: list[Event]) -> None: ...

    def jobs(self) -> tuple[Coroutine[Any, Any, None], ...]: ...

    def load(self) -> Load: ...

    def listens_at(self, address: str) -> None: ...

    async def drain(self) -> None: ...


async def serve_worker(
    settings: ShellSettings,
    options: EngineOptions,
    role: str,
    make: Callable[[Parts], WorkerService],
    service_name: str,
    stopping: asyncio.Event,
) -> None:
    """Serves until `stopping` is set (or a drain is ordered) and what is under way has ended."""
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(running_engine(options))
        for warning in engine.capacity.warnings:
            log.warning(warning)
        log.info("capacity %s", engine.capacity.explanation)
        worker_id, epoch = make_worker_id(role), make_epoch()
        bus = await stack.enter_async_context(nats_bus(NatsOptions(settings.bus.url, worker_id)))
        parts = await _parts(stack, settings, engine, bus, (role, worker_id, epoch))
        service = make(parts)
        await _serve(stack, settings, parts, service, service_name, bus, stopping)


async def _parts(
    stack: AsyncExitStack,
    settings: ShellSettings,
    engine: Engine,
    bus: Bus,
    who: tuple[str, str, int],
) -> Parts:
    bell = asyncio.Event()
    subjects = Subjects(settings.bus.cluster)
    metrics = Metrics(who[0])
    host = await stack.enter_async_context(_host_tier(settings, engine, who, bell, metrics))
    return Parts(
        *who,
        engine=engine,
        bell=bell,
        host=host,
        lifecycle=LifecyclePublisher(bus, subjects, Publisher(*who)),
        channels=await stack.enter_async_context(Channels()),
        background=await stack.enter_async_context(Background()),
        metrics=metrics,
        reuse=Reuse(engine.manifest, metrics),
        clock=time.monotonic,
        planes=plane_side(
            settings.planes,
            engine.places,
            (settings.listen.host, settings.advertise),
            settings.nixl,
        ),
    )


@asynccontextmanager
async def _host_tier(
    settings: ShellSettings,
    engine: Engine,
    who: tuple[str, str, int],
    bell: asyncio.Event,
    metrics: Metrics,
) -> AsyncIterator[HostTierClient]:
    if not settings.hostcache.address:
        yield NoHostTier()
        return

    async def attach(arena: memoryview) -> None:
        await asyncio.wrap_future(engine.stream.call(lambda: engine.host_tier.attach(arena)))

    chosen = settings.hostcache
    wish = PrefetchWish(PrefetchPolicy(chosen.prefetch_policy), chosen.prefetch_threshold)
    policy = write_policy_named(chosen.write_policy)
    options = HostCacheOptions(
        chosen.address, who[1], who[2], call_seconds=chosen.call_seconds, prefetch=wish
    )
    async with (
        host_cache_client(options, engine.manifest, attach) as client,
        host_tier_of(engine, client, policy, wish, bell.set) as host,
    ):
        metrics.watch("hostcache", client.statistics)
        metrics.watch("backup", host.backup.statistics)
        yield host


async def _serve(
    stack: AsyncExitStack,
    settings: ShellSettings,
    parts: Parts,
    service: WorkerService,
    service_name: str,
    bus: Bus,
    stopping: asyncio.Event,
) -> None:
    listen = f"{settings.listen.host}:{settings.listen.port}"
    listening = await stack.enter_async_context(
        grpc_listening(listen, service.register, grace=GRACE_SECONDS, services=(service_name,))
    )
    address = f"{settings.advertise}:{listening.port}"
    service.listens_at(address)
    app = observed(debug_endpoints(parts.engine, parts.metrics))
    observe_port = await stack.enter_async_context(http_listening(app, settings.observe))
    telemetry, loop = _moving_parts(settings, parts, service, bus, address, stopping)
    where = {"address": address, "observe": str(observe_port), "worker_id": parts.worker_id}
    found = Discoverable(f"ferryman-{parts.role}", "1.0.0", f"A {parts.role} worker", where)
    await stack.enter_async_context(bus.discoverable(found))
    async with alongside(loop.run(), telemetry.run(), _lasting(parts.engine), *service.jobs()):
        observe = f"{settings.observe.host}:{observe_port}"
        announce_ready(parts.role, parts.worker_id, address, parts.epoch, observe=observe)
        await stopping.wait()
        log.info("draining")
        await listening.drain()
        draining = parts.background.start(service.drain())
        await asyncio.sleep(0)  # the drain has begun: the next beat says so
        telemetry.beat()
        await draining
        parts.lifecycle.flush_gaps()


async def _lasting(engine: Engine) -> None:
    """For as long as the engine lasts. Raises RankLost, even while no step runs."""
    await asyncio.shield(asyncio.wrap_future(engine.lost))


def _moving_parts(
    settings: ShellSettings,
    parts: Parts,
    service: WorkerService,
    bus: Bus,
    address: str,
    stopping: asyncio.Event,
) -> tuple[Telemetry, StepLoop]:
    """The two jobs that run beside the servers. Every cache change is published."""

    def on_changes(changes: tuple[CacheChange, ...]) -> None:
        parts.host.changed(changes)
        parts.reuse.changed(changes)
        telemetry.publish_cache_changes(changes)

    loop = StepLoop(parts.engine, parts.bell, service.on_events, parts.clock, on_changes=on_changes)
    parts.metrics.watch("loads", lambda: LoadTotals(*loop.pace.all_loads))
    telemetry = Telemetry(
        parts.engine,
        Identity(parts.role, parts.worker_id, parts.epoch, address),
        bus,
        Subjects(settings.bus.cluster),
        pace=loop.pace,
        load=service.load,
        order_drain=stopping.set,
        bell=parts.bell,
    )
    return telemetry, loop
