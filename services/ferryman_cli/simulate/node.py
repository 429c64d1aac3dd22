"""One node's host-cache without bytes: its stores and what they decide, its copies as seconds."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.prefetch import Grant as PrefetchGrant
from ferryman.tiers.prefetch import Prefetcher, Source, Truncate, in_order
from ferryman.tiers.prefetch_values import Lack, PrefetchAsk, Prefetched, Traffic
from ferryman.tiers.storage import StorageStore
from ferryman.tiers.storage_values import StorageLimits
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import (
    AcquireAsk,
    Grant,
    LeaseAsk,
    ReserveAsk,
    StoreLimits,
    UnitForgotten,
    UnitName,
    UnitStored,
    WorkerLife,
)
from ferryman.tiers.write_policy import Backups, UnitKey, write_policy_named
from ferryman_cli.simulate.clock import now
from ferryman_cli.simulate.setup import Setup

PREFETCH_SHARE = 0.25
BATCH_UNITS = 16
MAX_JOBS = 256
NO_BYTES = b"simulated"


class SimulatedNode:
    """The host store, the storage store behind it, and the writing from one to the other.

    Readers and writers renew in time here and nobody dies, so leases do not end by themselves.
    """

    def __init__(self, setup: Setup) -> None:
        self._manifest, self._costs = setup.manifest, setup.costs
        limits = StoreLimits(lease_seconds=math.inf)
        self.store = HostStore(setup.manifest, setup.arena, limits)
        self.storage = StorageStore(setup.manifest, StorageLimits(setup.storage_bytes, math.inf))
        self.has_storage = setup.storage_bytes > 0
        self.num_truncated = 0
        self._life = WorkerLife("node", 1)
        self._prefetcher = Prefetcher(self._life, Truncate, PREFETCH_SHARE)
        self._backups = Backups(write_policy_named(setup.write_policy))
        self._jobs: deque[tuple[UnitKey, ...]] = deque()
        self._wake = asyncio.Event()
        self._origins: dict[str, dict[UnitKey, Tier]] = {}
        self._bytes_under_way = 0
        self._numbers = count()

    # What workers call.

    async def acquire(self, ask: AcquireAsk, request_id: str) -> Grant:
        await asyncio.sleep(self._costs.call_seconds)
        grant = self.store.acquire(ask, now())
        self._backlog(self._backups.hit((unit.kind, unit.key) for unit in grant.units))
        brought = self._origins.pop(request_id, {})
        units = (
            replace(unit, origin=brought.get((unit.kind, unit.key), Tier.HOST))
            for unit in grant.units
        )
        return replace(grant, units=tuple(units)) if brought else grant

    async def write(self, ask: ReserveAsk) -> int:
        """One group from a worker's device; how many units became visible."""
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

    async def prefetch(self, ask: PrefetchAsk, request_id: str, patience: float) -> Prefetched:
        """Brings what storage has beyond the host, as far as there is room and time."""
        end = now() + patience
        await asyncio.sleep(self._costs.call_seconds)
        keys = ask.keys[: ask.max_pages]
        source = Source(Tier.STORAGE, "", self.storage.lookup(keys).pages)
        lease_id = f"prefetch-{next(self._numbers)}"
        grant = self._reserve(ask, source, lease_id)
        arrived: dict[UnitName, bytes] = {}
        if grant.room:
            self._bytes_under_way += grant.num_bytes
            arrived = await self._read(lease_id, keys, grant, end)
            self._bytes_under_way -= grant.num_bytes
            self._settle(lease_id, keys, arrived, request_id)
        brought = self.store.usable_pages(keys)
        is_truncated = grant.before < grant.granted < grant.asked
        self.num_truncated += is_truncated
        num_bytes = sum(self._manifest.layout(kind).slot_bytes for kind, _ in arrived)
        return Prefetched(
            before_pages=grant.before,
            asked_pages=grant.asked,
            granted_pages=grant.granted,
            brought_pages=brought,
            is_truncated=is_truncated,
            reason=_lack(grant, brought),
            traffic={Tier.STORAGE: Traffic(len(arrived), num_bytes)},
        )

    def _reserve(self, ask: PrefetchAsk, source: Source, lease_id: str) -> PrefetchGrant:
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
        """Batch after batch, until all is here or the time is over."""
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
        request_id: str,
    ) -> None:
        """What makes a resume point stays, all else is free again."""
        names = self.store.commit_arrived(lease_id, arrived, now()) if arrived else ()
        units = {(kind, keys[page]): Tier.STORAGE for kind, page in names}
        self._backups.written(units)
        if units:
            self._origins[request_id] = units
        self._note()
        self.store.release(lease_id)

    # To storage.

    def _note(self) -> None:
        """What came into the host tier is to be written, what left it is forgotten."""
        effects = self.store.drain_effects()
        if not self.has_storage:
            return
        new = [(each.kind, each.key) for each in effects if isinstance(each, UnitStored)]
        gone = [(each.kind, each.key) for each in effects if isinstance(each, UnitForgotten)]
        self._backups.gone(gone)
        self._backlog(self._backups.added(new))
        for kind in self._manifest.kinds:
            coldest = ((kind, key) for key in self.store.next_to_evict(kind))
            self._backlog(self._backups.pressed(self.store.free_share(kind), coldest))

    def _backlog(self, units: tuple[UnitKey, ...]) -> None:
        if not units or not self.has_storage:
            return
        self._jobs.append(units)
        if len(self._jobs) > MAX_JOBS:
            self._backups.failed(self._jobs.popleft())
        self._wake.set()

    async def work(self) -> None:
        """Writes to storage what waits, chain by chain, for ever."""
        while True:
            while self._jobs:
                await self._back_up(self._jobs.popleft())
            self._wake.clear()
            await self._wake.wait()

    async def _back_up(self, units: tuple[UnitKey, ...]) -> None:
        waiting = set(units)
        while chain := self.store.deepest_chain(waiting):
            path = set(chain)
            mine = {unit for unit in waiting if unit[1] in path}
            waiting -= mine
            await self._write_extent(chain, mine)
        self._backups.failed([unit for unit in units if not self._backups.is_written(unit)])

    async def _write_extent(self, chain: tuple[PageKey, ...], units: set[UnitKey]) -> None:
        lease_id = f"backup-{next(self._numbers)}"
        ask = LeaseAsk(lease_id, self._life, chain, self._lacking(chain, units))
        leased = self.store.lease(ask, now())
        digests = {(unit.kind, unit.page_index): unit.digest for unit in leased}
        plan = self.storage.plan(chain, digests, now()) if leased else None
        self._note_storage()
        if plan is not None:
            await asyncio.sleep(plan.file_bytes * self._costs.storage_seconds_per_byte)
            self.storage.commit(plan.generation, now())
            self._note_storage()
        self.store.release(lease_id)

    def _lacking(self, chain: tuple[PageKey, ...], units: set[UnitKey]) -> list[UnitName]:
        """The units, and the full pages they stand on, as far as storage lacks them."""
        there = self.storage.lookup(chain).pages
        stored = {(kind, page) for kind, pages in there.items() for page in pages}
        self._backups.written((kind, chain[page]) for kind, page in stored)
        return [
            (kind, page)
            for page, key in enumerate(chain)
            for kind in self._manifest.kinds
            if (kind is Kind.FULL or (kind, key) in units) and (kind, page) not in stored
        ]

    # What it came to.

    def num_snapshots(self) -> dict[str, int]:
        """Recurrent states kept, by tier."""
        host = self.store.statistics().kinds.get(Kind.RECURRENT)
        disk = self.storage.statistics().kinds.get(Kind.RECURRENT)
        found = {"host": host.resident if host else 0}
        return found | ({"storage": disk.num_units if disk else 0} if self.has_storage else {})

    def num_evicted(self) -> dict[str, dict[str, int]]:
        """Units given up, by tier and kind."""
        found = {"host": {str(k): self.store.counts(k).num_evicted for k in self._manifest.kinds}}
        if self.has_storage:
            kinds = self.storage.statistics().kinds
            found["storage"] = {str(kind): each.num_evicted for kind, each in kinds.items()}
        return found

    def _note_storage(self) -> None:
        self.storage.drain_work()
        for each in self.storage.drain_effects():
            if isinstance(each, UnitStored):
                self._backups.written([(each.kind, each.key)])
            elif isinstance(each, UnitForgotten):
                self._backups.failed([(each.kind, each.key)])


def _lack(grant: PrefetchGrant, brought: int) -> str:
    """What came short last: the room, or after it the time."""
    if brought >= grant.asked:
        return ""
    return Lack.STORAGE_TIMEOUT if brought < grant.granted else grant.lack or ""
