"""Every method of the inner services, asked by every role, by strangers and with forged tokens."""

from __future__ import annotations

import pkgutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.cluster_keys import KEY, STRANGERS_KEY, token_of
from tests.refused_calls import answers_to

from ferryman.errors import FerrymanError, PermissionDenied, Unauthenticated
from ferryman.runtime.metrics import Metrics, refused_calls
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.wire import v1
from ferryman.wire.grpc.role_tokens import (
    ALLOWED,
    OPEN_SERVER,
    GrpcAccess,
    check_caller,
)
from ferryman.wire.grpc.rpc import channel, listening
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc

TOKENS = {role: token_of(role) for role in ClusterRole}
PUBLIC = "ferryman.wire.v1.InferenceService"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PROBE = "/ferryman.wire.v1.ProbeService/Echo"
ROUTER, PREFILL, DECODE = ClusterRole.ROUTER, ClusterRole.PREFILL, ClusterRole.DECODE
HOST_CACHE, OBSERVER = ClusterRole.HOST_CACHE, ClusterRole.OBSERVER
WORKERS = {PREFILL, DECODE, ClusterRole.BOTH}

# The roles that may call a method, written down a second time: one that is added to a .proto file
# needs a line here, too.
MAY_CALL: Mapping[str, set[ClusterRole]] = {
    "PrefillService/Prefill": {ROUTER},
    "PrefillService/StopWriting": {DECODE},
    "DecodeService/Reserve": WORKERS,
    "DecodeService/Renew": WORKERS,
    "DecodeService/WritePages": WORKERS,
    "DecodeService/LandPages": WORKERS,
    "DecodeService/Commit": WORKERS,
    "DecodeService/Abort": WORKERS | {ROUTER},
    "DecodeService/Tokens": {ROUTER},
    "DecodeService/Detach": {ROUTER},
    "DecodeService/HandOff": {ROUTER},
    "HostCacheService/Attach": WORKERS,
    "HostCacheService/Acquire": WORKERS,
    "HostCacheService/Renew": WORKERS,
    "HostCacheService/Release": WORKERS,
    "HostCacheService/Reserve": WORKERS,
    "HostCacheService/Commit": WORKERS,
    "HostCacheService/Prefetch": WORKERS | {ROUTER},
    "HostCacheService/Lookup": {HOST_CACHE, ROUTER},
    "HostCacheService/Fetch": {HOST_CACHE, ROUTER},
    "HostCacheService/Deposit": {ROUTER},
    "HostCacheService/Stats": {OBSERVER},
}
METHODS = {f"/ferryman.wire.v1.{name}": roles for name, roles in MAY_CALL.items()}


def methods_in_protos() -> set[str]:
    """Every method of every service that the .proto files describe, but those for clients."""
    names = [each.name for each in pkgutil.iter_modules(v1.__path__) if each.name.endswith("_pb2")]
    files = [import_module(f"{v1.__name__}.{name}").DESCRIPTOR for name in names]
    services = [each for file in files for each in file.services_by_name.values()]
    assert PUBLIC in {service.full_name for service in services}
    return {
        f"/{service.full_name}/{method.name}"
        for service in services
        if service.full_name != PUBLIC
        for method in service.methods
    }


@dataclass
class LockedServer(grpc.GenericRpcHandler):
    """A server with the locks of a decode worker. Its methods note only that they are `reached`."""

    address: str = ""
    reached: list[str] = field(default_factory=list)
    metrics: Metrics = field(default_factory=lambda: Metrics("decode"))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """A handler for any method: on the wire all shapes of rpc look the same."""
        path = str(handler_call_details.method)

        async def note(_message: Any, _context: Any) -> bytes:
            self.reached.append(path)
            return b""

        return grpc.unary_unary_rpc_method_handler(note) if path in METHODS else None

    @property
    def counted(self) -> dict[tuple[str, str], float]:
        """The refused calls that its metrics show, by method and reason."""
        return {
            (sample.labels["method"], sample.labels["reason"]): sample.value
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "ferryman_decode_refused_calls_total"
        }

    async def ask_all(self, token: str) -> dict[str, type[FerrymanError] | None]:
        """Calls every method: how each refused, or None."""
        found: dict[str, type[FerrymanError] | None] = {}
        for path in METHODS:
            try:
                await answers_to(self.address, token, path, [b""])
                found[path] = None
            except FerrymanError as error:
                found[path] = type(error)
        return found


@asynccontextmanager
async def locked() -> AsyncIterator[LockedServer]:
    server = LockedServer()
    locks = GrpcAccess(credentials_of(KEY, DECODE)).locks(refused_calls(server.metrics))

    def register(to: grpc.aio.Server) -> None:
        to.add_generic_rpc_handlers((server,))

    async with listening("127.0.0.1:0", register, grace=0, locks=locks) as listens:
        server.address = f"127.0.0.1:{listens.port}"
        yield server


