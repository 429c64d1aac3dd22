"""The host-cache as a process: builds and connects the parts, serves, drains."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.runtime.access import MetricsAccess, MetricsGuard, access_of
from ferryman.runtime.background import next_tick
from ferryman.runtime.http_server import HttpAnswer, json_answer, observed
from ferryman.runtime.http_server import listening as http_listening
from ferryman.runtime.life import alongside, announce_ready
from ferryman.runtime.membership import Membership, Orders, drain_order, joined
from ferryman.runtime.metrics import CONTENT_TYPE, Metrics, refused_calls
from ferryman.security.cluster_key import Purpose
from ferryman.security.key_file import read_key_file
from ferryman.settings.hostcache import HostCacheServiceSettings
from ferryman.tiers.values import StoreLimits
from ferryman.tiers.write_policy import write_policy_named
from ferryman.tiers.writeback import WritebackBacklog
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.grpc.rpc import listening as grpc_listening
from ferryman.wire.hostcache.arena import arena_name, sweep_stale_arenas
from ferryman.wire.nats.bus import Discoverable
from ferryman.wire.redis.index import NodeLife
from ferryman.wire.redis.redis_index import redis_index
from ferryman.wire.signed_orders import SignatureCheck
from ferryman.wire.v1 import hostcache_pb2_grpc
from ferryman_hostcache.arena import Arena
from ferryman_hostcache.gauges import ROLE, Beats, ledger, watch
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.index_publisher import IndexPublisher
from ferryman_hostcache.lower_tiers import LowerTiers, open_lower_tiers
from ferryman_hostcache.peers import PeerSeals
from ferryman_hostcache.server import HostCacheServicer
from ferryman_hostcache.shared_folders import open_shared_folders
from ferryman_hostcache.storage.factory import open_storage
from ferryman_hostcache.storage.write_breaks import WriteBreaks

log = logging.getLogger(__name__)

SERVICE = "ferryman.wire.v1.HostCacheService"
GRPC_GRACE_SECONDS = 1.0
TICK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RunningHostCache:
    """A host-cache that is serving, with its addresses."""

    worker_id: str
    address: str
    http_port: int
    host: HostCache
    publisher: IndexPublisher
    lower_tiers: LowerTiers


async def serve(settings: HostCacheServiceSettings, stopping: asyncio.Event) -> None:
    """Serves until `stopping` is set; finishes running calls."""
    async with running_host_cache(settings, stopping.set) as service:
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
async def running_host_cache(
    settings: HostCacheServiceSettings, order_drain: Callable[[], None] = lambda: None
) -> AsyncIterator[RunningHostCache]:
    """A host-cache for the length of a block."""
    key = read_key_file(settings.cluster_key_file)
    access = access_of(settings.access, ROLE)
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(
            joined(settings.bus, ROLE, access, settings.traced)
        )
        identity = NodeLife(settings.node, member.epoch)
        arena = await stack.enter_async_context(_arena(settings, identity))
        index = await stack.enter_async_context(
            redis_index(
                settings.index.url,
                key,
                login=access.credentials.redis if access.credentials else None,
                authorities=access.authorities,
                lookup_seconds=settings.index.lookup_seconds,
            )
        )
        publisher = IndexPublisher(index, identity, lambda: host.holdings(), clock=time.monotonic)
        stack.push_async_callback(publisher.unregister)
        has_backlog = asyncio.Event()
        backlog = WritebackBacklog[CallTags](
            write_policy_named(settings.write_policy), wake=has_backlog.set
        )
        breaks = WriteBreaks(lambda: backlog.is_behind)
        storage = await stack.enter_async_context(
            open_storage(
                settings.storage,
                key.subkey(Purpose.STORED_UNIT),
                clock=time.monotonic,
                breaks=breaks,
            )
        )
        stack.callback(breaks.end)
        folders = await stack.enter_async_context(open_shared_folders(settings.storage, key, index))
        if folders:
            publisher.share(folders.own.life(storage.term))
        host = HostCache(
            identity,
            arena,
            StoreLimits(lease_seconds=settings.lease_seconds),
            settings.snapshot_share,
            publisher=publisher,
            lifecycle=member.lifecycle(),
            clock=time.monotonic,
            storage=storage,
            backlog=backlog,
        )
        seals = PeerSeals(key)
        lower_tiers = await stack.enter_async_context(
            open_lower_tiers(settings, host, backlog, has_backlog, index, seals, access, folders)
        )
        service = await _open_doors(stack, settings, member, host, lower_tiers, access)
        about = {
            "grpc": service.address,
            "worker_id": member.worker_id,
            "node": identity.node_id,
        }
        entry = Discoverable("ferryman-hostcache", "1.0.0", "Keeps a node's host memory", about)
        await stack.enter_async_context(member.bus.discoverable(entry))
        orders: Orders = {"drain": drain_order(order_drain), "flush": partial(_flush, host)}
        facts = {"arena": str(arena.path)}
        beats = Beats(host, lower_tiers.prefetching, member.worker_id, service.address)
        await stack.enter_async_context(member.reporting(beats.next, orders, lambda: facts))
        jobs = (publisher.run(), _tick(service), lower_tiers.writer.run())
        await stack.enter_async_context(alongside(*jobs))
        stack.callback(publisher.stop)
        yield service


@asynccontextmanager
async def _arena(settings: HostCacheServiceSettings, identity: NodeLife) -> AsyncIterator[Arena]:
    """The arena, allocated before the service starts; its file is unlinked when the block ends.

    An earlier life that was killed could not unlink its arena, so that is done first.
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
    settings: HostCacheServiceSettings,
    member: Membership,
    host: HostCache,
    lower_tiers: LowerTiers,
    access: GrpcAccess,
) -> RunningHostCache:
    publisher, metrics = host.publisher, Metrics(ROLE)
    metrics.watch("bus", member.bus.statistics)
    member.tracing.count_in(metrics)
    watch(metrics, host, publisher, lower_tiers)
    guard = MetricsGuard(MetricsAccess(access.credentials), metrics)
    health = {"/health": lambda: json_answer({"status": "ready"})}
    numbers = {
        "/metrics": lambda: HttpAnswer(metrics.render(), CONTENT_TYPE),
        "/debug/ledger": lambda: ledger(host),
    }
    app = observed(health, numbers, guard.check)
    http_port = await stack.enter_async_context(http_listening(app, settings.observe))
    signatures = SignatureCheck(access, member.worker_id, member.epoch)
    servicer = HostCacheServicer(host, publisher, lower_tiers, signatures, member.tracing)

    def register(server: Any) -> None:
        hostcache_pb2_grpc.add_HostCacheServiceServicer_to_server(servicer, server)

    address = f"{settings.listen.host}:{settings.listen.port}"
    # Only workers attach, and only other host-caches fetch: the tokens name their roles.
    door = grpc_listening(
        address,
        register,
        grace=GRPC_GRACE_SECONDS,
        services=(SERVICE,),
        worker_id=member.worker_id,
        reflects=settings.access.reflection,
        locks=access.locks(refused_calls(metrics)),
    )
    listening = await stack.enter_async_context(door)
    reachable = f"{settings.advertise}:{listening.port}"
    publisher.set_address(reachable)
    return RunningHostCache(member.worker_id, reachable, http_port, host, publisher, lower_tiers)


async def _tick(service: RunningHostCache) -> None:
    while True:
        if service.host.is_laid_out:
            service.lower_tiers.tick()
        service.host.tick()
        await next_tick(TICK_SECONDS)


def _flush(host: HostCache, payload: bytes) -> bytes:
    """Empties the host tier; with the payload `all` the storage tier too."""
    match payload.decode():
        case "" | "host":
            dropped = host.flush()
        case "all":
            dropped = host.flush_all()
        case other:
            raise InvalidRequest(f"no order is called flush {other!r}; say host or all", "payload")
    return json.dumps({"dropped": dropped}).encode()
