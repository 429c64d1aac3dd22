"""The division of host memory and storage, as the host-caches report it once a worker has
attached."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ferryman.errors import FerrymanError
from ferryman.settings.declaration import size_text
from ferryman.wire.codec.scalars import kind_from_wire
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.v1 import hostcache_pb2
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub

PATIENCE_SECONDS = 5.0
CALL_SECONDS = 2.0
PAUSE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One node's memory: bytes of each pool, and their capacity in tokens and snapshots. `pools` is
    empty when no worker had attached in time."""

    node: str
    arena_bytes: int
    pools: Mapping[str, int]
    num_tokens: int
    num_snapshots: int
    storage_bytes: int


async def host_plans(
    addresses: Iterable[str], storage_bytes: int, access: GrpcAccess
) -> tuple[HostPlan, ...]:
    """Asks every host-cache, with an observer's `access`, until a worker has attached, for
    PATIENCE_SECONDS at most.

    `storage_bytes` is the storage of each node. Nodes that do not answer are left out.
    """
    async with Channels(access) as channels:
        stubs = [HostCacheServiceStub(channels.to(address)) for address in addresses]
        answers = [await _split(stub) for stub in stubs]
    return tuple(_plan(stats, storage_bytes) for stats in answers if stats.node_id)


async def _split(stub: HostCacheServiceStub) -> hostcache_pb2.StatsResponse:
    stats = hostcache_pb2.StatsResponse()
    with suppress(TimeoutError, FerrymanError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not stats.budget.pools:
                with typed_errors():
                    asked = hostcache_pb2.StatsRequest()
                    stats = await stub.Stats(asked, timeout=CALL_SECONDS)
                await asyncio.sleep(PAUSE_SECONDS)
    return stats


def _plan(stats: hostcache_pb2.StatsResponse, storage_bytes: int) -> HostPlan:
    return HostPlan(
        node=stats.node_id,
        arena_bytes=stats.arena_bytes,
        pools={str(kind_from_wire(pool.kind)): pool.num_bytes for pool in stats.budget.pools},
        num_tokens=stats.budget.tokens,
        num_snapshots=stats.budget.snapshots,
        storage_bytes=storage_bytes,
    )


def plan_line(plan: HostPlan) -> str:
    """A line for people: `node-1: 256M of host memory = 128M full + 128M recurrent: …`"""
    whole = f"{plan.node}: {size_text(plan.arena_bytes)} of host memory"
    if plan.pools:
        parts = " + ".join(f"{size_text(n)} {kind}" for kind, n in plan.pools.items())
        whole += f" = {parts}: {plan.num_tokens:,} tokens, {plan.num_snapshots:,} snapshots"
    else:
        whole += ", which no worker uses: see hostcache's log"
    storage = size_text(plan.storage_bytes) if plan.storage_bytes else "none"
    return f"{whole}; storage: {storage}"
