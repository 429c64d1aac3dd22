"""The host-cache as a process: builds the parts, joins them, serves, drains."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ferryman.ids import make_epoch, make_worker_id
from ferryman.runtime.life import alongside, announce_ready
from ferryman.runtime.lifecycle import LifecyclePublisher, Publisher
from ferryman.runtime.listening import Answer, json_answer, observed
from ferryman.runtime.listening import listening as http_listening
from ferryman.runtime.metrics import CONTENT_TYPE, Metrics
from ferryman.tiers.values import StoreLimits
from ferryman.tiers.write_policy import Backups, write_policy_named
from ferryman.wire.beats import BEAT_SECONDS, beat_to_bytes
from ferryman.wire.bus import Bus, Discoverable
from ferryman.wire.host_arena import arena_name, sweep_stale_arenas
from ferryman.wire.index import NodeLife
from ferryman.wire.nats_bus import NatsOptions, nats_bus
from ferryman.wire.redis_index import redis_index
from ferryman.wire.rpc import listening as grpc_listening
from ferryman.wire.subjects import Subjects
from ferryman.wire.v1 import hostcache_pb2_grpc
from ferryman_hostcache.announcer import IndexAnnouncer
from ferryman_hostcache.arena import Arena
from ferryman_hostcache.backlog import Backlog
from ferryman_hostcache.behind import Behind, joined
from ferryman_hostcache.gauges import ROLE, ledger, make_beat, watch
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.orders import Orders
from ferryman_hostcache.server import HostCacheServicer
from ferryman_hostcache.settings import Settings
from ferryman_hostcache.storage.opening import open_storage

log = logging.getLogger(__name__)

SERVICE = "ferryman.wire.v1.HostCacheService"
GRPC_GRACE_SECONDS = 1.0
TICK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Running:
    """A host-cache that serves, and where."""

    worker_id: str
    address: str
    http_port: int
    host: HostCache
    announcer: IndexAnnouncer
    behind: Behind


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Until `stopping` is set; calls under way are finished."""
    async with running(settings, stopping.set) as service:
        identity = service.host.identity
        observe = f"{settings.observe.host}:{service.http_port}"
        announce_ready(
            ROLE,
            service.worker_id,
            service.address,
            identity.epoch,
            node=identity.node_id,
            observe=observe,
            arena=str(service.host.arena.path),
        )
        await stopping.wait()
        log.info("draining")


@asynccontextmanager
async def running(
    settings: Settings, order_drain: Callable[[], None] = lambda: None
) -> AsyncIterator[Running]:
    """A host-cache for the length of a block."""
    worker_id, identity = make_worker_id(ROLE), NodeLife(settings.node, make_epoch())
    subjects = Subjects(settings.bus.cluster)
    async with AsyncExitStack() as stack:
        arena = await stack.enter_async_context(_arena(settings, identity))
        bus = await stack.enter_async_context(nats_bus(NatsOptions(settings.bus.url, worker_id)))
        index = await stack.enter_async_context(
            redis_index(settings.index.url, lookup_seconds=settings.index.lookup_seconds)
        )
        lifecycle = LifecyclePublisher(bus, subjects, Publisher(ROLE, worker_id, identity.epoch))
        announcer = IndexAnnouncer(index, identity, lambda: host.holdings(), clock=time.monotonic)
        stack.push_async_callback(announcer.leave)
        storage = await stack.enter_async_context(
            open_storage(settings.storage, clock=time.monotonic)
        )
        backlog = Backlog(Backups(write_policy_named(settings.write_policy)))
        limits = StoreLimits(lease_seconds=settings.lease_seconds)
        host = HostCache(
            identity,
            arena,
            limits,
            settings.snapshot_share,
            announcer=announcer,
            lifecycle=lifecycle,
            clock=time.monotonic,
            storage=storage,
            backlog=backlog,
        )
        behind = await stack.enter_async_context(joined(settings, host, backlog, index))
        service = await _open_doors(stack, settings, worker_id, host, announcer, behind)
        about = {"grpc": service.address, "worker_id": worker_id, "node": identity.node_id}
        found = Discoverable("ferryman-hostcache", "1.0.0", "Keeps a node's host memory", about)
        await stack.enter_async_context(bus.discoverable(found))
        orders = Orders(host, subjects, order_drain)
        obeying = bus.answering(subjects.all_control_of(worker_id), orders.obey)
        await stack.enter_async_context(obeying)
        jobs = (announcer.run(), _tick(service), _beat(bus, subjects, service), behind.writer.run())
        await stack.enter_async_context(alongside(*jobs))
        stack.callback(announcer.stop)
        yield service


@asynccontextmanager
async def _arena(settings: Settings, identity: NodeLife) -> AsyncIterator[Arena]:
    """Allocated before anything is served; its name is gone when the block ends.

    A life before this one that was killed could not take its arena away: that is done first.
    """
    name = arena_name(settings.bus.cluster, identity.node_id, identity.epoch)
    path = settings.arena_folder / name
    for left in sweep_stale_arenas(name.removesuffix(f"{identity.epoch:016x}"), path.parent):
        log.warning("removed %s, whose owner is gone", left)
    began = time.monotonic()
    arena = await asyncio.to_thread(Arena.create, path, settings.memory_bytes)
    log.info("arena %s bytes=%d seconds=%.3f", path, arena.num_bytes, time.monotonic() - began)
    try:
        yield arena
    finally:
        arena.remove()


async def _open_doors(
    stack: AsyncExitStack,
    settings: Settings,
    worker_id: str,
    host: HostCache,
    announcer: IndexAnnouncer,
    behind: Behind,
) -> Running:
    metrics = Metrics(ROLE)
    watch(metrics, host, announcer, behind)
    endpoints = {
        "/metrics": lambda: Answer(metrics.render(), CONTENT_TYPE),
        "/health": lambda: json_answer({"status": "ready", "index_away": announcer.is_away}),
        "/debug/ledger": lambda: ledger(host),
    }
    app = observed(endpoints)
    http_port = await stack.enter_async_context(http_listening(app, settings.observe))
    servicer = HostCacheServicer(host, announcer, behind.prefetching, behind.fetches)

    def register(server: Any) -> None:
        hostcache_pb2_grpc.add_HostCacheServiceServicer_to_server(servicer, server)

    address = f"{settings.listen.host}:{settings.listen.port}"
    door = grpc_listening(address, register, grace=GRPC_GRACE_SECONDS, services=(SERVICE,))
    listening = await stack.enter_async_context(door)
    where = f"{settings.advertise}:{listening.port}"
    announcer.speaks_at(where)
    return Running(worker_id, where, http_port, host, announcer, behind)


async def _tick(service: Running) -> None:
    while True:
        if service.host.is_laid_out:
            service.behind.tick()
        service.host.tick()
        await asyncio.sleep(TICK_SECONDS)


async def _beat(bus: Bus, subjects: Subjects, service: Running) -> None:
    beats = 0
    while True:
        beats += 1
        beat = make_beat(
            service.host,
            service.behind.prefetching,
            worker_id=service.worker_id,
            address=service.address,
            beats=beats,
        )
        bus.offer(subjects.beat(ROLE, service.worker_id), beat_to_bytes(beat))
        await asyncio.sleep(BEAT_SECONDS)
