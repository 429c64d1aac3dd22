"""A prefetch from a real folder into a small host store, without its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.engine.host_fed import HostMemory
from tests.hostcache.stored import opened

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import Reason, Shortfall
from ferryman.cache.units import Tier
from ferryman.engine.memory.transfer import digest_of
from ferryman.tiers.layout import ArenaLayout, PoolRegion
from ferryman.tiers.prefetch import PrefetchGrant, PrefetchPlanner, PrefetchSource, Truncate
from ferryman.tiers.prefetch_values import PrefetchRequest
from ferryman.tiers.storage_values import OfferedUnit, UnitRead
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import AcquireRequest, StoreLimits, WorkerLife
from ferryman_hostcache.storage.factory import StorageTier

HOST = WorkerLife("host-cache", 1)
READER = WorkerLife("prefill", 1)
LEASE = "lease"


async def bring_from_storage(
    there: HostMemory, keys: Sequence[PageKey], host: HostStore, folder: Path
) -> HostMemory:
    """The units of `there`'s chain that come into a host store from a folder that was reopened."""
    manifest = host.manifest
    async with opened(folder) as storage:
        storage.attach(manifest)
        offers = [
            OfferedUnit(kind, page, memoryview(there.content(unit)), unit.digest)
            for (kind, page), unit in there.view(keys).units.items()
        ]
        stored = await storage.store(keys, offers)
        assert stored.num_stored == len(offers)
    async with opened(folder) as storage:
        storage.attach(manifest)
        return await _prefetched(storage, keys, host)


async def _prefetched(storage: StorageTier, keys: Sequence[PageKey], host: HostStore) -> HostMemory:
    source = PrefetchSource(Tier.STORAGE, "", storage.lookup(keys).pages)
    ask = PrefetchRequest(keys, 0, len(keys), 1)
    prefetcher = PrefetchPlanner(HOST, Truncate, 1.0)
    grant = prefetcher.reserve(host, ask, [source], lease_id=LEASE, bytes_under_way=0, now=0.0)
    content = await _read(storage, keys, grant)
    host.commit_arrived(LEASE, {name: digest_of(data) for name, data in content.items()}, 0.0)
    brought = HostMemory()
    for unit in host.acquire(AcquireRequest(LEASE, READER, keys, 0, 0, len(keys)), 0.0).units:
        data = content[unit.kind, unit.page_index]
        brought.put(unit.kind, unit.page_index, unit.key, data, Tier.STORAGE)
    if grant.lack:
        brought.shortfalls[keys[-1]] = Shortfall(grant.asked, Reason(grant.lack))
    return brought


async def _read(
    storage: StorageTier, keys: Sequence[PageKey], grant: PrefetchGrant
) -> Mapping[tuple[Kind, int], bytes]:
    room = {(unit.kind, unit.page_index): bytearray(unit.num_bytes) for unit in grant.room}
    units = storage.lease(LEASE, keys, list(room))
    reads = [UnitRead(unit, memoryview(room[unit.kind, unit.page_index])) for unit in units]
    brought = await storage.read(reads)
    storage.release(LEASE)
    assert len(brought) == len(room)
    return {name: bytes(data) for name, data in room.items()}


def host_store(manifest: StateManifest, num_slots: Mapping[Kind, int]) -> HostStore:
    """A host store with room for the given number of units of each kind."""
    regions, offset = {}, 0
    for kind in manifest.kinds:
        regions[kind] = PoolRegion(offset, manifest.layout(kind).slot_bytes, num_slots[kind])
        offset += regions[kind].slot_bytes * num_slots[kind]
    return HostStore(manifest, ArenaLayout(regions), StoreLimits())
