"""The storage tier as a value: who reads what is on disk, what is written, and what for.

Pure: no files, no clock. One store is one extent, whose units are dropped one by one. What others
have to know comes out of `drain_effects`, what is to be done on disk out of `drain_work`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.slots import SlotHandle
from ferryman.tiers.extents import DiskWork, ExtentLayout, aligned, lay_out_extent
from ferryman.tiers.room import Group, Offer, demand_of
from ferryman.tiers.shelf import Shelf, handle_of
from ferryman.tiers.storage_leases import StorageLeases
from ferryman.tiers.storage_values import (
    ExtentPlan,
    Flaw,
    FoundExtent,
    StorageEffect,
    StorageLimits,
    StorageStatistics,
    StorageUnit,
    StoringTruncated,
    UnitCorrupt,
)
from ferryman.tiers.values import Residency, UnitName, UnitStored


@dataclass(frozen=True, slots=True)
class _Writing:
    plan: ExtentPlan
    base: int
    anchor: tuple[SlotHandle, ...]


class StorageStore:
    """The units of one model's state in one folder."""

    def __init__(self, manifest: StateManifest, limits: StorageLimits) -> None:
        self.manifest, self.limits = manifest, limits
        self._leases = StorageLeases(limits.max_leases, limits.lease_seconds)
        self._shelf = Shelf(manifest, limits.capacity_bytes, self._leases.is_free)
        self._writing: dict[int, _Writing] = {}
        self._truncated = 0

    def restore(self, found: Iterable[FoundExtent], now: float) -> None:
        """Take in what an earlier life left; what has no place on a chain any more is dropped."""
        for extent in sorted(found, key=_depth):
            if extent.manifest_digest == self.manifest.digest:
                self._restore(extent, now)
            else:
                self._shelf.extents.add_foreign(extent.generation, extent.num_bytes)
        self._shelf.make_room(0)

    def _restore(self, extent: FoundExtent, now: float) -> None:
        self._shelf.extents.add(extent.generation, extent.header_bytes, _places(extent.units))
        by_name = {(unit.kind, unit.page_index): unit for unit in extent.units}
        whole, _ = self._shelf.offer(extent.keys, _pages(by_name)).whole()
        self._shelf.discard(unit for name, unit in by_name.items() if name not in whole)
        if whole:
            self._shelf.insert(extent.keys[: _top(whole)], [by_name[name] for name in whole], now)

    # Readers.

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        """What is here of a chain; touches nothing."""
        return self._shelf.lookup(keys)

    def stands(self, unit: StorageUnit) -> bool:
        """Whether these very bytes are still what the store means by this unit."""
        return self._shelf.unit(unit.kind, unit.key) == unit

    def lease(
        self, lease_id: str, keys: Sequence[PageKey], names: Iterable[UnitName], now: float
    ) -> tuple[StorageUnit, ...]:
        """Keeps what is here of the units named, and the path to them, until the lease's end."""
        self._leases.check_new(lease_id)
        units = []
        for kind, page in dict.fromkeys(names):
            found = self._shelf.unit(kind, keys[page]) if page < len(keys) else None
            if found and found.page_index != page:
                found = None  # a caller's chain that is none
            self._shelf.count(kind, num_hits=found is not None, num_misses=found is None)
            units += [found] if found else []
        if units:
            pages = sorted({unit.page_index for unit in units})
            self._shelf.touch((keys[page] for page in pages), now)
            anchor = self._shelf.anchor(keys, 1 + pages[-1])
            self._leases.add(lease_id, (*map(handle_of, units), *anchor), now)
        return tuple(units)

    def renew(self, lease_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Prolongs leases; says which are gone."""
        return self._leases.renew(lease_ids, now)

    def release(self, lease_id: str) -> None:
        self._leases.release(lease_id)

    def expire(self, now: float) -> None:
        self._leases.expire(now)

    # Writers.

    def plan(
        self, keys: Sequence[PageKey], digests: Mapping[UnitName, bytes], now: float
    ) -> ExtentPlan | None:
        """Room for what is new of an offer, or for its largest smaller resume point; or None.

        Ends with `commit` or `abort`. Units are those of `digests`, which travel along.
        """
        offer = self._shelf.offer(keys, _pages(digests))
        whole, depth = offer.whole()
        if not whole:
            return None
        anchor = (*self._shelf.anchor(keys, offer.base), *self._shelf.handles(offer.reused(depth)))
        self._leases.keep(anchor)
        self._shelf.touch(keys[offer.base - 1 : offer.base] if offer.base else (), now)
        group = self._take_room(offer, whole)
        self._note_truncation(whole, group)
        if not group:
            self._leases.let_go(anchor)
            return None
        plan = self._plan(keys, group, digests, len(whole))
        self._writing[plan.generation] = _Writing(plan, offer.base, anchor)
        return plan

    def _take_room(self, offer: Offer, whole: Group) -> Group:
        """Evicts for the most that can fit at all, then takes the most that does."""
        capacity = self.limits.capacity_bytes
        most = self._largest(offer, whole, capacity)
        if not most:
            return ()
        self._shelf.make_room(self._layout(most).file_bytes)
        return self._largest(offer, most, capacity - self._shelf.extents.used_bytes)

    def _largest(self, offer: Offer, wanted: Group, num_bytes: int) -> Group:
        """All that is wanted, or what there is room for up to the deepest resume point."""

        def fits(group: Group) -> bool:
            return not group or self._layout(group).file_bytes <= num_bytes

        if fits(wanted):
            return wanted
        points = list(offer.points())
        best = bisect_left(points, True, key=lambda depth: fits(offer.least(depth)))
        groups = (each(depth) for depth in points[best:][:1] for each in (offer.up_to, offer.least))
        return next((group for group in groups if fits(group)), ())

    def _note_truncation(self, whole: Group, stored: Group) -> None:
        if len(stored) < len(whole):
            self._truncated += 1
            for kind, count in demand_of(tuple(set(whole).difference(stored))).items():
                self._shelf.count(kind, num_truncated=count)
            self._shelf.effects.append(StoringTruncated(len(whole), len(stored)))

    def _layout(self, group: Group) -> ExtentLayout:
        sizes = [self.manifest.layout(kind).slot_bytes for kind, _ in group]
        return lay_out_extent(_top(group), sizes)

    def _plan(
        self,
        keys: Sequence[PageKey],
        group: Group,
        digests: Mapping[UnitName, bytes],
        num_asked: int,
    ) -> ExtentPlan:
        layout = self._layout(group)
        generation = self._shelf.extents.reserve(layout.file_bytes)
        units = tuple(
            StorageUnit(
                kind=kind,
                page_index=page,
                key=keys[page],
                num_bytes=self.manifest.layout(kind).slot_bytes,
                digest=digests[kind, page],
                generation=generation,
                index=index,
                offset=layout.offsets[index],
            )
            for index, (kind, page) in enumerate(group)
        )
        chain = tuple(keys[: _top(group)])
        return ExtentPlan(generation, chain, units, layout.file_bytes, num_asked)

    def commit(self, generation: int, now: float) -> int:
        """The extent is on disk: its units become visible. How many are new; 0 where the pages
        below are no more, and then the file is to be removed."""
        writing = self._end_writing(generation)
        plan = writing.plan
        header_bytes = plan.file_bytes - sum(aligned(unit.num_bytes) for unit in plan.units)
        self._shelf.extents.add(generation, header_bytes, _places(plan.units))
        if not self._shelf.is_path(plan.keys[: writing.base]):
            self._shelf.discard(plan.units)
            return 0
        new = self._shelf.insert(plan.keys, plan.units, now)
        for unit in new:
            self._shelf.count(unit.kind, num_stored=1)
        return len(new)

    def abort(self, generation: int) -> None:
        """The extent could not be written."""
        self._end_writing(generation)

    def _end_writing(self, generation: int) -> _Writing:
        writing = self._writing.pop(generation)
        self._shelf.extents.give_back(generation)
        self._leases.let_go(writing.anchor)
        return writing

    # Giving up.

    def flush(self) -> int:
        """Gives up all that nobody reads; how many units went."""
        return self._shelf.flush()

    def drop(self, kind: Kind, key: PageKey) -> int:
        """Gives up a unit and all that stands on it, leased or not; how many went."""
        return self._shelf.drop(kind, key)

    def drop_corrupt(self, unit: StorageUnit, flaw: Flaw) -> int:
        """As `drop`, counted and told; 0 when that unit has been given up or replaced already."""
        if not self.stands(unit):
            return 0
        self._shelf.count(unit.kind, num_corrupt=1)
        dropped = self.drop(unit.kind, unit.key)
        self._shelf.effects.append(UnitCorrupt(unit.kind, unit.key, flaw, dropped))
        return dropped

    # Telling.

    def drain_effects(self) -> tuple[StorageEffect, ...]:
        """What happened since the last call, in order."""
        effects, self._shelf.effects = tuple(self._shelf.effects), []
        return effects

    def drain_work(self) -> tuple[DiskWork, ...]:
        """What is to be done on disk since the last call, in order, before anything is written."""
        return self._shelf.extents.drain_work()

    def holdings(self) -> Iterator[UnitStored]:
        """Everything here, in the order in which it came; what goes while this is read is not."""
        return self._shelf.holdings()

    def statistics(self) -> StorageStatistics:
        extents = self._shelf.extents
        return StorageStatistics(
            kinds=self._shelf.counts(),
            capacity_bytes=self.limits.capacity_bytes,
            used_bytes=extents.used_bytes,
            foreign_bytes=extents.foreign_bytes,
            num_extents=len(extents),
            num_leases=len(self._leases),
            num_truncated=self._truncated,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless all tell the same story, within the capacity."""
        self._shelf.check_integrity()
        used = self._shelf.extents.used_bytes
        assert used <= self.limits.capacity_bytes, f"{used} bytes are more than the capacity"


def _depth(extent: FoundExtent) -> tuple[int, int]:
    """Parents come first: by the first full page; what has none stands on what others have."""
    pages = [unit.page_index for unit in extent.units if unit.kind is Kind.FULL]
    return min(pages, default=len(extent.keys)), extent.generation


def _pages(names: Iterable[UnitName]) -> dict[Kind, list[int]]:
    pages: dict[Kind, list[int]] = {}
    for kind, page in names:
        pages.setdefault(kind, []).append(page)
    return pages


def _top(group: Group) -> int:
    """How many pages of the chain a group reaches over."""
    return 1 + max(page for _, page in group)


def _places(units: Iterable[StorageUnit]) -> list[tuple[int, tuple[int, int]]]:
    return [(unit.index, (unit.offset, unit.num_bytes)) for unit in units]
