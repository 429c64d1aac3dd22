"""The router as a process: builds the parts, joins them, serves, drains."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from ferryman.errors import Stopping
from ferryman.grammar.background_compiler import BackgroundCompiler
from ferryman.grammar.compiler import GrammarCompiler
from ferryman.ids import make_epoch, make_life_secret, worker_id_of
from ferryman.runtime.background import Background
from ferryman.runtime.connections import ConnectionLimits, raise_file_limit, within_file_limit
from ferryman.runtime.credentials_file import given_credentials
from ferryman.runtime.http_server import listening as http_listening
from ferryman.runtime.key_file import read_key_file
from ferryman.runtime.life import alongside, announce_ready
from ferryman.runtime.lifecycle import LifecyclePublisher, Publisher
from ferryman.runtime.metrics_access import MetricsAccess, MetricsGuard
from ferryman.runtime.tls_folder import DOOR, given_tls, server_context
from ferryman.settings.adapters import folders_of
from ferryman.settings.router import LimitSettings, RouterSettings
from ferryman.text.tool_calls.formats import OutputSyntax
from ferryman.wire.grpc.role_tokens import OPEN_SERVER, GrpcAccess, ServerLocks
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.grpc.rpc import listening as grpc_listening
from ferryman.wire.grpc.tls import door_credentials
from ferryman.wire.nats.bus import Bus, Discoverable
from ferryman.wire.nats.heartbeat import ROUTER
from ferryman.wire.nats.nats_bus import NatsOptions, nats_bus
from ferryman.wire.nats.sender_proof import CheckSender, believe_all, check_sender
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.redis.index import PrefixIndex
from ferryman.wire.redis.redis_index import redis_index
from ferryman.wire.v1 import inference_pb2_grpc
from ferryman_router.api_keys import ApiKeys
from ferryman_router.attempt_result import RetryBudget
from ferryman_router.context import RouterContext
from ferryman_router.dispatcher import Dispatcher
from ferryman_router.fleet import SERVING, Fleet
from ferryman_router.fleet_listener import FleetListener, Liveness, SenderChecks
from ferryman_router.frontend import Frontend
from ferryman_router.grpc_server import SERVICE, InferenceServicer
from ferryman_router.http.auth import Authenticator
from ferryman_router.http.cors import CorsPolicy
from ferryman_router.http.server import HttpApp, HttpDeps
from ferryman_router.intake import BodyMemory, Intake, ReaderProcess
from ferryman_router.metrics import (
    RouterMetrics,
    RouterStatistics,
    count_refused_logins,
    watch_loop,
)
from ferryman_router.queue import WaitQueue
from ferryman_router.quotas import Quotas
from ferryman_router.request_table import Evacuation, RequestTable
from ferryman_router.routing_policy import RoutingCosts
from ferryman_router.served_model import ServedModel
from ferryman_router.telemetry import RouterLife, RouterTelemetry
from ferryman_router.token_streams import WorkerStreams
from ferryman_router.worker_client import WorkerClient

log = logging.getLogger(__name__)

GRPC_GRACE_SECONDS = 1.0
MAX_MESSAGE_FIELDS = 16_384  # three for each message of a chat


@dataclass(frozen=True, slots=True)
class Components:
    """The parts that others need to reach."""

    fleet: Fleet
    frontend: Frontend
    dispatcher: Dispatcher
    listener: FleetListener


@dataclass(frozen=True, slots=True)
class Transports:
    """How the router reaches others, and whom of them it believes."""

    bus: Bus
    subjects: Subjects
    channels: Channels
    lifecycle: LifecyclePublisher
    index: PrefixIndex
    check_sender: CheckSender


def make_components(
    limits: LimitSettings,
    model: ServedModel,
    router_id: str,
    transports: Transports,
    background: Background,
    intake: Intake,
    quotas: Quotas,
) -> Components:
    """Builds everything from plain values and the ways to others."""
    clock, patience = time.monotonic, limits.stream_patience_seconds
    fleet, requests, metrics = Fleet(limits.beat_timeout_seconds), RequestTable(), RouterMetrics()
    dispatcher = Dispatcher(
        fleet,
        WaitQueue(limits.max_queued, limits.max_queued_per_tenant),
        costs=RoutingCosts(),
        patience=limits.no_worker_seconds,
        clock=clock,
    )
    streams = WorkerStreams(
        router_id,
        fleet,
        requests=requests,
        dispatcher=dispatcher,
        channels=transports.channels,
        background=background,
        metrics=metrics,
        patience=patience,
    )
    liveness = Liveness(
        fleet,
        patience=patience,
        connect=transports.channels.fresh,
        start=background.start,
        lost=streams.lose,
    )
    ctx = RouterContext(
        router_id=router_id,
        model=model,
        fleet=fleet,
        dispatcher=dispatcher,
        budget=RetryBudget(limits.retry_share, limits.retry_floor),
        workers=WorkerClient(fleet, transports.channels, metrics, background.start),
        liveness=liveness,
        ask_again=streams.ask_again,
        lifecycle=transports.lifecycle,
        index=transports.index,
        metrics=metrics,
        quotas=quotas,
        clock=clock,
        outlive=background.start,
        num_in_flight=requests.__len__,
    )
    grammars = GrammarCompiler.for_tokenizer(model.tokenizer)
    grammars.warm_up()
    frontend = Frontend(ctx, requests, background, intake, limits, BackgroundCompiler(grammars))
    listener = FleetListener(
        transports.bus,
        transports.subjects,
        fleet,
        liveness,
        happened=streams.on_fleet_effect,
        senders=SenderChecks(
            transports.check_sender, metrics.forged_messages, metrics.misplaced_beats
        ),
        background=background,
        clock=clock,
    )
    metrics.watch("bus", transports.bus.statistics)
    metrics.watch("", partial(_statistics, transports.index, dispatcher, requests))
    return Components(fleet, frontend, dispatcher, listener)


def _statistics(
    index: PrefixIndex, dispatcher: Dispatcher, requests: RequestTable
) -> RouterStatistics:
    now = index.statistics()
    return RouterStatistics(
        index_away=now.is_away,
        index_misses_away=now.num_misses_away,
        index_forged=now.num_forged,
        index_refused=now.num_refused,
        queue_requests=len(dispatcher),
        queue_seconds=dispatcher.queue_seconds(),
        in_flight_requests=len(requests),
    )


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router that serves. `stop_health` has gRPC's health say NOT_SERVING."""

    worker_id: str
    epoch: int
    http_port: int
    grpc_port: int
    components: Components
    api_keys: ApiKeys
    stop_health: Callable[[], Awaitable[None]]

    async def drain(self) -> None:
        """Takes nothing new and waits for the streams under way."""
        await self.stop_health()
        await self.components.frontend.drained()

    async def break_off(self) -> None:
        """Ends the streams under way with an error, and waits until that was sent."""
        await self.components.frontend.end_all(
            Stopping("this router had to end before the answer did")
        )


