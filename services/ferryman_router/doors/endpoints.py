"""The router's two doors: HTTP for OpenAI's clients, gRPC for the SDK."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from ferryman.runtime.access import given_tls
from ferryman.runtime.connections import ConnectionLimits, within_file_limit
from ferryman.runtime.http_server import listening as http_listening
from ferryman.security.tls import door_credentials
from ferryman.security.tls_folder import DOOR, server_context
from ferryman.settings.router import LimitSettings, RouterSettings
from ferryman.text.tool_calls.formats import OutputSyntax
from ferryman.wire.grpc.role_tokens import OPEN_SERVER, ServerLocks
from ferryman.wire.grpc.rpc import GrpcServer
from ferryman.wire.grpc.rpc import listening as grpc_listening
from ferryman.wire.v1 import inference_pb2_grpc
from ferryman_router.doors.grpc_server import SERVICE, InferenceServicer
from ferryman_router.doors.server import HttpApp, HttpDeps
from ferryman_router.request.metrics import RouterMetrics
from ferryman_router.served_model import ServedModel

GRPC_GRACE_SECONDS = 1.0
MAX_MESSAGE_FIELDS = 16_384  # three for each message of a chat


def http_door(
    settings: RouterSettings, deps: HttpDeps, metrics: RouterMetrics
) -> AbstractAsyncContextManager[int]:
    """HTTP for the length of a block; gives the port."""
    tls = given_tls(settings.access, DOOR)
    return http_listening(
        HttpApp(deps),
        settings.http,
        limits=_connection_limits(settings.limits),
        tls=server_context(tls, metrics.refused_handshakes.inc) if tls else None,
    )


def grpc_door(
    settings: RouterSettings, servicer: InferenceServicer
) -> AbstractAsyncContextManager[GrpcServer]:
    """gRPC for the length of a block."""

    def register(server: Any) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)

    tls = given_tls(settings.access, DOOR)
    return grpc_listening(
        f"{settings.grpc.host}:{settings.grpc.port}",
        register,
        grace=GRPC_GRACE_SECONDS,
        services=(SERVICE,),
        reflects=settings.access.reflection,
        max_fields=MAX_MESSAGE_FIELDS,
        max_connections=within_file_limit(settings.limits.max_connections),
        locks=ServerLocks(credentials=door_credentials(tls)) if tls else OPEN_SERVER,
    )


def output_syntax(settings: RouterSettings, model: ServedModel) -> OutputSyntax:
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
