"""The shell of a worker process: builds its parts, serves and drains."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import grpc.aio

from ferryman.cache.node import TreeChange
from ferryman.engine.engine import Engine, build_engine
from ferryman.engine.warm_up import warm_up, warm_up_decode_first
from ferryman.model.weights.load_progress import LoadProgress
from ferryman.runtime.access import MetricsAccess, MetricsGuard, access_of
from ferryman.runtime.background import Background
from ferryman.runtime.http_server import json_answer, observed
from ferryman.runtime.http_server import listening as http_listening
from ferryman.runtime.life import (
    alongside,
    announce_compiling,
    announce_loading,
    announce_ready,
    run_unless_stopped,
)
from ferryman.runtime.lifecycle import LifecyclePublisher
from ferryman.runtime.membership import Membership, Orders, drain_order, joined
from ferryman.runtime.metrics import Metrics, refused_calls
from ferryman.schedule.events import Event
from ferryman.settings.engine import EngineOptions
from ferryman.settings.workers import ShellSettings
from ferryman.sizing.memory_plan import ROWS, complete_options, limit_of
from ferryman.tiers.prefetch_values import PrefetchOptions, PrefetchPolicy
from ferryman.tiers.write_policy import write_policy_named
from ferryman.wire.grpc.peer_probe import PeerProbe, register_echo
from ferryman.wire.grpc.role_tokens import OPEN_TO_ALL, GrpcAccess
from ferryman.wire.grpc.rpc import Channels, GrpcServer
from ferryman.wire.grpc.rpc import listening as grpc_listening
from ferryman.wire.hostcache.attachment import HostCacheOptions
from ferryman.wire.hostcache.client import host_cache_client
from ferryman.wire.nats.bus import Discoverable
from ferryman.wire.nats.heartbeat import DECODE
from ferryman.wire.plane_values import GrpcOnly
from ferryman.wire.signed_orders import SignatureCheck
from ferryman.worker.cache_metrics import CacheMetrics
from ferryman.worker.host import HostTier, NoHostTier, host_tier_of
from ferryman.worker.loop import Clock, StepLoop
from ferryman.worker.numeric_watch import NumericWatch
from ferryman.worker.planes import PlaneSide, plane_side
from ferryman.worker.telemetry import (
    COMPILING,
    LoopCounter,
    Telemetry,
    WorkerLoad,
    WorkerStart,
    debug_endpoints,
)

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
    limit: str = ""


class LoadAnnouncer:
    """Reports to the parent process how far a model is loaded, a few times a second, and to the
    `start` every time."""

    def __init__(self, role: str, clock: Clock, start: WorkerStart) -> None:
        self._role, self._clock, self._start = role, clock, start
        self._next = clock()

    def __call__(self, progress: LoadProgress) -> None:
        self._start.on_load(progress)
        # The end of a stage is always reported: the parent draws a full bar before the next one.
        if self._clock() >= self._next or progress.done_bytes == progress.total_bytes:
            announce_loading(self._role, **asdict(progress))
            self._next = self._clock() + ANNOUNCE_SECONDS


class CompileAnnouncer(logging.Handler):
    """Reports each loop that is compiled to the parent process and the `start`, while a `with`
    lasts."""

    def __init__(self, role: str, start: WorkerStart) -> None:
        super().__init__()
        self._role, self._start = role, start

    def emit(self, record: logging.LogRecord) -> None:
        self._start.on_loop()
        announce_compiling(self._role, record.getMessage())

    def __enter__(self) -> None:
        logging.getLogger(COMPILING).addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger(COMPILING).removeHandler(self)


class WorkerService(Protocol):
    """The difference between the kinds of worker."""

    def register(self, server: Any) -> None: ...

    def on_events(self, events: list[Event]) -> None: ...

    def jobs(self) -> tuple[Coroutine[Any, Any, None], ...]: ...

    def load(self) -> WorkerLoad: ...

    def listens_at(self, address: str) -> None: ...

    async def prepare_drain(self) -> None: ...

    async def drain(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A kind of worker: its role, the full names of its gRPC services, and how they are made."""

    role: str
    service_names: tuple[str, ...]
    make: Callable[[WorkerContext], WorkerService]