async def serve(settings: RouterSettings, stopping: asyncio.Event) -> None:
    """Until `stopping` is set and every stream has ended."""
    raise_file_limit()
    async with running(settings, stopping.set) as router:
        http = f"{settings.http.host}:{router.http_port}"
        grpc = f"{settings.grpc.host}:{router.grpc_port}"
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, router.api_keys.reload)
        router.components.frontend.intake.start_reader()
        announce_ready("router", router.worker_id, http, router.epoch, http=http, grpc=grpc)
        await stopping.wait()
        log.info("draining in_flight=%d", len(router.components.frontend.requests))
        try:
            await router.drain()
        except asyncio.CancelledError:
            # The time for draining is over. The doors are still open: readers hear of it.
            await router.break_off()
            raise


def _served_model(settings: RouterSettings) -> ServedModel:
    adapters: dict[str, str] = {}
    if settings.lora:
        # It needs torch, which a router without adapters runs without.
        from ferryman.model.lora import adapter_names

        named = adapter_names(folders_of(settings.lora))
        adapters = {adapter.name: adapter.digest for adapter in named}
    created = int(time.time())
    return ServedModel.load(settings.model, settings.served_name, created, adapters)


@asynccontextmanager
async def running(
    settings: RouterSettings, order_drain: Callable[[], None]
) -> AsyncIterator[RunningRouter]:
    """A router for the length of a block, with both doors open. `order_drain` is called when it
    shall end."""
    key = read_key_file(settings.cluster_key_file)
    credentials = given_credentials(settings.access, "router")
    access = GrpcAccess(credentials, given_tls(settings.access, "router"))
    model = await asyncio.to_thread(_served_model, settings)
    secret, epoch = make_life_secret(), make_epoch()
    worker_id = worker_id_of(ROUTER, secret)
    subjects = Subjects(settings.bus.cluster)
    async with AsyncExitStack() as stack:
        login = credentials.nats if credentials else None
        to_broker = NatsOptions(
            settings.bus.url,
            worker_id,
            login,
            life_secret=secret,
            authorities=access.authorities,
        )
        bus = await stack.enter_async_context(nats_bus(to_broker))
        index = await stack.enter_async_context(
            redis_index(
                settings.index.url,
                key,
                login=credentials.redis if credentials else None,
                authorities=access.authorities,
                lookup_seconds=settings.index.lookup_seconds,
            )
        )
        channels = await stack.enter_async_context(Channels(access))
        background = await stack.enter_async_context(Background())
        lifecycle = LifecyclePublisher(bus, subjects, Publisher(ROUTER, worker_id, epoch))
        believed = check_sender if credentials else believe_all
        transports = Transports(bus, subjects, channels, lifecycle, index, believed)
        reader = ReaderProcess.for_model(settings.model, model.model_id)
        intake = stack.enter_context(closing(Intake(stack.enter_context(closing(reader)))))
        quotas = Quotas()
        api_keys = ApiKeys(settings.keys, settings.keys_path, key, quotas)
        components = make_components(
            settings.limits, model, worker_id, transports, background, intake, quotas
        )
        await stack.enter_async_context(components.listener.listening())
        metrics = components.frontend.ctx.metrics
        await stack.enter_async_context(
            alongside(
                watch_loop(metrics.loop_held),
                index.keep_counting_refusals(),
                # An open broker refuses nobody.
                *((count_refused_logins(bus, metrics.refused_bus_logins),) if credentials else ()),
            )
        )
        requests, evacuation = components.frontend.requests, Evacuation(components.frontend.ctx)

        def look(now: float) -> None:
            requests.check_stalled(now)
            evacuation.look(requests, now)

        looking = components.dispatcher.run(look, lambda: len(requests) > 0)
        await stack.enter_async_context(alongside(looking))
        router = await _open_doors(
            stack,
            settings,
            api_keys,
            components,
            transports,
            (worker_id, epoch),
            MetricsAccess(credentials),
        )
        telemetry = _telemetry(settings, router, transports, order_drain)
        await stack.enter_async_context(alongside(telemetry.run()))
        yield router


