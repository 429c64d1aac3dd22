"""A router without workers behind a real gRPC server, and a connection to it that can be cut.

Its tokens are a function of their position. It remembers requests by id as the real one does, and
disturbs a stream as its script says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from ferryman.client import (
    Client,
    FinishReason,
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    LifecycleEvent,
    ModelCard,
    Retries,
    RouteCandidate,
    RouteExplanation,
    TokenChunk,
    Usage,
)
from ferryman.handoff.usage import CachedTokens
from ferryman.wire.codec.inference import (
    event_to_wire,
    explanation_to_wire,
    lifecycle_to_wire,
    model_to_wire,
)
from ferryman.wire.codec.scalars import token_ids_to_bytes
from ferryman.wire.grpc.rpc import Context, listening
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman.wire.v1 import inference_pb2_grpc

QUICK = Retries(max_failures=3, first_seconds=0.001, max_seconds=0.002, outage_seconds=20.0)
CARD = ModelCard("demo", "GraniteMoeHybridForCausalLM", "float32", 4096, 16, "d" * 32, 1, 512)
ROUTE = RouteExplanation(
    1,
    RouteCandidate(
        "prefill-00000001",
        "decode-00000001",
        *(0.0, 0.001, 0.02, 0.003, 0.024),
        usable_tokens=64,
        host_tokens=32,
        device_tokens=16,
        peer_tokens=16,
        plane="nixl",
    ),
    (
        RouteCandidate(
            "prefill-00000002", "decode-00000001", 0.1, 0.0, 0.05, 0.003, 0.153, 0, 0, plane="grpc"
        ),
    ),
)
USAGE = Usage(prompt_tokens=64, completion_tokens=5, cached=CachedTokens(device=32, host=16))

RECEIVED = LifecycleEvent("router", "router-00000001", "received", "{}", 1)

Hook = Callable[[int], Awaitable[None]]


def token_id(position: int) -> int:
    return (position * 37 + 11) % 500


def text_of(position: int) -> str:
    return f" word{position}"


async def nothing(_offset: int) -> None:
    """A hook that leaves the stream undisturbed."""


@dataclass
class FakeRouter(inference_pb2_grpc.InferenceServiceServicer):
    """`before` gets the offset of each token before it is sent; it may break or fail things."""

    num_tokens: int = 5
    before: Hook = nothing
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    was_cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    token: Callable[[int], int] = token_id
    events: tuple[LifecycleEvent, ...] = (RECEIVED,)

    @property
    def offsets(self) -> list[int]:
        return [request.resume_from_offset for request in self.requests]

    @property
    def ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    @property
    def sent(self) -> list[tuple[str, int]]:
        """The ids, each with the number of times that its caller sent it before."""
        return [(request.request_id, request.num_sent_before) for request in self.requests]

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        headers = dict(context.invocation_metadata() or ())
        self.authorizations.append(str(headers.get("authorization", "")))
        try:
            async for event in self._events(request):
                yield event_to_wire(event)
        except (asyncio.CancelledError, GeneratorExit):
            self.was_cancelled.set()
            raise

    async def _events(self, request: pb.GenerateRequest) -> AsyncIterator[GenerateEvent]:
        yield GenerateStarted(request.request_id, "demo", 64, 7)
        for offset in range(request.resume_from_offset, self.num_tokens):
            await self.before(offset)
            yield TokenChunk(offset, (self.token(offset),), text_of(offset))
        await self.before(self.num_tokens)
        yield GenerateFinished(FinishReason.LENGTH, USAGE, ".")

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        await self.before(-1)
        return pb.ExplainResponse(
            request_id=request.request_id, routes=[explanation_to_wire(ROUTE)]
        )

    async def Trace(self, request: pb.TraceRequest, context: Context) -> pb.TraceResponse:
        return pb.TraceResponse(events=[lifecycle_to_wire(event) for event in self.events])

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[model_to_wire(CARD)])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=token_ids_to_bytes(np.arange(3, dtype="<u4")))


class Wire:
    """A TCP relay: bytes pass both ways until it is cut, and then no more."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._relays: set[asyncio.Task[None]] = set()
        self.num_cuts = 0

    def cut(self) -> None:
        """Ends all connections at once, without a closing message."""
        assert self._writers, "there is no connection to cut"
        self._abort()
        self.num_cuts += 1

    def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._relays.add(asyncio.ensure_future(self._relay(reader, writer)))

    async def close(self) -> None:
        self._abort()
        if self._relays:
            await asyncio.wait(self._relays)

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, back))
            group.create_task(_copy(there, writer))
        for each in (writer, back):
            with suppress(OSError):
                await each.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def serving(router: FakeRouter) -> AsyncIterator[str]:
    """The router behind a server; yields host:port."""

    def register(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)

    async with listening("127.0.0.1:0", register, grace=0.1) as server:
        yield f"127.0.0.1:{server.port}"


@asynccontextmanager
async def wired(router: FakeRouter, retries: Retries = QUICK) -> AsyncIterator[tuple[Client, Wire]]:
    """A client that reaches the router over a wire."""
    async with serving(router) as address:
        wire = Wire(int(address.rpartition(":")[2]))
        relay = await asyncio.start_server(wire.relay, "127.0.0.1", 0)
        port = relay.sockets[0].getsockname()[1]
        async with Client(f"127.0.0.1:{port}", retries=retries, chance=lambda: 0.5) as client:
            yield client, wire
        relay.close()
        await relay.wait_closed()
        await wire.close()
