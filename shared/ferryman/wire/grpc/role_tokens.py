"""Callers between the services: a token in a call's metadata proves the role that allows the call.

A server knows the tokens' digests, so it cannot speak for another role. Health is open to all:
container engines ask it. A method without a line in the table is refused to everyone.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc
import grpc.aio

from ferryman.errors import FerrymanError, PermissionDenied, Unauthenticated
from ferryman.security.credentials import ClusterRole, RoleCredentials
from ferryman.security.tls import (
    PLAINTEXT,
    ChannelSecurity,
    MutualTls,
    TlsSource,
    certified_name,
    mutual_credentials,
)
from ferryman.wire.grpc.interceptor import Check, Context
from ferryman.wire.grpc.status import failure_of, status_of

log = logging.getLogger(__name__)

TOKEN_KEY = "authorization"
SCHEME = "Bearer "
NO_TOKEN = ""
UNKNOWN = "unknown"
OPEN_SERVICES = ("grpc.health.v1.Health",)

Refused = Callable[[str, str], None]
Pairs = Sequence[tuple[str, str | bytes]]

_WORKERS = frozenset({ClusterRole.PREFILL, ClusterRole.DECODE, ClusterRole.BOTH})
_ROUTER = frozenset({ClusterRole.ROUTER})
_DECODE = frozenset({ClusterRole.DECODE})
# A decode worker hands off the requests that leave it, as prefill does its prompts.
_WRITERS = _WORKERS
_HOSTCACHE = frozenset({ClusterRole.HOST_CACHE})
_OBSERVER = frozenset({ClusterRole.OBSERVER})

ALLOWED: Mapping[str, frozenset[ClusterRole]] = {
    "/ferryman.wire.v1.PrefillService/Prefill": _ROUTER,
    "/ferryman.wire.v1.PrefillService/StopWriting": _DECODE,
    "/ferryman.wire.v1.DecodeService/Reserve": _WRITERS,
    "/ferryman.wire.v1.DecodeService/Renew": _WRITERS,
    "/ferryman.wire.v1.DecodeService/WritePages": _WRITERS,
    "/ferryman.wire.v1.DecodeService/LandPages": _WRITERS,
    "/ferryman.wire.v1.DecodeService/Commit": _WRITERS,
    "/ferryman.wire.v1.DecodeService/Abort": _WRITERS | _ROUTER,
    "/ferryman.wire.v1.DecodeService/Tokens": _ROUTER,
    "/ferryman.wire.v1.DecodeService/Detach": _ROUTER,
    "/ferryman.wire.v1.DecodeService/HandOff": _ROUTER,
    "/ferryman.wire.v1.HostCacheService/Attach": _WORKERS,
    "/ferryman.wire.v1.HostCacheService/Acquire": _WORKERS,
    "/ferryman.wire.v1.HostCacheService/Renew": _WORKERS,
    "/ferryman.wire.v1.HostCacheService/Release": _WORKERS,
    "/ferryman.wire.v1.HostCacheService/Reserve": _WORKERS,
    "/ferryman.wire.v1.HostCacheService/Commit": _WORKERS,
    "/ferryman.wire.v1.HostCacheService/Prefetch": _WORKERS | _ROUTER,
    "/ferryman.wire.v1.HostCacheService/Lookup": _HOSTCACHE | _ROUTER,
    "/ferryman.wire.v1.HostCacheService/Fetch": _HOSTCACHE | _ROUTER,
    "/ferryman.wire.v1.HostCacheService/Deposit": _ROUTER,
    "/ferryman.wire.v1.HostCacheService/Stats": _OBSERVER,
    "/ferryman.wire.v1.ProbeService/Echo": _WORKERS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OBSERVER,
}


def refusal(method: str, role: ClusterRole | None) -> FerrymanError | None:
    """The error for a caller in this role, if it may not call `method`; None is a stranger."""
    if method.split("/")[1] in OPEN_SERVICES:
        return None
    if role is None:
        return Unauthenticated("the call has no token of this cluster; see CREDENTIALS_FILE")
    if role not in ALLOWED.get(method, frozenset()):
        return PermissionDenied(f"a process of role {role} may not call {method}")
    return None


def role_in(credentials: RoleCredentials, metadata: Pairs) -> ClusterRole | None:
    """The caller's role. None without a known token; two headers are as bad as none."""
    values = [value for key, value in metadata if key == TOKEN_KEY]
    if len(values) != 1 or not isinstance(values[0], str):
        return None
    if not values[0].startswith(SCHEME):
        return None
    return credentials.role_of(values[0].removeprefix(SCHEME))


def check_caller(*roles: ClusterRole) -> None:
    """For an order that only `roles` may give, in a method that others may call too.

    Raises PermissionDenied when the running call came from another role of a locked cluster; it is
    counted like a call that may not be made at all.
    """
    caller = _caller.get()
    if caller is None or caller.role in (None, *roles):
        return
    allowed = " or ".join(roles)
    refuse_call(PermissionDenied(f"only a process of role {allowed} may give this order"))


