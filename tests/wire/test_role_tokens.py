"""Every method of the inner services, asked by every role, by strangers and with forged tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferryman.cluster_key import SECRET_BYTES, ClusterKey
from ferryman.credentials import ClusterRole, credentials_of
from ferryman.wire.grpc.role_tokens import (
    ALLOWED,
    OPEN_SERVER,
    GrpcAccess,
    check_caller,
)
from ferryman.wire.grpc.rpc import channel, listening
from ferryman.wire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    hostcache_pb2,
    hostcache_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

KEY = ClusterKey(bytes(range(SECRET_BYTES)))
TOKENS = {role: credentials_of(KEY, role).grpc_token for role in ClusterRole}
INNER = (prefill_pb2, decode_pb2, hostcache_pb2)
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def inner_methods() -> dict[str, Any]:
    """The descriptors of all methods between services, by the path that gRPC sends."""
    services = [each for file in INNER for each in file.DESCRIPTOR.services_by_name.values()]
    return {
        f"/{service.full_name}/{method.name}": method
        for service in services
        for method in service.methods
    }


class Refusals(list[tuple[str, str]]):
    """Those that the server told of."""

    def add(self, method: str, reason: str) -> None:
        self.append((method, reason))


class ForRouters(decode_pb2_grpc.DecodeServiceServicer):
    """Its Abort is an order that only a router may give."""

    async def Abort(self, request: Any, context: Any) -> decode_pb2.AbortResponse:
        check_caller(ClusterRole.ROUTER)
        return decode_pb2.AbortResponse()


def register(server: grpc.aio.Server) -> None:
    """All methods, none of them written: an allowed call fails as a bug does."""
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(
        prefill_pb2_grpc.PrefillServiceServicer(), server
    )
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(
        decode_pb2_grpc.DecodeServiceServicer(), server
    )
    hostcache_pb2_grpc.add_HostCacheServiceServicer_to_server(
        hostcache_pb2_grpc.HostCacheServiceServicer(), server
    )


@asynccontextmanager
async def locked() -> AsyncIterator[tuple[str, Refusals]]:
    refusals = Refusals()
    of_any = credentials_of(KEY, ClusterRole.DECODE)
    locks = GrpcAccess(of_any).locks(refusals.add)
    async with listening("127.0.0.1:0", register, grace=0, locks=locks) as server:
        yield f"127.0.0.1:{server.port}", refusals


async def status_of_call(way: grpc.aio.Channel, path: str, method: Any) -> grpc.StatusCode:
    """The status of one call with an empty message."""
    shape = "_".join(
        "stream" if streams else "unary"
        for streams in (method.client_streaming, method.server_streaming)
    )

    async def messages() -> AsyncIterator[bytes]:
        yield b""

    call = getattr(way, shape)(path)(messages() if method.client_streaming else b"", timeout=120)
    try:
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_every_method_between_services_has_its_line() -> None:
    assert set(ALLOWED) == {*inner_methods(), REFLECTION}
    assert all(ALLOWED.values())


@pytest.mark.parametrize("role", ClusterRole)
async def test_a_role_may_call_its_methods_and_no_others(role: ClusterRole) -> None:
    expected = {
        path: grpc.StatusCode.INTERNAL
        if role in ALLOWED[path]
        else grpc.StatusCode.PERMISSION_DENIED
        for path in inner_methods()
    }
    async with locked() as (address, refusals), channel(address, TOKENS[role]) as way:
        found = {
            path: await status_of_call(way, path, method)
            for path, method in inner_methods().items()
        }
    assert found == expected
    refused = [path for path, code in expected.items() if code != grpc.StatusCode.INTERNAL]
    assert refusals == [(path, "PermissionDenied") for path in refused]


@pytest.mark.parametrize("token", ["", "a guess", TOKENS[ClusterRole.ROUTER] + " "])
async def test_a_stranger_calls_nothing_and_is_counted(token: str) -> None:
    async with locked() as (address, refusals), channel(address, token) as way:
        codes = {
            await status_of_call(way, path, method) for path, method in inner_methods().items()
        }
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}
    assert refusals == [(path, "Unauthenticated") for path in inner_methods()]


@pytest.mark.parametrize(
    "pairs",
    [
        (("authorization", f"Bearer {TOKENS[ClusterRole.ROUTER]}"),) * 2,
        (("authorization", TOKENS[ClusterRole.ROUTER]),),
        (("authorization", f"bearer {TOKENS[ClusterRole.ROUTER]}"),),
        (("authorization-bin", f"Bearer {TOKENS[ClusterRole.ROUTER]}".encode()),),
    ],
)
async def test_a_token_in_another_form_is_none(pairs: tuple[tuple[str, Any], ...]) -> None:
    path = "/ferryman.wire.v1.DecodeService/Abort"
    async with locked() as (address, _), channel(address) as way:
        abort: Any = way.unary_unary(path)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await abort(b"", metadata=pairs)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_open_to_all() -> None:
    async with locked() as (address, refusals), channel(address) as way:
        asked = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(way).Check(asked, timeout=120)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert refusals == []


async def test_a_method_without_a_line_is_refused_to_every_role() -> None:
    async with locked() as (address, _), channel(address, TOKENS[ClusterRole.ROUTER]) as way:
        list_models: Any = way.unary_unary("/ferryman.wire.v1.InferenceService/ListModels")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_models(b"")
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("role", "code"),
    [
        (ClusterRole.ROUTER, grpc.StatusCode.OK),
        (ClusterRole.PREFILL, grpc.StatusCode.PERMISSION_DENIED),
    ],
)
async def test_an_order_is_taken_from_its_role_alone(
    role: ClusterRole, code: grpc.StatusCode
) -> None:
    def for_routers(server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(ForRouters(), server)

    path = "/ferryman.wire.v1.DecodeService/Abort"
    locks = GrpcAccess(credentials_of(KEY, ClusterRole.DECODE)).locks(Refusals().add)
    async with listening("127.0.0.1:0", for_routers, grace=0, locks=locks) as server:
        async with channel(f"127.0.0.1:{server.port}", TOKENS[role]) as way:
            assert await status_of_call(way, path, inner_methods()[path]) is code


async def test_an_open_cluster_asks_nobody() -> None:
    assert GrpcAccess(None).locks(Refusals().add) == OPEN_SERVER
    check_caller(ClusterRole.ROUTER)