async def serve_worker(
    settings: ShellSettings, options: EngineOptions, kind: WorkerKind, stopping: asyncio.Event
) -> None:
    """Serves until `stopping` is set (or a drain is ordered) and all requests have ended."""
    role = kind.role
    access = access_of(settings.access, role)
    async with AsyncExitStack() as stack:
        # It joins before it loads: routers learn that it starts, and let requests wait for it.
        member = await stack.enter_async_context(
            joined(settings.bus, role, access, settings.traced)
        )
        start = WorkerStart(member, time.monotonic)
        async with member.beating(start.beat):
            # A load may take minutes, and a stop ends it: so it runs in a thread.
            loaded = await run_unless_stopped(
                lambda: stack.enter_context(_loaded_engine(settings, options, role, start)),
                stopping,
            )
            start.connects()
            watch = NumericWatch(member.worker_id, stopping.set)
            parts = await _parts(stack, settings, loaded, member, watch, access)
        await _serve(settings, parts, kind, member, start, stopping)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, and the sentence that says why it runs fewer requests than were asked for; empty
    if it runs them all."""

    engine: Engine
    limit: str


@contextmanager
def _loaded_engine(
    settings: ShellSettings, options: EngineOptions, role: str, start: WorkerStart
) -> Iterator[LoadedEngine]:
    complete, notes = complete_options(options)
    # The choices are logged before the load, which takes long and may fail because of them.
    for note in notes:
        log.info(note)
    warm = start.warming(warm_up_decode_first if role == DECODE else warm_up)
    with ExitStack() as stack:
        # The engine outlives this block: loops are compiled only while its start warms it up.
        with CompileAnnouncer(role, start):
            building = build_engine(complete, LoadAnnouncer(role, time.monotonic, start), warm)
            engine = stack.enter_context(building)
        # Before the worker is ready: it holds the interpreter's lock, which streams need.
        engine.grammars.warm_up()
        # The capacity is known only after the pools were allocated.
        for warning in engine.capacity.warnings:
            log.warning(warning)
        log.info("running in %s on %s", complete.dtype, complete.device)
        log.info("capacity %s", engine.capacity.explanation)
        limit = limit_of(complete, settings.asked_running or options.max_running or ROWS[0])
        if limit is not None:
            log.info(limit.sentence)
        yield LoadedEngine(engine, limit.sentence if limit else "")


async def _parts(
    stack: AsyncExitStack,
    settings: ShellSettings,
    loaded: LoadedEngine,
    member: Membership,
    watch: NumericWatch,
    access: GrpcAccess,
) -> WorkerContext:
    engine, wake, metrics = loaded.engine, asyncio.Event(), Metrics(member.role)
    host = await stack.enter_async_context(
        _host_tier(settings, engine, member, wake, metrics, access)
    )
    return WorkerContext(
        member.role,
        member.worker_id,
        member.epoch,
        engine=engine,
        wake=wake,
        host=host,
        lifecycle=member.lifecycle(),
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
            settings.arena_folder,
        ),
        limit=loaded.limit,
    )


@asynccontextmanager
async def _host_tier(
    settings: ShellSettings,
    engine: Engine,
    member: Membership,
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
        member.worker_id,
        member.epoch,
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
    settings: ShellSettings,
    parts: WorkerContext,
    kind: WorkerKind,
    member: Membership,
    start: WorkerStart,
    stopping: asyncio.Event,
) -> None:
    service = kind.make(parts)
    async with AsyncExitStack() as stack:
        # The servers listen before anything names their addresses: a port of 0 is known only then.
        listening = await stack.enter_async_context(_listening(settings, parts, kind, service))
        address = f"{settings.advertise}:{listening.port}"
        service.listens_at(address)
        guard = MetricsGuard(MetricsAccess(parts.access.credentials), parts.metrics)
        health = {"/health": lambda: json_answer({"status": "ok"})}
        app = observed(health, debug_endpoints(parts.engine, parts.metrics), guard.check)
        observe_port = await stack.enter_async_context(http_listening(app, settings.observe))
        loops = stack.enter_context(LoopCounter())
        telemetry, loop = _moving_parts(parts, service, member, address, start.seconds, loops)
        where = {"address": address, "observe": str(observe_port), "worker_id": parts.worker_id}
        entry = Discoverable(f"ferryman-{parts.role}", "1.0.0", f"A {parts.role} worker", where)
        await stack.enter_async_context(member.bus.discoverable(entry))
        signatures = SignatureCheck(parts.access, parts.worker_id, parts.epoch)
        probe = PeerProbe(parts.channels, signatures.check_probe)
        orders: Orders = {
            "drain": drain_order(stopping.set),
            "probe": probe.order,
            **telemetry.orders(),
        }
        # Its beats name the node of a host-cache whose arena it has mapped.
        facts = {"hostcache": settings.hostcache.address}
        # Jobs begin before the first heartbeat of a ready worker, which makes routers send
        # requests, and end after its last one.
        async with (
            alongside(loop.run(), _lasting(parts.engine), *service.jobs()),
            member.reporting(telemetry.beat, orders, lambda: facts) as beat,
        ):
            # Last of the start: the parent process may send a request as soon as it reads this.
            observe = f"{settings.observe.host}:{observe_port}"
            announce_ready(parts.role, parts.worker_id, address, parts.epoch, observe=observe)
            await stopping.wait()
            log.info("draining")
            parts.host.hurry()
            # The way out of running requests is made first, while new ones still come.
            await service.prepare_drain()
            # Health changes before the service refuses requests, and the servers and the step loop
            # go on: requests under way end by them.
            await listening.drain()
            draining = parts.background.start(service.drain())
            await asyncio.sleep(0)  # the drain has begun, and this heartbeat reports it
            beat()
            await draining
            # After the last event of a request, and before the broker's connection is closed.
            parts.lifecycle.flush_gaps()
        # Raises for a worker that drained because of its numbers: its status is an error.
        parts.numeric_watch.check()


def _listening(
    settings: ShellSettings, parts: WorkerContext, kind: WorkerKind, service: WorkerService
) -> AbstractAsyncContextManager[GrpcServer]:
    def register(server: grpc.aio.Server) -> None:
        service.register(server)
        register_echo(server)

    return grpc_listening(
        f"{settings.listen.host}:{settings.listen.port}",
        register,
        grace=GRACE_SECONDS,
        services=kind.service_names,
        worker_id=parts.worker_id,
        reflects=settings.access.reflection,
        locks=parts.access.locks(refused_calls(parts.metrics)),
    )


async def _lasting(engine: Engine) -> None:
    """Returns never; raises RankLost when a rank is lost, even while no step runs."""
    await asyncio.shield(asyncio.wrap_future(engine.lost))


def _moving_parts(
    parts: WorkerContext,
    service: WorkerService,
    member: Membership,
    address: str,
    start_seconds: float,
    loops: LoopCounter,
) -> tuple[Telemetry, StepLoop]:
    """The telemetry and the step loop, which run while the servers do. Every cache change is
    published."""

    def on_changes(changes: tuple[TreeChange, ...]) -> None:
        parts.host.changed(changes)
        parts.cache_metrics.changed(changes)
        telemetry.publish_cache_changes(changes)

    def on_steps(num_ended: int, *, is_drawing: bool) -> None:
        # On a processor a worker for both copies prompts on the cores that draw tokens. One that
        # only decodes copies ends of answers, for which another worker may wait.
        if parts.engine.scheduler.limits.order.mixes:
            parts.host.stepped(num_ended, is_drawing=is_drawing)

    parts.metrics.watch("bus", member.bus.statistics)
    member.tracing.count_in(parts.metrics)
    parts.metrics.watch("logits", parts.numeric_watch.statistics)
    loop = StepLoop(
        parts.engine.scheduler,
        parts.engine.stream.submit,
        parts.wake,
        service.on_events,
        parts.clock,
        on_changes=on_changes,
        on_steps=on_steps,
    )
    parts.metrics.watch("loads", loop.pace.statistics)
    telemetry = Telemetry(
        parts.engine,
        member,
        address,
        start_seconds=start_seconds,
        pace=loop.pace,
        load=service.load,
        wake=parts.wake,
        loops=loops,
        limit=parts.limit,
    )
    return telemetry, loop