def _telemetry(
    settings: RouterSettings,
    router: RunningRouter,
    transports: Transports,
    order_drain: Callable[[], None],
) -> RouterTelemetry:
    address = f"{settings.grpc.host}:{router.grpc_port}"
    readiness = _readiness(router.components, transports.bus)
    return RouterTelemetry(
        RouterLife(router.worker_id, router.epoch, address),
        router.components.frontend,
        transports.bus,
        transports.subjects,
        max_in_flight=settings.limits.max_in_flight,
        is_ready=lambda: readiness()[0],
        order_drain=order_drain,
    )


async def _open_doors(
    stack: AsyncExitStack,
    settings: RouterSettings,
    api_keys: ApiKeys,
    components: Components,
    transports: Transports,
    life: tuple[str, int],
    readers: MetricsAccess,
) -> RunningRouter:
    """Opens HTTP and gRPC, and lets itself be discovered."""
    callers = Authenticator(api_keys, settings.limits.deadline_seconds)
    readiness = _readiness(components, transports.bus)
    memory = BodyMemory()
    door_tls, metrics = given_tls(settings.access, DOOR), components.frontend.ctx.metrics
    syntax = _syntax(settings, components.frontend.ctx.model)
    door = HttpDeps(
        components.frontend,
        callers,
        readiness,
        memory,
        syntax,
        MetricsGuard(readers, components.frontend.ctx.metrics),
        settings.limits.max_body_bytes,
        CorsPolicy(settings.origins),
    )
    http_port = await stack.enter_async_context(
        http_listening(
            HttpApp(door),
            settings.http,
            limits=_connection_limits(settings.limits),
            tls=server_context(door_tls, metrics.refused_handshakes.inc) if door_tls else None,
        )
    )
    servicer = InferenceServicer(
        components.frontend, callers, memory, transports.bus, transports.subjects
    )

    def register(server: Any) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)

    address = f"{settings.grpc.host}:{settings.grpc.port}"
    listening = await stack.enter_async_context(
        grpc_listening(
            address,
            register,
            grace=GRPC_GRACE_SECONDS,
            services=(SERVICE,),
            reflects=settings.access.reflection,
            max_fields=MAX_MESSAGE_FIELDS,
            max_connections=within_file_limit(settings.limits.max_connections),
            locks=ServerLocks(credentials=door_credentials(door_tls)) if door_tls else OPEN_SERVER,
        )
    )
    where = {"http": str(http_port), "grpc": str(listening.port), "worker_id": life[0]}
    found = Discoverable("ferryman-router", "1.0.0", "Takes requests in, routes them", where)
    await stack.enter_async_context(transports.bus.discoverable(found))
    log.info("serving http=%d grpc=%d", http_port, listening.port)
    return RunningRouter(*life, http_port, listening.port, components, api_keys, listening.drain)


def _syntax(settings: RouterSettings, model: ServedModel) -> OutputSyntax:
    """How the model writes calls and thoughts. Raises ConfigError for a format not known."""
    template = model.tokenizer.chat_template
    source = template.tool_source if template is not None else ""
    return OutputSyntax.chosen(settings.tool_parser, settings.reasoning_parser, source)


def _connection_limits(limits: LimitSettings) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=limits.max_connections,
        max_per_address=limits.max_connections_per_address,
        header_seconds=limits.header_seconds,
        body_seconds=limits.body_seconds,
        drain_bytes=2 * limits.max_body_bytes,
    )


def _readiness(components: Components, bus: Bus) -> Callable[[], tuple[bool, Mapping[str, Any]]]:
    def readiness() -> tuple[bool, Mapping[str, Any]]:
        """Ready with one usable worker of each role; degraded while the broker is away."""
        now = time.monotonic()
        workers = {role: len(components.fleet.usable(role, now)) for role in SERVING}
        is_draining = components.frontend.is_draining
        is_ready = all(workers.values()) and not is_draining
        state = "draining" if is_draining else "ready" if is_ready else "waiting for workers"
        if is_ready and not bus.is_connected:
            state = "degraded"
        return is_ready, {"status": state, "workers": workers, "broker": bus.is_connected}

    return readiness
