"""The storage tier as a value: what is on disk, who reads it, what is given up for what.

Pure: no files, no clock. Full pages are closed under prefixes, snapshots and window pages may go
from inner pages. One store is one extent, whose units are dropped one by one. What others have to
know comes out of `drain_effects`, what is to be done on disk out of `drain_work`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.cache.slots import SlotHandle
from ferryman.cache.tree import Branch, PrefixTree
from ferryman.cache.units import Tier
from ferryman.tiers.extents import DiskWork, ExtentTable, aligned, lay_out_extent
from ferryman.tiers.layout import kind_shares
from ferryman.tiers.room import Group, Offer
from ferryman.tiers.storage_leases import StorageLeases
from ferryman.tiers.storage_values import (
    ExtentPlan,
    Flaw,
    FoundExtent,
    StorageEffect,
    StorageKindStatistics,
    StorageLimits,
    StorageStatistics,
    StorageUnit,
    StoringTruncated,
    UnitCorrupt,
)
from ferryman.tiers.values import Residency, UnitForgotten, UnitName, UnitStored

SNAPSHOT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Stored:
    unit: StorageUnit
    root: PageKey


@dataclass(frozen=True, slots=True)
class _Writing:
    plan: ExtentPlan
    base: int
    anchor: tuple[SlotHandle, ...]


class StorageStore:
    """The units of one model's state in one folder."""

    def __init__(self, manifest: StateManifest, limits: StorageLimits) -> None:
        self.manifest, self.limits = manifest, limits
        self._tree = PrefixTree(manifest.kinds)
        self._extents = ExtentTable()
        self._leases = StorageLeases(limits.max_leases, limits.lease_seconds)
        self._stored: dict[tuple[Kind, PageKey], _Stored] = {}
        self._writing: dict[int, _Writing] = {}
        self._effects: list[StorageEffect] = []
        self._counts = {kind: StorageKindStatistics() for kind in manifest.kinds}
        self._truncated = 0

    # Matching.

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        """What is here of a chain; touches nothing."""
        pages = {
            kind: tuple(page for page, key in enumerate(keys) if self._tree.has(kind, key))
            for kind in self.manifest.kinds
        }
        depth = self._tree.match_depth(keys)
        return Residency(next((d for d in range(depth, 0, -1) if self._resumes(keys, d)), 0), pages)

    def _resumes(self, keys: Sequence[PageKey], depth: int) -> bool:
        needs = resume_set(self.manifest, depth * self.manifest.page_size)
        if needs.needs_snapshot and not self._tree.has(Kind.RECURRENT, keys[depth - 1]):
            return False
        return all(self._tree.has(Kind.WINDOW, keys[page]) for page in range(*needs.window))

    def stands(self, unit: StorageUnit) -> bool:
        """Whether these very bytes are still what the store means by this unit."""
        found = self._stored.get((unit.kind, unit.key))
        return found is not None and found.unit == unit

    # Readers.

    def lease(
        self, lease_id: str, keys: Sequence[PageKey], names: Iterable[UnitName], now: float
    ) -> tuple[StorageUnit, ...]:
        """Keeps what is here of the units named, and the path to them, until the lease's end."""
        self._leases.check_new(lease_id)
        units = []
        for kind, page in dict.fromkeys(names):
            found = self._stored.get((kind, keys[page])) if page < len(keys) else None
            self._count(kind, num_hits=found is not None, num_misses=found is None)
            if found:
                units.append(found.unit)
        if units:
            pages = {unit.page_index for unit in units}
            for page in sorted(pages):
                self._tree.touch(keys[page], now)
            anchor = self._anchor(keys, 1 + max(pages))
            self._leases.add(lease_id, (*map(_handle, units), *anchor), now)
        return tuple(units)

    def _anchor(self, keys: Sequence[PageKey], depth: int) -> tuple[SlotHandle, ...]:
        """The full page whose lease keeps the path of `depth` pages in the tree."""
        if depth == 0 or Kind.FULL not in self.manifest.kinds:
            return ()
        return (self._tree.slot(Kind.FULL, keys[depth - 1]),)

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
        offered: dict[Kind, list[int]] = {}
        for kind, page in digests:
            offered.setdefault(kind, []).append(page)
        offer = Offer(self.manifest, keys, offered, self._tree)
        groups = list(offer.choices())
        if not groups:
            return None
        anchor = self._anchor(keys, offer.base)
        self._leases.keep(anchor)
        if offer.base:
            self._tree.touch(keys[offer.base - 1], now)
        plan = self._take_room(keys, groups, digests)
        if plan is None:
            self._leases.let_go(anchor)
        else:
            self._writing[plan.generation] = _Writing(plan, offer.base, anchor)
        return plan

    def _take_room(
        self, keys: Sequence[PageKey], groups: Sequence[Group], digests: Mapping[UnitName, bytes]
    ) -> ExtentPlan | None:
        """Evicts for the first choice that can fit at all, then takes the first that does."""
        has_evicted, num_asked, capacity = False, len(groups[0]), self.limits.capacity_bytes
        chosen = None
        for group in groups:
            file_bytes = self._file_bytes(group)
            if file_bytes <= capacity and not has_evicted:
                self._make_room(file_bytes)
                has_evicted = True
            if self._extents.used_bytes + file_bytes <= capacity:
                chosen = self._plan(keys, group, digests, num_asked)
                break
        num_stored = len(chosen.units) if chosen else 0
        if num_stored < num_asked:
            self._truncated += 1
            self._effects.append(StoringTruncated(num_asked, num_stored))
        return chosen

    def _file_bytes(self, group: Group) -> int:
        sizes = [self.manifest.layout(kind).slot_bytes for kind, _ in group]
        return lay_out_extent(1 + max(page for _, page in group), sizes).file_bytes

    def _plan(
        self,
        keys: Sequence[PageKey],
        group: Group,
        digests: Mapping[UnitName, bytes],
        num_asked: int,
    ) -> ExtentPlan:
        top = 1 + max(page for _, page in group)
        sizes = [self.manifest.layout(kind).slot_bytes for kind, _ in group]
        layout = lay_out_extent(top, sizes)
        generation = self._extents.reserve(layout.file_bytes)
        units = tuple(
            StorageUnit(
                kind=kind,
                page_index=page,
                key=keys[page],
                num_bytes=sizes[index],
                digest=digests[kind, page],
                generation=generation,
                index=index,
                offset=layout.offsets[index],
            )
            for index, (kind, page) in enumerate(group)
        )
        return ExtentPlan(generation, tuple(keys[:top]), units, layout.file_bytes, num_asked)

    def commit(self, generation: int, now: float) -> int:
        """The extent is on disk: its units become visible. How many are new; 0 where the pages
        below are no more, and then the file is to be removed."""
        writing = self._end_writing(generation)
        plan = writing.plan
        below = plan.keys[: writing.base]
        self._add(plan, plan.file_bytes - sum(aligned(unit.num_bytes) for unit in plan.units))
        if self._tree.match_depth(below) < len(below):
            self._drop_on_disk(plan.units)
            return 0
        for unit in plan.units:
            self._count(unit.kind, num_stored=1)
        return self._insert(plan.keys, plan.units, now)

    def abort(self, generation: int) -> None:
        """The extent could not be written."""
        self._end_writing(generation)

    def _end_writing(self, generation: int) -> _Writing:
        writing = self._writing.pop(generation)
        self._extents.give_back(generation)
        self._leases.let_go(writing.anchor)
        return writing

    def _add(self, extent: ExtentPlan | FoundExtent, header_bytes: int) -> None:
        places = [(unit.index, (unit.offset, unit.num_bytes)) for unit in extent.units]
        self._extents.add(extent.generation, header_bytes, places)

    def _insert(self, keys: Sequence[PageKey], units: Iterable[StorageUnit], now: float) -> int:
        """The tree keeps what it has; units that another extent holds are dropped here."""
        branch: dict[Kind, dict[int, SlotHandle]] = {}
        for unit in units:
            branch.setdefault(unit.kind, {})[unit.page_index] = _handle(unit)
        adopted = set(self._tree.insert(Branch(keys, branch), now).adopted)
        for unit in units:
            if _handle(unit) in adopted:
                self._stored[unit.kind, unit.key] = _Stored(unit, keys[0])
        self._drop_on_disk(unit for unit in units if _handle(unit) not in adopted)
        self._note_changes()
        return len(adopted)

    def _drop_on_disk(self, units: Iterable[StorageUnit]) -> None:
        for unit in units:
            self._extents.drop(unit.generation, unit.index)

    def restore(self, found: Iterable[FoundExtent], now: float) -> None:
        """Take in what an earlier life left; what has no place on a chain any more is dropped."""
        for extent in sorted(found, key=lambda extent: extent.generation):
            if extent.manifest_digest != self.manifest.digest:
                self._extents.add_foreign(extent.generation, extent.num_bytes)
                continue
            self._add(extent, extent.header_bytes)
            offered: dict[Kind, list[int]] = {}
            for unit in extent.units:
                offered.setdefault(unit.kind, []).append(unit.page_index)
            offer = Offer(self.manifest, extent.keys, offered, self._tree)
            placed = set(next(offer.choices(), ()))
            units = [unit for unit in extent.units if (unit.kind, unit.page_index) in placed]
            self._drop_on_disk(
                unit for unit in extent.units if (unit.kind, unit.page_index) not in placed
            )
            if units:
                top = 1 + max(unit.page_index for unit in units)
                self._insert(extent.keys[:top], units, now)
        self._make_room(0)

    # Giving up.

    def _make_room(self, num_bytes: int) -> None:
        """Other models' extents go first, then what is worth least of the kind that takes most."""
        limit = self.limits.capacity_bytes - num_bytes
        while self._extents.used_bytes > limit and self._extents.drop_oldest_foreign():
            pass
        while (short := self._extents.used_bytes - limit) > 0:
            if not any(self._evict(kind, short) for kind in self._by_excess()):
                return

    def _by_excess(self) -> list[Kind]:
        """Kinds by how much more they take than their share, the greediest first."""
        shares = kind_shares(self.manifest.kinds, SNAPSHOT_SHARE)
        taken = {kind: self._counts[kind].num_bytes / share for kind, share in shares.items()}
        return sorted(taken, key=lambda kind: -taken[kind])

    def _evict(self, kind: Kind, short: int) -> bool:
        """Some units of a kind go, not all that are lacking: then it is again asked which kind."""
        each = aligned(self.manifest.layout(kind).slot_bytes)
        num_units = max(1, short // (each * len(self.manifest.kinds)))
        dropped = self._tree.evict(kind, num_units, self._leases.is_free)
        for handle in dropped:
            self._count(handle.kind, num_evicted=1)
        self._note_changes()
        return bool(dropped)

    def drop(self, kind: Kind, key: PageKey) -> int:
        """Gives up a unit and all that stands on it, leased or not; how many went."""
        if (kind, key) not in self._stored:
            return 0
        self._tree.drop(kind, key)
        return self._note_changes()

    def drop_corrupt(self, unit: StorageUnit, flaw: Flaw) -> int:
        """As `drop`, counted and told; 0 when that unit has been given up or replaced already."""
        if not self.stands(unit):
            return 0
        self._count(unit.kind, num_corrupt=1)
        dropped = self.drop(unit.kind, unit.key)
        self._effects.append(UnitCorrupt(unit.kind, unit.key, flaw, dropped))
        return dropped

    def _note_changes(self) -> int:
        """Tells what came and went; how many went."""
        gone = 0
        for change in self._tree.drain_changes():
            if change.is_stored:
                found = self._stored[change.kind, change.key]
                self._count(change.kind, num_units=1, num_bytes=found.unit.num_bytes)
                self._effects.append(_stored_effect(found))
                continue
            found = self._stored.pop((change.kind, change.key))
            self._extents.drop(found.unit.generation, found.unit.index)
            self._count(change.kind, num_units=-1, num_bytes=-found.unit.num_bytes)
            gone += 1
            self._effects.append(
                UnitForgotten(change.kind, change.key, found.root, tier=Tier.STORAGE)
            )
        return gone

    # Telling.

    def drain_effects(self) -> tuple[StorageEffect, ...]:
        """What happened since the last call, in order."""
        effects, self._effects = tuple(self._effects), []
        return effects

    def drain_work(self) -> tuple[DiskWork, ...]:
        """What is to be done on disk since the last call, in order, before anything is written."""
        return self._extents.drain_work()

    def holdings(self) -> Iterator[UnitStored]:
        """Everything here, parents first."""
        return (_stored_effect(self._stored[name]) for name in self._tree.units())

    def _count(self, kind: Kind, **more: int) -> None:
        counts = self._counts[kind]
        grown = {name: getattr(counts, name) + number for name, number in more.items()}
        self._counts[kind] = replace(counts, **grown)

    def statistics(self) -> StorageStatistics:
        return StorageStatistics(
            kinds=dict(self._counts),
            capacity_bytes=self.limits.capacity_bytes,
            used_bytes=self._extents.used_bytes,
            foreign_bytes=self._extents.foreign_bytes,
            num_extents=len(self._extents),
            num_leases=len(self._leases),
            num_truncated=self._truncated,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless tree, table and extents tell the same story."""
        self._tree.check_integrity()
        assert set(self._tree.units()) == set(self._stored), "units are miscounted"
        for (kind, key), stored in self._stored.items():
            assert self._tree.slot(kind, key) == _handle(stored.unit), "another unit is meant"
        alive = {(each.unit.generation, each.unit.index) for each in self._stored.values()}
        assert alive == set(self._extents.units()), "a unit on disk is nobody's"
        assert self._extents.used_bytes <= self.limits.capacity_bytes, "more than the capacity"


def _handle(unit: StorageUnit) -> SlotHandle:
    return SlotHandle(unit.kind, unit.index, unit.generation)


def _stored_effect(stored: _Stored) -> UnitStored:
    unit = stored.unit
    return UnitStored(
        unit.kind,
        unit.key,
        stored.root,
        unit.num_bytes,
        unit.digest,
        unit.generation,
        tier=Tier.STORAGE,
    )
