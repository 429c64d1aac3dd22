"""The shell of a worker process: builds its parts, serves and drains."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ferryman.cache.node import TreeChange
from ferryman.engine.engine import Engine, build_engine
from ferryman.ids import make_epoch, make_life_secret, worker_id_of
from ferryman.memory_plan import complete_options
from ferryman.model.load_progress import LoadProgress
from ferryman.runtime.background import Background
from ferryman.runtime.credentials_file import given_credentials
from ferryman.runtime.http_server import json_answer, observed
from ferryman.runtime.http_server import listening as http_listening
from ferryman.runtime.life import (
    alongside,
    announce_loading,
    announce_ready,
    run_unless_stopped,
)
from ferryman.runtime.lifecycle import LifecyclePublisher, Publisher
from ferryman.runtime.metrics import Metrics, refused_calls
from ferryman.runtime.metrics_access import MetricsAccess, MetricsGuard
from ferryman.runtime.tls_folder import given_tls
from ferryman.schedule.events import Event
from ferryman.settings.engine import EngineOptions
from ferryman.settings.workers import ShellSettings
from ferryman.tiers.prefetch_values import PrefetchOptions, PrefetchPolicy
from ferryman.tiers.write_policy import write_policy_named
from ferryman.wire.grpc.role_tokens import OPEN_TO_ALL, GrpcAccess
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.grpc.rpc import listening as grpc_listening
from ferryman.wire.handoff.planes import GrpcOnly
from ferryman.wire.hostcache.attachment import HostCacheOptions
from ferryman.wire.hostcache.client import host_cache_client
from ferryman.wire.nats.bus import Bus, Discoverable
from ferryman.wire.nats.nats_bus import NatsOptions, nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman.worker.cache_metrics import CacheMetrics
from ferryman.worker.host import HostTier, NoHostTier, host_tier_of
from ferryman.worker.loop import Clock, StepLoop
from ferryman.worker.numeric_watch import NumericWatch
from ferryman.worker.planes import PlaneSide, plane_side
from ferryman.worker.telemetry import Identity, Telemetry, WorkerLoad, debug_endpoints

log = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
ANNOUNCE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The parts that a worker's service is made from. Setting `wake` makes the step loop look for
    work."""

    role: str
    worker_id: str
    epoch: int
    engine: Engine
    wake: asyncio.Event
    host: HostTier
    lifecycle: LifecyclePublisher
    channels: Channels
    background: Background
    metrics: Metrics
    cache_metrics: CacheMetrics
    numeric_watch: NumericWatch
    clock: Clock
    access: GrpcAccess = OPEN_TO_ALL
    planes: PlaneSide = field(default_factory=GrpcOnly)


class LoadAnnouncer:
    """Tells the parent process how far a model is loaded, a few times a second."""

    def __init__(self, role: str, clock: Clock) -> None:
        self._role, self._clock = role, clock
        self._next = clock()

    def __call__(self, progress: LoadProgress) -> None:
        # The end of a stage is always told: the parent draws a full bar, and hears of the next.
        if self._clock() >= self._next or progress.done_bytes == progress.total_bytes:
            announce_loading(self._role, **asdict(progress))
            self._next = self._clock() + ANNOUNCE_SECONDS


class WorkerService(Protocol):
    """The difference between the kinds of worker."""

    def register(self, server: Any) -> None: ...

    def on_events(self, events: list[Event]) -> None: ...

    def jobs(self) -> tuple[Coroutine[Any, Any, None], ...]: ...

    def load(self) -> WorkerLoad: ...

    def listens_at(self, address: str) -> None: ...

    async def drain(self) -> None: ...


async def serve_worker(
    settings: ShellSettings,
    options: EngineOptions,
    role: str,
    make: Callable[[WorkerContext], WorkerService],
    service_names: tuple[str, ...],
    stopping: asyncio.Event,
) -> None:
    """Serves until `stopping` is set (or a drain is ordered) and all requests have ended."""
    credentials = given_credentials(settings.access, role)
    access = GrpcAccess(credentials, given_tls(settings.access, role))
    async with AsyncExitStack() as stack:
        # A load may take minutes, and a stop ends it: so it runs beside the loop.
        engine = await run_unless_stopped(
            lambda: stack.enter_context(_loaded_engine(options, role)), stopping
        )
        secret, epoch = make_life_secret(), make_epoch()
        worker_id = worker_id_of(role, secret)
        login = credentials.nats if credentials else None
        to_broker = NatsOptions(
            settings.bus.url,
            worker_id,
            login,
            life_secret=secret,
            authorities=access.authorities,
        )
        bus = await stack.enter_async_context(nats_bus(to_broker))
        watch = NumericWatch(worker_id, stopping.set)
        who = (role, worker_id, epoch)
        parts = await _parts(stack, settings, engine, bus, who, watch, access)
        service = make(parts)
        await _serve(stack, settings, parts, service, service_names, bus, stopping)


