"""The router as a process: builds the parts, joins them, serves, drains."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ferryman.ids import make_epoch, make_worker_id
from ferryman.runtime.background import Background
from ferryman.runtime.life import alongside, announce_ready
from ferryman.runtime.lifecycle import LifecyclePublisher, Publisher
from ferryman.runtime.listening import listening as http_listening
from ferryman.wire.bus import Bus, Discoverable
from ferryman.wire.nats_bus import NatsOptions, nats_bus
from ferryman.wire.redis_index import redis_index
from ferryman.wire.rpc import Channels
from ferryman.wire.rpc import listening as grpc_listening
from ferryman.wire.subjects import Subjects
from ferryman.wire.v1 import inference_pb2_grpc
from ferryman_router.api.app import Door, make_app
from ferryman_router.api.callers import Callers
from ferryman_router.grpc_api import SERVICE, Inference
from ferryman_router.room import Room, Ways, make_room
from ferryman_router.served import ServedModel
from ferryman_router.settings import RouterSettings

log = logging.getLogger(__name__)

GRPC_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Router:
    """A router that serves. `stop_health` has gRPC's health say NOT_SERVING."""

    worker_id: str
    epoch: int
    http_port: int
    grpc_port: int
    room: Room
    stop_health: Callable[[], Awaitable[None]]

    async def drain(self) -> None:
        """Takes nothing new and waits for the streams under way."""
        await self.stop_health()
        await self.room.desk.drained()


async def serve(settings: RouterSettings, stopping: asyncio.Event) -> None:
    """Until `stopping` is set and every stream has ended."""
    async with running(settings) as router:
        http = f"{settings.http.host}:{router.http_port}"
        grpc = f"{settings.grpc.host}:{router.grpc_port}"
        announce_ready("router", router.worker_id, http, router.epoch, http=http, grpc=grpc)
        await stopping.wait()
        log.info("draining in_flight=%d", len(router.room.desk.journeys))
        await router.drain()


@asynccontextmanager
async def running(settings: RouterSettings) -> AsyncIterator[Router]:
    """A router for the length of a block, with both doors open."""
    load = ServedModel.load
    model = await asyncio.to_thread(load, settings.model, settings.served_name, int(time.time()))
    worker_id, epoch = make_worker_id("router"), make_epoch()
    subjects = Subjects(settings.bus.cluster)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(nats_bus(NatsOptions(settings.bus.url, worker_id)))
        index = await stack.enter_async_context(
            redis_index(settings.index.url, lookup_seconds=settings.index.lookup_seconds)
        )
        channels = await stack.enter_async_context(Channels())
        background = await stack.enter_async_context(Background())
        lifecycle = LifecyclePublisher(bus, subjects, Publisher("router", worker_id, epoch))
        ways = Ways(bus, subjects, channels, lifecycle, index)
        room = make_room(settings.limits, model, worker_id, ways, background)
        await stack.enter_async_context(room.listener.listening())
        await stack.enter_async_context(alongside(room.dispatcher.run(room.desk.journeys.look)))
        yield await _open_doors(stack, settings, room, ways, (worker_id, epoch))


async def _open_doors(
    stack: AsyncExitStack,
    settings: RouterSettings,
    room: Room,
    ways: Ways,
    life: tuple[str, int],
) -> Router:
    """Opens HTTP and gRPC, and lets itself be discovered."""
    callers = Callers(settings.keys, settings.limits.deadline_seconds)
    door = Door(room.desk, callers, _readiness(room, ways.bus), settings.limits.max_body_bytes)
    http_port = await stack.enter_async_context(http_listening(make_app(door), settings.http))
    servicer = Inference(room.desk, callers, ways.bus, ways.subjects)

    def register(server: Any) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)

    address = f"{settings.grpc.host}:{settings.grpc.port}"
    listening = await stack.enter_async_context(
        grpc_listening(address, register, grace=GRPC_GRACE_SECONDS, services=(SERVICE,))
    )
    where = {"http": str(http_port), "grpc": str(listening.port), "worker_id": life[0]}
    found = Discoverable("ferryman-router", "1.0.0", "Takes requests in, routes them", where)
    await stack.enter_async_context(ways.bus.discoverable(found))
    log.info("serving http=%d grpc=%d", http_port, listening.port)
    return Router(*life, http_port, listening.port, room, listening.drain)


def _readiness(room: Room, bus: Bus) -> Callable[[], tuple[bool, Mapping[str, Any]]]:
    def readiness() -> tuple[bool, Mapping[str, Any]]:
        """Ready with one usable worker of each role; degraded while the broker is away."""
        now = time.monotonic()
        workers = {role: len(room.fleet.usable(role, now)) for role in ("prefill", "decode")}
        is_draining = room.desk.is_draining
        is_ready = all(workers.values()) and not is_draining
        state = "draining" if is_draining else "ready" if is_ready else "waiting for workers"
        if is_ready and not bus.is_connected:
            state = "degraded"
        return is_ready, {"status": state, "workers": workers, "broker": bus.is_connected}

    return readiness