def is_called_by(role: ClusterRole) -> bool:
    """Whether the running call came from this role; never in an open cluster."""
    caller = _caller.get()
    return caller is not None and caller.role is role


def refuse_call(error: FerrymanError) -> NoReturn:
    """Ends the running call by raising `error`; it is counted like a call that may not be made at
    all."""
    caller = _caller.get()
    if caller is not None:
        caller.refused(caller.method, error.reason)
    raise error


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls that their caller may not make, before a byte of their message is parsed.

    `refused` gets the method and the reason of each: `Unauthenticated` or `PermissionDenied`.
    """

    def __init__(self, credentials: RoleCredentials, refused: Refused) -> None:
        self._credentials, self._refused = credentials, refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = str(handler_call_details.method)
        role = role_in(self._credentials, tuple(handler_call_details.invocation_metadata))
        error = refusal(method, role)
        if error is None:
            _caller.set(CallingRole(role, method, self._refused))
            return await continuation(handler_call_details)
        label = method if method in ALLOWED else UNKNOWN  # a stranger makes no label of a metric
        self._refused(label, error.reason)
        return _refusing(error)


def certificate_check(refused: Refused) -> Check:
    """Refuses a caller whose certificate is not of the role that its token proves.

    A token that was read elsewhere is of no use without the certificate, and a certificate of none
    without the token.
    """

    def check(method: str, context: Context) -> None:
        caller = _caller.get()
        role = caller.role if caller is not None else None
        if role is None or certified_name(context) == role:
            return
        refused(method if method in ALLOWED else UNKNOWN, PermissionDenied.__name__)
        raise PermissionDenied(f"the certificate is not one of role {role}, which the token says")

    return check


@dataclass(frozen=True, slots=True)
class ServerLocks:
    """A server's questions to its callers: the connection's `credentials` (None: no TLS), then the
    `interceptors`, then the `check`, which sees the certificate."""

    interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()
    credentials: grpc.ServerCredentials | None = None
    check: Check | None = None


OPEN_SERVER = ServerLocks()


@dataclass(frozen=True, slots=True)
class GrpcAccess:
    """A process's way of showing others its role, and of asking theirs. Without `credentials` it
    shows and asks for nothing: an open cluster. With `tls`, too, both ends show certificates."""

    credentials: RoleCredentials | None
    tls: TlsSource | None = field(default=None, repr=False)

    @property
    def token(self) -> str:
        """The token of its own calls."""
        return self.credentials.grpc_token if self.credentials else NO_TOKEN

    @property
    def security(self) -> ChannelSecurity:
        """The security of its own connections."""
        return MutualTls(self.tls) if self.tls else PLAINTEXT

    @property
    def authorities(self) -> Callable[[], bytes] | None:
        """The newest authorities that certify other servers of the cluster, such as NATS."""
        tls = self.tls
        return (lambda: tls().authorities) if tls else None

    def locks(self, refused: Refused) -> ServerLocks:
        """Its server asks these before it takes a call."""
        if self.credentials is None:
            return OPEN_SERVER
        interceptors = (TokenInterceptor(self.credentials, refused),)
        if self.tls is None:
            return ServerLocks(interceptors)
        return ServerLocks(interceptors, mutual_credentials(self.tls), certificate_check(refused))


OPEN_TO_ALL = GrpcAccess(None)


@dataclass(frozen=True, slots=True)
class CallingRole:
    """The caller of a running call, and what is called when one of its orders is refused. `role` is
    None if no token is required."""

    role: ClusterRole | None
    method: str
    refused: Refused


# Set by the interceptor, in the task that then runs the method.
_caller: ContextVar[CallingRole | None] = ContextVar("caller", default=None)


def _refusing(error: FerrymanError) -> Any:
    """A handler that ends every call with `error`; this shape of rpc reads no message first."""
    code, details, trailers = status_of(failure_of(error))

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(code, details, trailers)

    return grpc.stream_stream_rpc_method_handler(refuse)


class TokenChannel:
    """A channel whose every call carries `token`.

    It offers what stubs and `Channels` use. gRPC's call credentials would refuse a connection
    without TLS, and its interceptors lose cancellations of streams.
    """

    def __init__(self, inner: grpc.aio.Channel, token: str) -> None:
        self._inner = inner
        self._pair = (TOKEN_KEY, SCHEME + token)
        self.close, self.channel_ready = inner.close, inner.channel_ready
        self.get_state = inner.get_state
        self.wait_for_state_change = inner.wait_for_state_change
        self.unary_unary = self._carrying(inner.unary_unary)
        self.unary_stream = self._carrying(inner.unary_stream)
        self.stream_unary = self._carrying(inner.stream_unary)
        self.stream_stream = self._carrying(inner.stream_stream)

    def _carrying(self, shape: Callable[..., Any]) -> Callable[..., Any]:
        def of_method(method: str, *serializers: Any, **options: Any) -> Callable[..., Any]:
            inner = shape(method, *serializers, **options)

            def call(*message: Any, metadata: Pairs = (), **options: Any) -> Any:
                return inner(*message, metadata=(*metadata, self._pair), **options)

            return call

        return of_method

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)
