"""gRPC as this project uses it: channels, servers, deadlines, and the metadata of a call.

The keepalive settings notice a stopped peer within two seconds; keepalive alone takes a minute.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from ferryman.errors import ConfigError, DeadlineExceeded
from ferryman.security.tls import PLAINTEXT, ChannelSecurity
from ferryman.wire.grpc.interceptor import Context as Context
from ferryman.wire.grpc.interceptor import StatusInterceptor
from ferryman.wire.grpc.role_tokens import (
    NO_TOKEN,
    OPEN_SERVER,
    OPEN_TO_ALL,
    GrpcAccess,
    ServerLocks,
    TokenChannel,
)
from ferryman.wire.values import RequestContext

MAX_MESSAGE_BYTES = 4 << 20
MAX_CONCURRENT_RPCS = 4096
HANDSHAKE_MS = 10_000

Options = tuple[tuple[str, int | str], ...]
Register = Callable[[grpc.aio.Server], None]
C = TypeVar("C", bound=grpc.aio.Call)

_BOTH_ENDS: Options = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
# A server must allow the pings of its clients; two workers on one port would be a mistake.
SERVER_OPTIONS: Options = (
    *_BOTH_ENDS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)
# gRPC does not retry, because the caller decides about retries; a worker that comes back is tried
# again within a second. The least backoff is also the time that gRPC gives a connection to be made:
# it equals the silence allowed to a connected peer, because a busy peer is not gone.
CHANNEL_OPTIONS: Options = (
    *_BOTH_ENDS,
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)
# One of several addresses by chance, and the others if it does not answer: by default the first
# one that accepts connections is used, by all clients. https://github.com/grpc/proposal A62.
_ANY_FIRST = {"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": True}}]}
ANY_ADDRESS: Options = (("grpc.service_config", json.dumps(_ANY_FIRST)),)


def channel(
    address: str,
    token: str = NO_TOKEN,
    security: ChannelSecurity = PLAINTEXT,
    *,
    more: Options = (),
) -> grpc.aio.Channel:
    """A connection to host:port, made when first used; close it, or use it in `async with`. Its
    calls carry `token`; `more` are options of gRPC, such as ANY_ADDRESS."""
    inner = security.open(address, (*CHANNEL_OPTIONS, *more))
    return cast(grpc.aio.Channel, TokenChannel(inner, token)) if token else inner


class Channels:
    """One channel for each address in use, closed together. Their calls show the role of
    `access`."""

    def __init__(self, access: GrpcAccess = OPEN_TO_ALL) -> None:
        self._access = access
        self._channels: dict[str, grpc.aio.Channel] = {}

    def to(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self.fresh(address)
        return self._channels[address]

    def fresh(self, address: str) -> grpc.aio.Channel:
        """One more channel, which the caller closes: it shows whether an address answers now."""
        return channel(address, self._access.token, self._access.security)

    async def drop(self, address: str) -> None:
        """Drops the channel to a process that is gone: its calls end, and the next ones connect
        anew."""
        if gone := self._channels.pop(address, None):
            await gone.close()

    async def close(self) -> None:
        for address in tuple(self._channels):
            await self.drop(address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def is_worker_at(way: grpc.aio.Channel, worker_id: str, seconds: float) -> bool:
    """Whether the process at the other end has this id, which is that of one life: health of
    another one does not know it. Raises gRPC's errors if no answer comes in time."""
    asked = health_pb2.HealthCheckRequest(service=worker_id)
    stub = health_pb2_grpc.HealthStub(way)
    try:
        await stub.Check(asked, timeout=seconds, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return False
        raise
    return True


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A server that is up, on `port`."""

    port: int
    _health: health.HealthServicer

    async def drain(self) -> None:
        """Reports NOT_SERVING from now on. Calls are still taken, so that hand-offs end well."""
        await self._health.enter_graceful_shutdown()


@asynccontextmanager
async def listening(
    address: str,
    register: Register,
    *,
    grace: float,
    services: Sequence[str] = (),
    worker_id: str = "",
    reflects: bool = False,
    max_fields: int | None = None,
    max_connections: int | None = None,
    locks: ServerLocks = OPEN_SERVER,
) -> AsyncIterator[GrpcServer]:
    """Serve at host:port (port 0: a free one) for the length of the block, with health.

    `services` are full names for health, and if it `reflects` for reflection. `worker_id`
    is a name that health knows too (`is_worker_at`). Leaving the block
    refuses further calls and gives running ones `grace` seconds. On a public port `max_fields`
    bounds a message and `max_connections` the connections. `locks` check the callers.
    ConfigError: port is taken.
    """
    server = grpc.aio.server(
        interceptors=(*locks.interceptors, StatusInterceptor(max_fields, locks.check)),
        options=(*SERVER_OPTIONS, *_connection_options(max_connections)),
        maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
    )
    register(server)
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", *services, *filter(None, (worker_id,))):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    if reflects:
        reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server)
    port = _bound(server, address, locks.credentials)
    await server.start()
    try:
        yield GrpcServer(port, servicer)
    finally:
        await servicer.enter_graceful_shutdown()
        await server.stop(grace)


def _connection_options(max_connections: int | None) -> Options:
    """Limits connections, and the time until a client has completed its handshake. Pings find
    silent peers."""
    if max_connections is None:
        return ()
    return (
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    )


def _bound(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None
) -> int:
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}; is the port taken?") from error
    if port == 0:
        raise ConfigError(f"cannot listen on {address}; is the port taken?")
    return port


@contextmanager
def ending(call: C) -> Iterator[C]:
    """Used around every streaming call: the call ends with the block, also after an error.

    Cancelling a task that reads a stream does not always cancel the call: while the request is
    still being sent, the library loses the cancellation, and the servicer would go on for ever.
    """
    try:
        yield call
    finally:
        call.cancel()


async def next_message(call: Any) -> Any:
    """The next message of a streaming call. Raises gRPC's error if the call has ended."""
    answer = await call.read()
    if answer is grpc.aio.EOF:
        code, details = await call.code(), await call.details()
        initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
        raise grpc.aio.AioRpcError(code, initial, trailing, details)
    return answer


def remaining_seconds(context: Context, at_most: float) -> float:
    """The time left until the caller's deadline, at most `at_most`; raises DeadlineExceeded if none
    is."""
    left = context.time_remaining()
    if left is not None and left <= 0:
        raise DeadlineExceeded("the deadline had passed when the call arrived")
    return at_most if left is None else min(left, at_most)


@dataclass(frozen=True, slots=True)
class CallTags:
    """The request that some work is for, in logs and traces."""

    request_id: str = ""
    attempt: int = 0
    traceparent: str = ""


NO_TAGS = CallTags()


def tags_for(context: RequestContext) -> CallTags:
    """The tags of all work for one attempt."""
    return CallTags(context.request_id, context.attempt, context.traceparent)
