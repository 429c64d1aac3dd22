"""One node's host-cache without bytes: its stores make real decisions, its copies cost seconds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from itertools import count

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.extents import ExtentTable
from ferryman.tiers.prefetch import (
    PrefetchGrant,
    PrefetchPlanner,
    PrefetchSource,
    Truncate,
    in_order,
)
from ferryman.tiers.prefetch_progress import PrefetchOrigins, PrefetchProgress
from ferryman.tiers.prefetch_values import Prefetched, PrefetchRequest, Traffic
from ferryman.tiers.storage import StorageStore
from ferryman.tiers.storage_values import StorageLimits
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import (
    AcquireGrant,
    AcquireRequest,
    LeaseRequest,
    ReserveRequest,
    StoreLimits,
    UnitName,
    WorkerLife,
)
from ferryman.tiers.write_policy import write_policy_named
from ferryman.tiers.writeback import WritebackBacklog, WritebackGroup
from ferryman.wire.grpc.rpc import NO_TAGS, CallTags
from ferryman_simulator.modelled_time import now
from ferryman_simulator.setup import Setup

PREFETCH_SHARE = 0.25
BATCH_UNITS = 16
NO_BYTES = b"simulated"


class SimulatedNode:
    """The host store, the storage store behind it, and the writes from one to the other.

    Here readers and writers always renew in time and never die, so leases do not end by themselves.
    """

    def __init__(self, setup: Setup) -> None:
        self._manifest, self._costs = setup.manifest, setup.costs
        limits = StoreLimits(lease_seconds=math.inf)
        self.store = HostStore(setup.manifest, setup.arena, limits)
        of_storage = StorageLimits(setup.storage_bytes, math.inf)
        self.storage = StorageStore(setup.manifest, of_storage, ExtentTable())
        self.has_storage = setup.storage_bytes > 0
        self.num_truncated = 0
        self._life = WorkerLife("node", 1)
        self._prefetcher = PrefetchPlanner(self._life, Truncate, PREFETCH_SHARE)
        self._wake = asyncio.Event()
        policy = write_policy_named(setup.write_policy)
        self._backlog = WritebackBacklog[CallTags](policy, self._wake.set)
        self._origins = PrefetchOrigins()
        self._bytes_under_way = 0
        self._numbers = count()

    # Calls of workers.

    async def acquire(self, ask: AcquireRequest, tags: CallTags) -> AcquireGrant:
        await asyncio.sleep(self._costs.call_seconds)
        grant = self.store.acquire(ask, now())
        if self.has_storage:
            self._backlog.on_hit([(unit.kind, unit.key) for unit in grant.units], NO_TAGS)
        return self._origins.label(grant, (tags.request_id, tags.attempt))

    async def write(self, ask: ReserveRequest) -> int:
        """Stores one group from a worker's device; returns how many units became visible."""
        await asyncio.sleep(self._costs.call_seconds)
        room = self.store.reserve(ask, now())
        self._note()
        if not room:
            return 0
        seconds = sum(unit.num_bytes for unit in room) * self._costs.store_seconds_per_byte
        await asyncio.sleep(seconds + self._costs.call_seconds)
        digests = {(unit.kind, unit.page_index): NO_BYTES for unit in room}
        stored = self.store.commit(ask.lease_id, digests, now())
        self._note()
        return stored

    # From storage.

    async def prefetch(self, ask: PrefetchRequest, tags: CallTags, patience: float) -> Prefetched:
        """Brings the units that storage has beyond the host, as far as room and time allow."""
        end = now() + patience
        await asyncio.sleep(self._costs.call_seconds)
        keys = ask.keys[: ask.max_pages]
        source = PrefetchSource(Tier.STORAGE, "", self.storage.lookup(keys).pages)
        lease_id = f"prefetch-{next(self._numbers)}"
        progress = PrefetchProgress(ask, self.store.usable_pages(keys))
        grant = self._reserve(ask, source, lease_id)
        progress.on_grant(grant)
        if grant.room:
            self._bytes_under_way += grant.num_bytes
            arrived = await self._read(lease_id, keys, grant, end)
            self._bytes_under_way -= grant.num_bytes
            self._settle(lease_id, keys, arrived, tags)
            num_bytes = sum(self._manifest.layout(kind).slot_bytes for kind, _ in arrived)
            progress.traffic[Tier.STORAGE] = Traffic(len(arrived), num_bytes)
        progress.brought = self.store.usable_pages(keys)
        result = progress.result()
        self.num_truncated += result.is_truncated
        return result

    def _reserve(
        self, ask: PrefetchRequest, source: PrefetchSource, lease_id: str
    ) -> PrefetchGrant:
        try:
            return self._prefetcher.reserve(
                self.store,
                ask,
                [source],
                lease_id=lease_id,
                bytes_under_way=self._bytes_under_way,
                now=now(),
            )
        finally:
            self._note()

    async def _read(
        self, lease_id: str, keys: Sequence[PageKey], grant: PrefetchGrant, end: float
    ) -> dict[UnitName, bytes]:
        """Reads batch after batch, until all units are here or the time is over."""
        names = in_order(grant.names)
        self.storage.lease(lease_id, keys, names, now())
        arrived: dict[UnitName, bytes] = {}
        for first in range(0, len(names), BATCH_UNITS):
            batch = names[first : first + BATCH_UNITS]
            num_bytes = sum(self._manifest.layout(kind).slot_bytes for kind, _ in batch)
            seconds = num_bytes * self._costs.storage_seconds_per_byte
            if now() + seconds > end:
                break
            await asyncio.sleep(seconds)
            arrived |= dict.fromkeys(batch, NO_BYTES)
        self.storage.release(lease_id)
        return arrived

    def _settle(
        self,
        lease_id: str,
        keys: Sequence[PageKey],
        arrived: Mapping[UnitName, bytes],
        tags: CallTags,
    ) -> None:
        """Keeps the units that make a resume point, and frees all others."""
        names = self.store.commit_arrived(lease_id, arrived, now()) if arrived else ()
        units = {(kind, keys[page]): Tier.STORAGE for kind, page in names}
        self._backlog.mark_written(units)
        self._origins.remember((tags.request_id, tags.attempt), units)
        self._note()
        self.store.release(lease_id)

    # To storage.

    def _note(self) -> None:
        """Queues units that came into the host tier to be written, and forgets those that left
        it."""
        effects = self.store.drain_effects()
        if self.has_storage:
            self._backlog.on_host_effects(effects, NO_TAGS)
            self._backlog.on_pressure(self.store, NO_TAGS)

    async def work(self) -> None:
        """Writes waiting groups to storage, for ever."""
        while True:
            while (job := self._backlog.take()) is not None:
                for group in self._backlog.groups(job, self.store, self.storage.lookup):
                    await self._write_group(group)
                self._backlog.settle(job)
            self._wake.clear()
            await self._wake.wait()

    async def _write_group(self, group: WritebackGroup) -> None:
        lease_id = f"backup-{next(self._numbers)}"
        leased = self.store.lease(
            LeaseRequest(lease_id, self._life, group.chain, group.names), now()
        )
        digests = {(unit.kind, unit.page_index): unit.digest for unit in leased}
        plan = self.storage.plan(group.chain, digests, now()) if leased else None
        self._note_storage()
        if plan is not None:
            await asyncio.sleep(plan.file_bytes * self._costs.storage_seconds_per_byte)
            self.storage.commit(plan.generation, now())
            self._note_storage()
        self.store.release(lease_id)

    def _note_storage(self) -> None:
        self.storage.drain_work()
        self._backlog.on_storage_effects(self.storage.drain_effects())

    # Results.

    def num_snapshots(self) -> dict[str, int]:
        """Recurrent states kept, by tier."""
        host = self.store.statistics().kinds.get(Kind.RECURRENT)
        disk = self.storage.statistics().kinds.get(Kind.RECURRENT)
        kept = {"host": host.resident if host else 0}
        return kept | ({"storage": disk.num_units if disk else 0} if self.has_storage else {})

    def num_evicted(self) -> dict[str, dict[str, int]]:
        """Units evicted, by tier and kind."""
        evicted = {"host": {str(k): self.store.counts(k).num_evicted for k in self._manifest.kinds}}
        if self.has_storage:
            kinds = self.storage.statistics().kinds
            evicted["storage"] = {str(kind): counts.num_evicted for kind, counts in kinds.items()}
        return evicted
