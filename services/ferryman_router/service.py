"""The router as a process: joins its parts, opens its doors, serves, drains."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp

from ferryman.errors import Stopping
from ferryman.runtime.access import MetricsAccess, MetricsGuard, access_of, given_tls
from ferryman.runtime.background import Background
from ferryman.runtime.connections import ConnectionLimits, raise_file_limit, within_file_limit
from ferryman.runtime.http_server import listening as http_listening
from ferryman.runtime.life import alongside, announce_ready
from ferryman.runtime.membership import Membership, drain_order, joined
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.key_file import read_key_file
from ferryman.security.state_signatures import StateSigner
from ferryman.security.tls import door_credentials
from ferryman.security.tls_folder import DOOR, server_context
from ferryman.settings.folders import folders_of
from ferryman.settings.router import LimitSettings, RouterSettings
from ferryman.text.tool_calls.formats import OutputSyntax
from ferryman.wire.grpc.role_tokens import OPEN_SERVER, GrpcAccess, ServerLocks
from ferryman.wire.grpc.rpc import Channels, GrpcServer
from ferryman.wire.grpc.rpc import listening as grpc_listening
from ferryman.wire.hostcache.unit_seals import UnitSeals
from ferryman.wire.nats.bus import Discoverable
from ferryman.wire.nats.heartbeat import ROUTER
from ferryman.wire.nats.sender_proof import believe_all, check_sender
from ferryman.wire.redis.redis_index import redis_index
from ferryman.wire.signed_orders import RouterSignatures
from ferryman_router.bodies.place import BodyRules
from ferryman_router.components import (
    Components,
    RouterTelemetry,
    StateKeys,
    Transports,
    make_components,
)
from ferryman_router.doors.answer_endpoints import HttpDeps
from ferryman_router.doors.auth import ApiKeys, Authenticator
from ferryman_router.doors.cors import CorsPolicy
from ferryman_router.doors.grpc_server import SERVICE, InferenceServicer
from ferryman_router.doors.server import HttpApp
from ferryman_router.doors.traced import traced_door
from ferryman_router.doors.web.endpoints import WebPage
from ferryman_router.intake.body_intake import BodyMemory, Intake, ReaderProcess
from ferryman_router.request.metrics import RouterMetrics, count_refused_logins, watch_loop
from ferryman_router.request.request_log import RequestLog
from ferryman_router.routing.quotas import Quotas
from ferryman_router.served_model import ServedModel

log = logging.getLogger(__name__)

GRPC_GRACE_SECONDS = 1.0
MAX_MESSAGE_FIELDS = 16_384  # three for each message of a chat


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router that serves. `stop_health` has gRPC's health report NOT_SERVING."""

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
    """Serves until `stopping` is set and every stream has ended."""
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
            # The time for draining is over. The doors are still open: readers get the error.
            await router.break_off()
            raise


def _served_model(settings: RouterSettings) -> ServedModel:
    adapters: dict[str, str] = {}
    if settings.lora:
        # It needs torch, which a router without adapters runs without.
        from ferryman.model.weights.lora import adapter_names

        named = adapter_names(folders_of(settings.lora))
        adapters = {adapter.name: adapter.digest for adapter in named}
    created = int(time.time())
    return ServedModel.load(settings.model, settings.served_name, created, adapters)


@asynccontextmanager
async def running(
    settings: RouterSettings, order_drain: Callable[[], None]
) -> AsyncIterator[RunningRouter]:
    """A router for the length of a block, with both doors open. `order_drain` is called when it is
    ordered to end."""
    key = read_key_file(settings.cluster_key_file)
    access = access_of(settings.access, ROUTER)
    model = await asyncio.to_thread(_served_model, settings)
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(
            joined(settings.bus, ROUTER, access, settings.traced)
        )
        transports = await _transports(stack, settings, member, access, key)
        reader = ReaderProcess.for_model(settings.model, model.model_id)
        intake = stack.enter_context(closing(Intake(stack.enter_context(closing(reader)))))
        quotas = Quotas()
        api_keys = ApiKeys(settings.keys, settings.keys_path, key, quotas)
        components = make_components(settings.limits, model, transports, intake, quotas)
        await stack.enter_async_context(components.listener.listening())
        metrics = components.frontend.ctx.metrics
        await stack.enter_async_context(
            alongside(
                watch_loop(metrics.loop_held.observe),
                # An open broker refuses no login.
                *(
                    (count_refused_logins(member.bus, metrics.refused_bus_logins),)
                    if access.credentials
                    else ()
                ),
            )
        )
        await stack.enter_async_context(alongside(components.run()))
        telemetry = RouterTelemetry(member, components.frontend, settings.limits.max_in_flight)
        router = await _open_doors(
            stack, settings, api_keys, components, telemetry, MetricsAccess(access.credentials)
        )
        beat = partial(telemetry.beat, f"{settings.grpc.host}:{router.grpc_port}")
        orders = {"drain": drain_order(order_drain)}
        await stack.enter_async_context(member.reporting(beat, orders))
        yield router


