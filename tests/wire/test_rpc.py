"""A loopback server with all four shapes of rpc: statuses, deadlines, health, cancellation."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.refused_calls import answers_to
from tests.wire.proxy import holding_proxy

from ferryman.errors import (
    ConfigError,
    DeadlineExceeded,
    FerrymanError,
    InvalidRequest,
    OutOfSlots,
    PermissionDenied,
    TooLarge,
    Unavailable,
)
from ferryman.wire.grpc import rpc
from ferryman.wire.grpc.role_tokens import OPEN_SERVER, ServerLocks
from ferryman.wire.grpc.rpc import Channels, GrpcServer, channel, listening
from ferryman.wire.grpc.status import typed_errors

SERVICE = "tests.Shapes"
SHAPES = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


def understood(raw: bytes) -> bytes:
    """Raises ValueError, as protobuf does, for bytes that are no message."""
    if raw == b"garbled":
        raise ValueError("the parser's own words")
    return raw


class Shapes:
    """Answers, or fails, as the first request says."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.ended = asyncio.Event()
        self.remaining = 0.0
        self.num_answers = 0

    async def unary_unary(self, request: bytes, context: rpc.Context) -> bytes:
        return await self._answer(request, context)

    async def unary_stream(self, request: bytes, context: rpc.Context) -> AsyncIterator[bytes]:
        yield b"first"
        yield await self._answer(request, context)

    async def stream_unary(self, requests: AsyncIterator[bytes], context: rpc.Context) -> bytes:
        return await self._answer(b"".join([each async for each in requests]), context)

    async def stream_stream(
        self, requests: AsyncIterator[bytes], context: rpc.Context
    ) -> AsyncIterator[bytes]:
        yield b"first"
        async for request in requests:
            yield await self._answer(request, context)

    async def _answer(self, request: bytes, context: rpc.Context) -> bytes:
        self.remaining = rpc.remaining_seconds(context, 3600)
        self.num_answers += 1
        match request:
            case b"slots":
                raise OutOfSlots("no room", 2.5)
            case b"bug":
                raise ZeroDivisionError("secret")
            case b"abort":
                await context.abort(grpc.StatusCode.ABORTED, "by hand")
            case b"hang":
                await self._hang()
        return b"answer to " + request[:9]

    async def _hang(self) -> None:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    def register(self, server: grpc.aio.Server) -> None:
        handlers = {
            shape: getattr(grpc, f"{shape}_rpc_method_handler")(
                getattr(self, shape), request_deserializer=understood
            )
            for shape in SHAPES
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        server.add_generic_rpc_handlers((generic,))


@asynccontextmanager
async def serving(
    shapes: Shapes, *, reflects: bool = False, locks: ServerLocks = OPEN_SERVER
) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    async with listening(
        "127.0.0.1:0",
        shapes.register,
        grace=1.0,
        services=(SERVICE,),
        reflects=reflects,
        locks=locks,
    ) as server:
        async with channel(f"127.0.0.1:{server.port}") as connection:
            yield server, connection


async def call(connection: grpc.aio.Channel, shape: str, request: bytes, **kw: Any) -> bytes:
    """The last response of a call of any shape."""

    async def requests() -> AsyncIterator[bytes]:
        yield request

    method: Any = getattr(connection, shape)(f"/{SERVICE}/{shape}")
    with rpc.ending(method(requests() if shape.startswith("stream") else request, **kw)) as started:
        if not shape.endswith("stream"):
            return bytes(await started)
        return [bytes(each) async for each in started][-1]


async def refused(
    server: GrpcServer, connection: grpc.aio.Channel, shape: str, request: bytes
) -> None:
    """Raises the refusal of a call. The stream of requests may still be under way when it comes,
    and gRPC loses the status when a write fails beside it (grpc#36066)."""
    if shape == "stream_stream":
        await answers_to(f"127.0.0.1:{server.port}", "", f"/{SERVICE}/{shape}", [request])
        return
    with typed_errors():
        await call(connection, shape, request)


@pytest.mark.parametrize("shape", SHAPES)
async def test_answers_pass_unchanged(shape: str) -> None:
    async with serving(Shapes()) as (_, connection):
        assert await call(connection, shape, b"x") == b"answer to x"


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_typed_error_reaches_the_client(shape: str) -> None:
    async with serving(Shapes()) as (server, connection):
        with pytest.raises(OutOfSlots, match="no room") as caught:
            await refused(server, connection, shape, b"slots")
    assert caught.value.retry_after_seconds == 2.5


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_bug_is_logged_here_and_withheld_there(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Shapes()) as (server, connection):
        with caplog.at_level(logging.ERROR, "ferryman.wire.grpc.interceptor"):
            with pytest.raises(FerrymanError, match="internal error") as caught:
                await refused(server, connection, shape, b"bug")
    assert caught.value.code == "INTERNAL"
    assert "secret" not in str(caught.value)
    assert caplog.records[0].exc_info is not None
    assert shape in caplog.text


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_caller_that_the_check_refuses_reaches_no_servicer(shape: str) -> None:
    shapes, methods = Shapes(), list[str]()

    def check(method: str, _context: rpc.Context) -> None:
        methods.append(method)
        raise PermissionDenied("not you")

    async with serving(shapes, locks=ServerLocks(check=check)) as (server, connection):
        with pytest.raises(PermissionDenied, match="not you"):
            await refused(server, connection, shape, b"x")
    assert (methods, shapes.num_answers) == ([f"/{SERVICE}/{shape}"], 0)


async def test_the_check_is_asked_for_a_stream_that_is_written_by_hand() -> None:
    """Health's own, which every server has."""

    def check(_method: str, _context: rpc.Context) -> None:
        raise PermissionDenied("not you")

    async with serving(Shapes(), locks=ServerLocks(check=check)) as (_, connection):
        health = health_pb2_grpc.HealthStub(connection)
        with pytest.raises(PermissionDenied, match="not you"), typed_errors():
            await health.Watch(health_pb2.HealthCheckRequest()).read()


@pytest.mark.parametrize("shape", SHAPES)
async def test_bytes_that_are_no_message_are_the_callers_mistake(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = Shapes()
    async with serving(shapes) as (server, connection):
        with pytest.raises(InvalidRequest, match="cannot be parsed"):
            await refused(server, connection, shape, b"garbled")
    assert shapes.num_answers == 0
    assert "rpc failed" not in caplog.text, "no bug of this server"


async def test_a_servicer_may_abort_by_hand() -> None:
    async with serving(Shapes()) as (_, connection):
        with pytest.raises(grpc.aio.AioRpcError, match="by hand") as caught:
            await call(connection, "unary_stream", b"abort")
        assert caught.value.code() is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_client_that_goes_away_ends_the_servicer(shape: str) -> None:
    shapes = Shapes()
    async with serving(shapes) as (_, connection):
        going = asyncio.ensure_future(call(connection, shape, b"hang"))
        await shapes.entered.wait()
        going.cancel()
        await shapes.ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await going


async def test_a_deadline_travels_and_ends_the_call() -> None:
    shapes = Shapes()
    async with serving(shapes) as (_, connection):
        await connection.channel_ready()
        with pytest.raises(DeadlineExceeded), typed_errors():
            await call(connection, "unary_unary", b"hang", timeout=2.0)
        await shapes.ended.wait()
    assert 0 < shapes.remaining < 3


async def test_an_oversized_message_is_too_large() -> None:
    async with serving(Shapes()) as (_, connection):
        with pytest.raises(TooLarge), typed_errors():
            await call(connection, "unary_unary", bytes(rpc.MAX_MESSAGE_BYTES + 1))


async def test_health_knows_the_service() -> None:
    async with serving(Shapes()) as (server, connection):
        health = health_pb2_grpc.HealthStub(connection)
        check = health_pb2.HealthCheckRequest(service=SERVICE)
        watch = health.Watch(check)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await server.drain()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await call(connection, "unary_unary", b"x") == b"answer to x"
        watch.cancel()


async def test_reflection_is_off_unless_asked_for() -> None:
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async with serving(Shapes()) as (_, connection):
        # Nothing is sent, for gRPC loses the status when a write fails beside it (grpc#36066).
        stub = reflection_pb2_grpc.ServerReflectionStub(connection)
        with rpc.ending(stub.ServerReflectionInfo()) as refused:
            assert await refused.code() is grpc.StatusCode.UNIMPLEMENTED
    async with serving(Shapes(), reflects=True) as (_, connection):
        stub = reflection_pb2_grpc.ServerReflectionStub(connection)
        listed = [each async for each in stub.ServerReflectionInfo(iter([ask]))]
        assert SERVICE in {each.name for each in listed[0].list_services_response.service}


async def test_a_taken_port_is_a_configuration_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen"):
            async with listening(address, Shapes().register, grace=0):
                pass


async def test_a_server_that_is_slow_to_greet_is_waited_for() -> None:
    """A busy machine is not lost: a slow connection is not abandoned."""
    async with serving(Shapes()) as (server, _), holding_proxy(f"127.0.0.1:{server.port}") as proxy:
        proxy.hold_next(b"")
        async with channel(proxy.address) as slow:
            calling = asyncio.ensure_future(call(slow, "unary_unary", b"hello"))
            connection = await proxy.held.get()
            ended, _ = await asyncio.wait({calling}, timeout=0.7)
            assert not ended
            connection.answers_flow.set()
            assert await calling == b"answer to hello"
        assert proxy.num_connections == 1


async def test_leaving_waits_for_calls_under_way_and_then_nobody_is_there() -> None:
    shapes = Shapes()
    async with Channels() as channels:
        async with listening("127.0.0.1:0", shapes.register, grace=0.1) as server:
            address = f"127.0.0.1:{server.port}"
            hanging = asyncio.ensure_future(call(channels.to(address), "unary_unary", b"hang"))
            await shapes.entered.wait()
            assert channels.to(address) is channels.to(address)
        with pytest.raises((Unavailable, asyncio.CancelledError, FerrymanError)), typed_errors():
            await hanging
        with pytest.raises(Unavailable), typed_errors():
            await call(channels.to(address), "unary_unary", b"x", timeout=120)
        await channels.drop(address)


async def test_a_typed_error_keeps_its_cause() -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, nothing, nothing, "bad")
    with pytest.raises(InvalidRequest, match="bad") as caught, typed_errors():
        raise error
    assert caught.value.__cause__ is error


async def test_a_public_server_bounds_its_connections() -> None:
    async def greeting(reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(120):
            return await reader.read(1)

    async with listening("127.0.0.1:0", lambda _: None, grace=0.1, max_connections=2) as server:
        opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        greetings = [await greeting(reader) for reader, _ in opened]
        for _, writer in opened:
            writer.close()
    assert sorted(greetings) == [b"", b"\x00", b"\x00"], "one was closed unheard"