def test_every_method_between_services_has_its_line() -> None:
    assert methods_in_protos() == set(METHODS)
    # A probe's messages are plain bytes, so no file of protos names it.
    assert dict(ALLOWED) == {**METHODS, PROBE: WORKERS, REFLECTION: {OBSERVER}}


@pytest.mark.parametrize("role", ClusterRole)
async def test_a_role_reaches_its_methods_and_is_counted_at_all_others(role: ClusterRole) -> None:
    own = [path for path, roles in METHODS.items() if role in roles]
    others = [path for path in METHODS if path not in own]
    async with locked() as server:
        found = await server.ask_all(TOKENS[role])
    assert found == {**dict.fromkeys(own), **dict.fromkeys(others, PermissionDenied)}
    assert server.reached == own
    assert server.counted == {(path, "PermissionDenied"): 1.0 for path in others}


STRANGERS = {
    "no token": "",
    "a guess": "a guess",
    "a router's, with a space": f"{TOKENS[ROUTER]} ",
    # As of another cluster, or of this one before its key was changed: tokens last as long as it.
    **{f"a {role}'s under another key": token_of(role, STRANGERS_KEY) for role in (ROUTER, DECODE)},
}


@pytest.mark.parametrize("token", STRANGERS.values(), ids=STRANGERS)
async def test_a_stranger_reaches_nothing_and_is_counted(token: str) -> None:
    async with locked() as server:
        found = await server.ask_all(token)
    assert found == dict.fromkeys(METHODS, Unauthenticated)
    assert server.reached == []
    assert server.counted == {(path, "Unauthenticated"): 1.0 for path in METHODS}


async def test_a_refusal_is_heard_while_the_caller_still_sends() -> None:
    path, frames = "/ferryman.wire.v1.DecodeService/WritePages", [bytes(1 << 16)] * 32
    async with locked() as server:
        for _ in range(8):
            with pytest.raises(Unauthenticated):
                await answers_to(server.address, "", path, frames)
    assert server.counted == {(path, "Unauthenticated"): 8.0}


@pytest.mark.parametrize(
    "pairs",
    [
        (("authorization", f"Bearer {TOKENS[ROUTER]}"),) * 2,
        (("authorization", TOKENS[ClusterRole.ROUTER]),),
        (("authorization", f"bearer {TOKENS[ROUTER]}"),),
        (("authorization-bin", f"Bearer {TOKENS[ROUTER]}".encode()),),
    ],
)
async def test_a_token_in_another_form_is_none(pairs: tuple[tuple[str, Any], ...]) -> None:
    path = "/ferryman.wire.v1.DecodeService/Abort"
    async with locked() as server, channel(server.address) as way:
        abort: Any = way.unary_unary(path)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await abort(b"", metadata=pairs)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert server.reached == []


async def test_health_is_open_to_all() -> None:
    async with locked() as server, channel(server.address) as way:
        asked = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(way).Check(asked, timeout=120)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert server.counted == {}


async def test_a_method_without_a_line_is_refused_to_every_role() -> None:
    async with locked() as server:
        with pytest.raises(PermissionDenied):
            await answers_to(server.address, TOKENS[ROUTER], f"/{PUBLIC}/ListModels", [b""])
    assert server.counted == {("unknown", "PermissionDenied"): 1.0}, "no label of a caller's making"


class ForRouters(decode_pb2_grpc.DecodeServiceServicer):
    """Its Abort is an order that only a router may give."""

    async def Abort(self, request: Any, context: Any) -> decode_pb2.AbortResponse:
        check_caller(ROUTER)
        return decode_pb2.AbortResponse()


async def test_an_order_is_taken_from_its_role_alone() -> None:
    def for_routers(server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(ForRouters(), server)

    path, refused = "/ferryman.wire.v1.DecodeService/Abort", list[tuple[str, str]]()
    locks = GrpcAccess(credentials_of(KEY, DECODE)).locks(lambda *call: refused.append(call))
    async with listening("127.0.0.1:0", for_routers, grace=0, locks=locks) as server:
        address = f"127.0.0.1:{server.port}"
        assert await answers_to(address, TOKENS[ROUTER], path, [b""]) == (b"",)
        with pytest.raises(PermissionDenied, match="role router"):
            await answers_to(address, TOKENS[PREFILL], path, [b""])
    assert refused == [(path, "PermissionDenied")]


async def test_an_open_cluster_asks_nobody() -> None:
    assert GrpcAccess(None).locks(refused_calls(Metrics("decode"))) == OPEN_SERVER
    check_caller(ROUTER)
