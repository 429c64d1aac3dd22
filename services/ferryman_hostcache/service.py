"""The host-cache as a process: builds the parts, joins them, serves, drains."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ferryman.ids import make_epoch, make_worker_id
from ferryman.runtime.life import alongside, announce_ready
from ferryman.runtime.lifecycle import LifecyclePublisher, Publisher
from ferryman.runtime.listening import Answer, json_answer, observed
from ferryman.runtime.listening import listening as http_listening
from ferryman.runtime.metrics import CONTENT_TYPE, Metrics
from ferryman.tiers.values import StoreLimits, UnitStored
from ferryman.wire.beats import BEAT_SECONDS, Beat, ServedState, beat_to_bytes
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
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.server import HostCacheServicer
from ferryman_hostcache.settings import Settings

log = logging.getLogger(__name__)

ROLE = "hostcache"
SERVICE = "ferryman.wire.v1.HostCacheService"
GRPC_GRACE_SECONDS = 1.0
TICK_SECONDS = 0.5
NO_STATE = ServedState("", 0, "", ())


@dataclass(frozen=True, slots=True)
class Running:
    """A host-cache that serves, and where."""

    worker_id: str
    address: str
    http_port: int
    host: HostCache
    announcer: IndexAnnouncer


@dataclass(frozen=True, slots=True)
class HostGauges:
    """What the gauges show, summed over the kinds."""

    arena_bytes: int
    used_bytes: int
    num_units: int
    num_leases: int
    num_reservations: int
    num_quarantined: int
    num_hits: int
    num_misses: int
    num_stored: int
    num_evicted: int
    num_corrupt: int
    num_workers: int


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Until `stopping` is set; calls under way are finished."""
    async with running(settings) as service:
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
async def running(settings: Settings) -> AsyncIterator[Running]:
    """A host-cache for the length of a block."""
    worker_id, identity = make_worker_id(ROLE), NodeLife(settings.node, make_epoch())
    subjects = Subjects(settings.bus.cluster)
    async with AsyncExitStack() as stack:
        arena = await stack.enter_async_context(_arena(settings, identity))
        bus = await stack.enter_async_context(nats_bus(NatsOptions(settings.bus.url, worker_id)))
        index = await stack.enter_async_context(redis_index(settings.index.url))
        lifecycle = LifecyclePublisher(bus, subjects, Publisher(ROLE, worker_id, identity.epoch))
        announcer = IndexAnnouncer(index, identity, lambda: _holdings(host), clock=time.monotonic)
        stack.push_async_callback(announcer.leave)
        limits = StoreLimits(lease_seconds=settings.lease_seconds)
        host = HostCache(
            identity,
            arena,
            limits,
            settings.snapshot_share,
            announcer=announcer,
            lifecycle=lifecycle,
            clock=time.monotonic,
        )
        service = await _open_doors(stack, settings, worker_id, host, announcer)
        about = {"grpc": service.address, "worker_id": worker_id, "node": identity.node_id}
        found = Discoverable("ferryman-hostcache", "1.0.0", "Keeps a node's host memory", about)
        await stack.enter_async_context(bus.discoverable(found))
        jobs = (announcer.run(), _tick(host), _beat(bus, subjects, service))
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


def _holdings(host: HostCache) -> Iterable[UnitStored]:
    return host.store.holdings() if host.is_laid_out else ()


async def _open_doors(
    stack: AsyncExitStack,
    settings: Settings,
    worker_id: str,
    host: HostCache,
    announcer: IndexAnnouncer,
) -> Running:
    metrics = Metrics(ROLE)
    metrics.watch("store", lambda: _gauges(host))
    metrics.watch("index", announcer.statistics)
    endpoints = {
        "/metrics": lambda: Answer(metrics.render(), CONTENT_TYPE),
        "/health": lambda: json_answer({"status": "ready", "index_away": announcer.is_away}),
        "/debug/ledger": lambda: _ledger(host),
    }
    app = observed(endpoints)
    http_port = await stack.enter_async_context(http_listening(app, settings.observe))
    servicer = HostCacheServicer(host, announcer)

    def register(server: Any) -> None:
        hostcache_pb2_grpc.add_HostCacheServiceServicer_to_server(servicer, server)

    address = f"{settings.listen.host}:{settings.listen.port}"
    door = grpc_listening(address, register, grace=GRPC_GRACE_SECONDS, services=(SERVICE,))
    listening = await stack.enter_async_context(door)
    where = f"{settings.listen.host}:{listening.port}"
    announcer.speaks_at(where)
    return Running(worker_id, where, http_port, host, announcer)


async def _tick(host: HostCache) -> None:
    while True:
        host.tick()
        await asyncio.sleep(TICK_SECONDS)


async def _beat(bus: Bus, subjects: Subjects, service: Running) -> None:
    beats = 0
    while True:
        beats += 1
        beat = _make_beat(service, beats)
        bus.offer(subjects.beat(ROLE, service.worker_id), beat_to_bytes(beat))
        await asyncio.sleep(BEAT_SECONDS)


def _make_beat(service: Running, beats: int) -> Beat:
    host = service.host
    state, free = NO_STATE, {}
    if host.is_laid_out:
        state = ServedState.of(host.store.manifest)
        free = {kind: each.free for kind, each in host.store.statistics().kinds.items()}
    return Beat(
        role=ROLE,
        worker_id=service.worker_id,
        epoch=host.identity.epoch,
        address=service.address,
        is_ready=True,
        state=state,
        max_len=0,
        num_steps=beats,
        free_slots=free,
        node=host.identity.node_id,
    )


def _gauges(host: HostCache) -> HostGauges:
    if not host.is_laid_out:
        return HostGauges(host.arena.num_bytes, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, len(host.workers))
    store, counts = host.store, host.store.statistics()
    used = {kind: each.total - each.free for kind, each in counts.kinds.items()}
    return HostGauges(
        arena_bytes=host.arena.num_bytes,
        used_bytes=sum(store.layout.slot_bytes(kind) * count for kind, count in used.items()),
        num_units=sum(each.resident for each in counts.kinds.values()),
        num_leases=counts.num_leases,
        num_reservations=counts.num_reservations,
        num_quarantined=counts.num_quarantined,
        num_hits=counts.num_hits,
        num_misses=counts.num_misses,
        num_stored=counts.num_stored,
        num_evicted=counts.num_evicted,
        num_corrupt=counts.num_corrupt,
        num_workers=len(host.workers),
    )


def _ledger(host: HostCache) -> Answer:
    """Who holds what, per pool, and whether it adds up."""
    kinds = host.store.statistics().kinds if host.is_laid_out else {}
    pools = {kind.value: asdict(each) for kind, each in kinds.items()}
    balances = all(
        each.total == each.free + each.resident + each.reserved + each.leaving
        for each in kinds.values()
    )
    return json_answer(
        {"epoch": host.identity.epoch, "balances": balances, "pools": pools},
        200 if balances else 500,
    )