@contextmanager
def _loaded_engine(options: EngineOptions, role: str) -> Iterator[Engine]:
    complete, notes = complete_options(options)
    for note in notes:
        log.info(note)
    with build_engine(complete, LoadAnnouncer(role, time.monotonic)) as engine:
        engine.grammars.warm_up()
        for warning in engine.capacity.warnings:
            log.warning(warning)
        log.info("running in %s on %s", complete.dtype, complete.device)
        log.info("capacity %s", engine.capacity.explanation)
        yield engine


async def _parts(
    stack: AsyncExitStack,
    settings: ShellSettings,
    engine: Engine,
    bus: Bus,
    who: tuple[str, str, int],
    watch: NumericWatch,
    access: GrpcAccess,
) -> WorkerContext:
    wake = asyncio.Event()
    subjects = Subjects(settings.bus.cluster)
    metrics = Metrics(who[0])
    host = await stack.enter_async_context(_host_tier(settings, engine, who, wake, metrics, access))
    return WorkerContext(
        *who,
        engine=engine,
        wake=wake,
        host=host,
        lifecycle=LifecyclePublisher(bus, subjects, Publisher(*who)),
        channels=await stack.enter_async_context(Channels(access)),
        background=await stack.enter_async_context(Background()),
        metrics=metrics,
        cache_metrics=CacheMetrics(engine.manifest, metrics),
        numeric_watch=watch,
        clock=time.monotonic,
        access=access,
        planes=await asyncio.to_thread(
            plane_side,
            settings.planes,
            engine.places,
            (settings.listen.host, settings.advertise),
            settings.nixl,
            os.environ,
        ),
    )


@asynccontextmanager
async def _host_tier(
    settings: ShellSettings,
    engine: Engine,
    who: tuple[str, str, int],
    wake: asyncio.Event,
    metrics: Metrics,
    access: GrpcAccess,
) -> AsyncIterator[HostTier]:
    if not settings.hostcache.address:
        yield NoHostTier()
        return

    async def attach(arena: memoryview) -> None:
        await asyncio.wrap_future(engine.stream.call(lambda: engine.host_tier.attach(arena)))

    chosen = settings.hostcache
    wish = PrefetchOptions(PrefetchPolicy(chosen.prefetch_policy), chosen.prefetch_threshold)
    policy = write_policy_named(chosen.write_policy)
    # It names a file of shared memory to map: so it must be a host-cache of this cluster.
    options = HostCacheOptions(
        chosen.address,
        who[1],
        who[2],
        call_seconds=chosen.call_seconds,
        prefetch=wish,
        token=access.token,
        security=access.security,
    )
    async with (
        host_cache_client(options, engine.manifest, attach) as client,
        host_tier_of(engine, client, policy, wish, wake.set) as host,
    ):
        metrics.watch("hostcache", client.statistics)
        metrics.watch("backup", host.backup.statistics)
        yield host


async def _serve(
    stack: AsyncExitStack,
    settings: ShellSettings,
    parts: WorkerContext,
    service: WorkerService,
    service_names: tuple[str, ...],
    bus: Bus,
    stopping: asyncio.Event,
) -> None:
    listen = f"{settings.listen.host}:{settings.listen.port}"
    listening = await stack.enter_async_context(
        grpc_listening(
            listen,
            service.register,
            grace=GRACE_SECONDS,
            services=service_names,
            worker_id=parts.worker_id,
            reflects=settings.access.reflection,
            locks=parts.access.locks(refused_calls(parts.metrics)),
        )
    )
    address = f"{settings.advertise}:{listening.port}"
    service.listens_at(address)
    guard = MetricsGuard(MetricsAccess(parts.access.credentials), parts.metrics)
    health = {"/health": lambda: json_answer({"status": "ok"})}
    app = observed(health, debug_endpoints(parts.engine, parts.metrics), guard.check)
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
        await asyncio.sleep(0)  # the drain has begun, and the next heartbeat reports it
        telemetry.beat()
        await draining
        parts.lifecycle.flush_gaps()
    parts.numeric_watch.check()


async def _lasting(engine: Engine) -> None:
    """Returns never; raises RankLost when a rank is lost, even while no step runs."""
    await asyncio.shield(asyncio.wrap_future(engine.lost))


def _moving_parts(
    settings: ShellSettings,
    parts: WorkerContext,
    service: WorkerService,
    bus: Bus,
    address: str,
    stopping: asyncio.Event,
) -> tuple[Telemetry, StepLoop]:
    """The two jobs that run beside the servers. Every cache change is published."""

    def on_changes(changes: tuple[TreeChange, ...]) -> None:
        parts.host.changed(changes)
        parts.cache_metrics.changed(changes)
        telemetry.publish_cache_changes(changes)

    parts.metrics.watch("bus", bus.statistics)
    parts.metrics.watch("logits", parts.numeric_watch.statistics)
    loop = StepLoop(parts.engine, parts.wake, service.on_events, parts.clock, on_changes=on_changes)
    parts.metrics.watch("loads", loop.pace.statistics)
    telemetry = Telemetry(
        parts.engine,
        Identity(parts.role, parts.worker_id, parts.epoch, address),
        bus,
        Subjects(settings.bus.cluster),
        pace=loop.pace,
        load=service.load,
        order_drain=stopping.set,
        wake=parts.wake,
    )
    return telemetry, loop
