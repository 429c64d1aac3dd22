"""The storage tier as a value: units on disk, their readers, and extents being written.

Pure: no files, no clock. Each stored group is one extent, whose units are dropped one by one.
`drain_effects` returns changes for other components, `drain_work` the work on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.slots import SlotHandle
from ferryman.cache.units import Tier
from ferryman.tiers.extent_plan import (
    largest_group,
    layout_of,
    num_pages,
    places,
    plan_extent,
)
from ferryman.tiers.extents import BlobWork, ExtentTable, aligned
from ferryman.tiers.layout import SNAPSHOT_SHARE, kind_shares
from ferryman.tiers.leases import LeaseTable, StorageLease
from ferryman.tiers.storage_values import (
    ExtentPlan,
    Flaw,
    FoundExtent,
    StorageLimits,
    StorageStatistics,
    StoreTruncated,
    UnitCorrupt,
)
from ferryman.tiers.unit_group import Group, WriteOffer, demand_of
from ferryman.tiers.unit_store import UnitStore
from ferryman.tiers.values import StoredUnit, UnitName


@dataclass(frozen=True, slots=True)
class _Writing:
    plan: ExtentPlan
    base: int
    anchor: tuple[SlotHandle, ...]
    is_dropped: bool = False


class StorageStore(UnitStore):
    """The units of one model's state in one blob store. Bytes are one total over all kinds."""

    def __init__(
        self, manifest: StateManifest, limits: StorageLimits, extents: ExtentTable
    ) -> None:
        """`extents` is an empty table, as the medium charges extents."""
        self.limits, self._extents = limits, extents
        super().__init__(manifest, Tier.STORAGE, self._extents)
        self._readers: LeaseTable[StorageLease] = LeaseTable(limits.max_leases)
        self._writing: dict[int, _Writing] = {}
        self._truncated = 0

    def restore(self, extents: Iterable[FoundExtent], now: float) -> None:
        """Adopts the extents of an earlier process; drops units without a place on a chain."""
        for extent in sorted(extents, key=_depth):
            if extent.manifest_digest == self.manifest.digest:
                self._restore(extent, now)
            else:
                room = self._extents.room(extent.num_bytes, extent.file_bytes)
                self._extents.add_foreign(extent.generation, room)
        self._make_room(0)

    def _restore(self, extent: FoundExtent, now: float) -> None:
        self._extents.add(
            extent.generation, extent.header_bytes, places(extent.units), extent.file_bytes
        )
        by_name = {(unit.kind, unit.page_index): unit for unit in extent.units}
        whole, _ = self.offer(extent.keys, _pages(by_name)).whole()
        chosen = [by_name[name] for name in whole]
        kept = {unit.handle for unit in chosen}
        # Also one that the file names twice: nobody else would.
        self._extents.give_back(u.handle for u in extent.units if u.handle not in kept)
        if chosen:
            self._insert_group(extent.keys[: num_pages(whole)], chosen, now)

    def _insert_group(
        self, keys: Sequence[PageKey], units: Sequence[StoredUnit], now: float
    ) -> tuple[StoredUnit, ...]:
        """Makes the units of an extent visible, except units that another extent holds; returns the
        new ones."""
        new = self._insert(keys, units, now)
        adopted = {unit.handle for unit in new}
        self._extents.give_back(unit.handle for unit in units if unit.handle not in adopted)
        return new

    # Readers.

    def stands(self, unit: StoredUnit) -> bool:
        """Whether the store still holds exactly this unit."""
        return self.unit(unit.kind, unit.key) == unit

    def lease(
        self, lease_id: str, keys: Sequence[PageKey], names: Iterable[UnitName], now: float
    ) -> tuple[StoredUnit, ...]:
        """Leases those of the named units that are here, and their path, until the lease's end."""
        self._readers.check_new(lease_id)
        units = []
        for kind, page in dict.fromkeys(names):
            unit = self.unit(kind, keys[page]) if page < len(keys) else None
            if unit and unit.page_index != page:
                unit = None  # the keys are not one chain
            self._count(kind, num_hits=unit is not None, num_misses=unit is None)
            units += [unit] if unit else []
        if units:
            pages = sorted({unit.page_index for unit in units})
            for page in pages:
                self._tree.touch(keys[page], now)
            anchor = self._anchor(keys, 1 + pages[-1])
            handles = (*(unit.handle for unit in units), *anchor)
            self._extents.lease(handles)
            self._readers.add(lease_id, StorageLease(handles, now + self.limits.lease_seconds))
        return tuple(units)

    def renew(self, lease_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Prolongs leases and returns the names of those that are gone."""
        end = now + self.limits.lease_seconds
        return tuple(name for name in lease_ids if not self._readers.renew(name, now, end))

    def release(self, lease_id: str) -> None:
        if lease := self._readers.pop(lease_id):
            self._extents.release(lease.units)

    def expire(self, now: float) -> None:
        for name in self._readers.over(now):
            self.release(name)

    # Writers.

    def plan(
        self, keys: Sequence[PageKey], digests: Mapping[UnitName, bytes], now: float
    ) -> ExtentPlan | None:
        """Room for the new units of an offer, or for its largest smaller resume point; or None.

        The caller ends the plan with `commit` or `abort`. The units offered are those of `digests`.
        """
        offer = self.offer(keys, _pages(digests))
        whole, depth = offer.whole()
        if not whole:
            return None
        anchor = (*self._anchor(keys, offer.base), *self._handles(offer.reused(depth)))
        # Lease first: making room may otherwise evict the pages that the group stands on.
        self._extents.lease(anchor)
        if offer.base:
            self._tree.touch(keys[offer.base - 1], now)
        group = self._take_room(offer, whole)
        self._note_truncation(whole, group)
        if not group:
            self._extents.release(anchor)
            return None
        generation = self._extents.reserve(layout_of(self.manifest, group).file_bytes)
        chosen = {name: digests[name] for name in group}
        plan = plan_extent(self.manifest, keys, chosen, generation, num_asked=len(whole))
        self._writing[plan.generation] = _Writing(plan, offer.base, anchor)
        return plan

    def _take_room(self, offer: WriteOffer, whole: Group) -> Group:
        """Evicts for the largest group that fits the capacity, then takes the largest that fits
        now."""
        capacity = self.limits.capacity_bytes
        most = largest_group(self.manifest, offer, whole, capacity)
        if not most:
            return ()
        self._make_room(layout_of(self.manifest, most).file_bytes)
        return largest_group(self.manifest, offer, most, capacity - self._extents.used_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Evicts other models' extents first, then the least valuable units of the kind that takes
        most."""
        extents, limit = self._extents, self.limits.capacity_bytes - num_bytes
        while extents.used_bytes > limit and extents.drop_oldest_foreign():
            pass
        while (short := extents.used_bytes - limit) > 0:
            if not any(self._evict(kind, self._some_of(kind, short)) for kind in self._by_excess()):
                return

    def _by_excess(self) -> list[Kind]:
        """Kinds by their bytes in proportion to their share, the largest first."""
        shares = kind_shares(self.manifest.kinds, SNAPSHOT_SHARE)
        taken = {kind: self._counts[kind]["num_bytes"] / share for kind, share in shares.items()}
        return sorted(taken, key=lambda kind: -taken[kind])

    def _some_of(self, kind: Kind, short: int) -> int:
        """The number of units of a kind to evict at once: a part of the shortage, so that the kind
        that takes most is determined again before the rest."""
        unit_bytes = aligned(self.manifest.layout(kind).slot_bytes)
        return max(1, short // (unit_bytes * len(self.manifest.kinds)))

    def _note_truncation(self, whole: Group, stored: Group) -> None:
        if len(stored) < len(whole):
            self._truncated += 1
            for kind, count in demand_of(tuple(set(whole).difference(stored))).items():
                self._count(kind, num_truncated=count)
            self._effects.append(StoreTruncated(len(whole), len(stored)))

    def commit(self, generation: int, now: float) -> int:
        """Makes the units of a written extent visible and returns how many are new. It returns 0
        if the pages below are gone; the caller then removes the file."""
        writing = self._end_writing(generation)
        plan = writing.plan
        header_bytes = plan.file_bytes - sum(aligned(unit.num_bytes) for unit in plan.units)
        self._extents.add(generation, header_bytes, places(plan.units), plan.file_bytes)
        below = plan.keys[: writing.base]
        if writing.is_dropped or self._tree.match_depth(below) < len(below):
            self._extents.give_back(unit.handle for unit in plan.units)
            return 0
        new = self._insert_group(plan.keys, plan.units, now)
        for unit in new:
            self._count(unit.kind, num_stored=1)
        return len(new)

    def abort(self, generation: int) -> None:
        """Ends the plan of an extent that could not be written."""
        self._end_writing(generation)

    def _end_writing(self, generation: int) -> _Writing:
        writing = self._writing.pop(generation)
        self._extents.unreserve(generation)
        self._extents.release(writing.anchor)
        return writing

    # Dropping.

    def drop_chain(self, first: PageKey) -> int:
        """Drops all units of chains that begin with this page, leased or not, and returns how many.
        An extent of such a chain that is being written will not become visible."""
        for generation, writing in self._writing.items():
            if writing.plan.keys[0] == first:
                self._writing[generation] = replace(writing, is_dropped=True)
        return super().drop_chain(first)

    def drop_corrupt(self, unit: StoredUnit, flaw: Flaw) -> int:
        """Drops a unit, with a count and an effect; 0 when this unit has been dropped or replaced
        already."""
        if not self.stands(unit):
            return 0
        self._count(unit.kind, num_corrupt=1)
        dropped = self.drop(unit.kind, unit.key)
        self._effects.append(UnitCorrupt(unit.kind, unit.key, flaw, dropped))
        return dropped

    # Reports.

    def drain_work(self) -> tuple[BlobWork, ...]:
        """The disk work since the last call, in order. The caller does it before it writes."""
        return self._extents.drain_work()

    def statistics(self) -> StorageStatistics:
        extents = self._extents
        return StorageStatistics(
            kinds={kind: self.counts(kind) for kind in self.manifest.kinds},
            capacity_bytes=self.limits.capacity_bytes,
            used_bytes=extents.used_bytes,
            foreign_bytes=extents.foreign_bytes,
            num_extents=len(extents),
            num_leases=len(self._readers),
            num_truncated=self._truncated,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless all tables agree and stay within the capacity."""
        super().check_integrity()
        alive = {(handle.generation, handle.slot) for handle in self._tree.handles()}
        assert alive == set(self._extents.units()), "a unit on disk is nobody's"
        used = self._extents.used_bytes
        assert used <= self.limits.capacity_bytes, f"{used} bytes are more than the capacity"


def _depth(extent: FoundExtent) -> tuple[int, int]:
    """Parents come first: sorted by the first full page. Extents without one stand on others'
    pages."""
    pages = [unit.page_index for unit in extent.units if unit.kind is Kind.FULL]
    return min(pages, default=len(extent.keys)), extent.generation


def _pages(names: Iterable[UnitName]) -> dict[Kind, list[int]]:
    """Pages by kind, in the order of the names, which is their order on disk."""
    pages: dict[Kind, list[int]] = {}
    for kind, page in names:
        pages.setdefault(kind, []).append(page)
    return pages