async def _transports(
    stack: AsyncExitStack,
    settings: RouterSettings,
    member: Membership,
    access: GrpcAccess,
    key: ClusterKey,
) -> Transports:
    index = await stack.enter_async_context(
        redis_index(
            settings.index.url,
            key,
            login=access.credentials.redis if access.credentials else None,
            authorities=access.authorities,
            lookup_seconds=settings.index.lookup_seconds,
        )
    )
    await stack.enter_async_context(alongside(index.keep_counting_refusals()))
    return Transports(
        member,
        await stack.enter_async_context(Channels(access)),
        member.lifecycle(),
        index,
        check_sender if access.credentials else believe_all,
        RouterSignatures(access),
        await stack.enter_async_context(Background()),
        StateKeys(StateSigner(key, settings.believed_signers), UnitSeals(key)),
    )


async def _open_doors(
    stack: AsyncExitStack,
    settings: RouterSettings,
    api_keys: ApiKeys,
    components: Components,
    telemetry: RouterTelemetry,
    readers: MetricsAccess,
) -> RunningRouter:
    """Opens HTTP and gRPC, and lets itself be discovered."""
    frontend, member = components.frontend, telemetry.member
    metrics = frontend.ctx.metrics
    tracing = member.tracing
    callers = Authenticator(api_keys, settings.limits.deadline_seconds, tracing.samples)
    memory = BodyMemory()
    deps = HttpDeps(
        frontend,
        callers,
        telemetry.readiness,
        memory,
        _output_syntax(settings, frontend.ctx.model),
        MetricsGuard(readers, metrics),
        settings.limits.max_body_bytes,
        CorsPolicy(settings.origins),
        BodyRules(settings.strict_fields, settings.verbatim_prompts),
    )
    events = RequestLog(frontend.requests, member.bus, member.subjects, metrics.forged_messages)
    page = None
    if settings.web_page:
        page = WebPage(frontend, callers, deps.readers, telemetry.readiness, events)
    tracing.count_in(metrics)
    app = traced_door(HttpApp(deps, page), tracing)
    http_port = await stack.enter_async_context(_http_door(settings, app, metrics))
    servicer = InferenceServicer(
        frontend, callers, memory, member.subjects, events, components.states
    )
    grpc = await stack.enter_async_context(_grpc_door(settings, servicer))
    where = {"http": str(http_port), "grpc": str(grpc.port), "worker_id": member.worker_id}
    discoverable = Discoverable("ferryman-router", "1.0.0", "Takes requests in, routes them", where)
    await stack.enter_async_context(member.bus.discoverable(discoverable))
    log.info("serving http=%d grpc=%d", http_port, grpc.port)
    return RunningRouter(
        member.worker_id, member.epoch, http_port, grpc.port, components, api_keys, grpc.drain
    )


def _http_door(
    settings: RouterSettings, app: ASGIApp, metrics: RouterMetrics
) -> AbstractAsyncContextManager[int]:
    """HTTP for the length of a block; gives the port."""
    tls = given_tls(settings.access, DOOR)
    return http_listening(
        app,
        settings.http,
        limits=_connection_limits(settings.limits),
        tls=server_context(tls, metrics.refused_handshakes.inc) if tls else None,
    )


def _grpc_door(
    settings: RouterSettings, servicer: InferenceServicer
) -> AbstractAsyncContextManager[GrpcServer]:
    """gRPC for the length of a block."""
    tls = given_tls(settings.access, DOOR)
    return grpc_listening(
        f"{settings.grpc.host}:{settings.grpc.port}",
        servicer.register,
        grace=GRPC_GRACE_SECONDS,
        services=(SERVICE,),
        reflects=settings.access.reflection,
        max_fields=MAX_MESSAGE_FIELDS,
        max_connections=within_file_limit(settings.limits.max_connections),
        locks=ServerLocks(credentials=door_credentials(tls)) if tls else OPEN_SERVER,
    )


def _output_syntax(settings: RouterSettings, model: ServedModel) -> OutputSyntax:
    """The syntax in which the model writes calls and thoughts. Raises ConfigError for a format
    not known."""
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
