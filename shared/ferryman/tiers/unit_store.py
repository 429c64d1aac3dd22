"""Units of one model's state in one tier: a prefix tree over slots of an arena, or over extents.

Pure: no bytes, no clock. This class does what both tiers have in common: matching, inserting,
dropping, and effects for other components. `HostStore` adds readers and writers of an arena,
`StorageStore` plans of extents.

Full pages are closed under prefixes; snapshots and window pages may be dropped from inner pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Protocol

from ferryman.cache.candidates import resume_depths
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.node import Branch
from ferryman.cache.resume import resume_set
from ferryman.cache.slots import SlotHandle
from ferryman.cache.tree import PrefixTree
from ferryman.cache.units import Tier
from ferryman.tiers.storage_values import TierEffect
from ferryman.tiers.unit_group import WriteOffer
from ferryman.tiers.values import (
    AcquireRequest,
    Residency,
    StoredUnit,
    UnitCounts,
    UnitForgotten,
    UnitName,
    UnitStored,
)

# The deepest resume point, and a second one as a fallback if loading the first costs more than
# computing.
MAX_SNAPSHOTS_GRANTED = 2


class UnitAllocator(Protocol):
    """The places of units: slots of an arena, or places in extents."""

    def is_unused(self, unit: SlotHandle) -> bool:
        """Whether only the tree holds it."""
        ...

    def give_back(self, units: Iterable[SlotHandle]) -> None:
        """Takes back units that the tree no longer holds."""
        ...


@dataclass(frozen=True, slots=True)
class _Resident:
    unit: StoredUnit
    root: PageKey


class UnitStore:
    """The units of one tier by page and kind, and the effects of their changes."""

    def __init__(self, manifest: StateManifest, tier: Tier, allocator: UnitAllocator) -> None:
        self.manifest = manifest
        self._tier, self._allocator = tier, allocator
        self._tree = PrefixTree.of(manifest)
        self._resident: dict[tuple[Kind, PageKey], _Resident] = {}
        self._effects: list[TierEffect] = []
        self._counts = {kind: Counter[str]() for kind in manifest.kinds}

    # Matching: no side effects.

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        """The units of a chain that are here; marks nothing as used."""
        kinds, has = self.manifest.kinds, self._tree.has
        pages = {k: tuple(page for page, key in enumerate(keys) if has(k, key)) for k in kinds}
        return Residency(self.usable_pages(keys), pages)

    def usable_pages(self, keys: Sequence[PageKey]) -> int:
        """The longest prefix of a chain, in pages, whose whole resume set is here; marks nothing as
        used."""
        matched = self._tree.match_depth(keys)
        return next(resume_depths(self._tree, self.manifest, keys, matched), 0)

    def unit(self, kind: Kind, key: PageKey) -> StoredUnit | None:
        """The place of a unit and its expected digest."""
        resident = self._resident.get((kind, key))
        return resident.unit if resident else None

    def deepest_chain(self, units: Iterable[tuple[Kind, PageKey]]) -> tuple[PageKey, ...]:
        """The keys of all pages up to the deepest of these units that is here; empty if none is."""
        here = [self._tree.node(key) for kind, key in units if self._tree.has(kind, key)]
        deepest = max(here, key=lambda node: (node.depth, node.key), default=None)
        return self._tree.chain(deepest.key) if deepest else ()

    def next_to_evict(self, kind: Kind) -> Iterator[PageKey]:
        """Pages in the order in which eviction would drop their units of a kind."""
        return self._tree.next_to_evict(kind, self._allocator.is_unused)

    def offer(self, keys: Sequence[PageKey], units: Mapping[Kind, Sequence[int]]) -> WriteOffer:
        """The units among these that would be new here, and the resume points they would make."""
        return WriteOffer(self.manifest, keys, units, self._tree)

    def _anchor(self, keys: Sequence[PageKey], depth: int) -> tuple[SlotHandle, ...]:
        """The full page whose lease keeps the path of `depth` pages in the tree."""
        if depth == 0 or Kind.FULL not in self.manifest.kinds:
            return ()
        return (self._tree.slot(Kind.FULL, keys[depth - 1]),)

    def _handles(self, units: Iterable[tuple[Kind, PageKey]]) -> tuple[SlotHandle, ...]:
        """The tree's handles of these units. Raises KeyError for a unit that is not here."""
        return tuple(self._tree.slot(kind, key) for kind, key in units)

    # Inserting.

    def _insert(
        self, keys: Sequence[PageKey], units: Sequence[StoredUnit], now: float
    ) -> tuple[StoredUnit, ...]:
        """Makes units of a chain visible and returns the new ones. If the tree has a unit
        already, it keeps that one, and the caller frees the other."""
        branch: dict[Kind, dict[int, SlotHandle]] = {}
        for unit in units:
            branch.setdefault(unit.kind, {})[unit.page_index] = unit.handle
        adopted = set(self._tree.insert(Branch(keys, branch), now).adopted)
        new = tuple(unit for unit in units if unit.handle in adopted)
        for unit in new:
            self._resident[unit.kind, unit.key] = _Resident(unit, keys[0])
        self._note_changes()
        return new

    # Dropping.

    def _evict(self, kind: Kind, num_units: int) -> int:
        """Evicts the least valuable unused units of a kind. Returns how many units were dropped, of
        all kinds: dropping a full page drops the units that stand on it."""
        self._tree.evict(kind, num_units, self._allocator.is_unused)
        gone = self._note_changes()
        for gone_kind, number in gone.items():
            self._count(gone_kind, num_evicted=number)
        return gone.total()

    def flush(self) -> int:
        """Evicts every unit without reader or writer and returns how many were dropped."""
        return sum(self._evict(kind, counts["num_units"]) for kind, counts in self._counts.items())

    def drop(self, kind: Kind, key: PageKey) -> int:
        """Drops a unit and all that stands on it, leased or not; returns how many."""
        if (kind, key) not in self._resident:
            return 0
        self._tree.drop(kind, key)
        return self._note_changes().total()

    def drop_chain(self, first: PageKey) -> int:
        """Drops all units of chains that begin with this page, leased or not; returns how many."""
        if not self._tree.match_depth((first,)):
            return 0
        self._tree.drop_chain(first)
        return self._note_changes().total()

    def _note_changes(self) -> Counter[Kind]:
        """Records the tree's changes as counts and effects; returns how many units of each kind
        were dropped."""
        gone: Counter[Kind] = Counter()
        changes = self._tree.drain_changes()
        for name, is_stored in [((c.kind, key), c.is_stored) for c in changes for key in c.keys]:
            kind, _ = name
            if is_stored:
                resident = self._resident[name]
                self._count(kind, num_units=1, num_bytes=resident.unit.num_bytes)
                self._effects.append(self._stored_effect(resident))
                continue
            resident = self._resident.pop(name)
            gone[kind] += 1
            self._count(kind, num_units=-1, num_bytes=-resident.unit.num_bytes)
            self._allocator.give_back([resident.unit.handle])
            self._effects.append(UnitForgotten(*name, resident.root, tier=self._tier))
        return gone

    # Reports.

    def _stored_effect(self, resident: _Resident) -> UnitStored:
        unit = resident.unit
        return UnitStored(
            unit.kind,
            unit.key,
            resident.root,
            unit.num_bytes,
            unit.digest,
            unit.generation,
            tier=self._tier,
        )

    def drain_effects(self) -> tuple[TierEffect, ...]:
        """The effects since the last call, in order."""
        effects, self._effects = tuple(self._effects), []
        return effects

    def holdings(self) -> Iterator[UnitStored]:
        """Every unit here in the order of insertion, so parents first, for an index that must be
        rebuilt. Units dropped during the iteration are left out."""
        names = tuple(self._resident)
        return (self._stored_effect(self._resident[n]) for n in names if n in self._resident)

    def _count(self, kind: Kind, **more: int) -> None:
        """Adds to the counts of a kind, by their names in UnitCounts."""
        counts = self._counts[kind]
        for name, number in more.items():
            counts[name] += number

    def counts(self, kind: Kind) -> UnitCounts:
        """Units of a kind that are here, and counts of their events since the start."""
        return UnitCounts(**self._counts[kind])

    def check_integrity(self) -> None:
        """Raises AssertionError unless tree and table agree."""
        self._tree.check_integrity()
        held = {name: self._tree.slot(*name) for name in self._tree.units()}
        table = {name: resident.unit.handle for name, resident in self._resident.items()}
        assert table == held, "units are miscounted"


# The units granted to a reader.


def resume_points(
    tree: PrefixTree, manifest: StateManifest, ask: AcquireRequest, matched: int
) -> list[int]:
    """The depths that a reader may resume from, deepest first. They are few because each costs a
    lease."""
    limit = min(matched, ask.max_pages)
    most = MAX_SNAPSHOTS_GRANTED if Kind.RECURRENT in manifest.kinds else 1
    depths = resume_depths(tree, manifest, ask.keys, limit)
    return list(islice(takewhile(lambda depth: depth > ask.min_pages, depths), most))


def granted_units(
    manifest: StateManifest, ask: AcquireRequest, matched: int, points: Sequence[int]
) -> list[UnitName]:
    """The units that a reader needs for these resume points; `matched` pages of the chain are here.

    Full pages are granted even beyond the last resume point: they show where the prompt leaves the
    known path.
    """
    kinds = manifest.kinds
    names: list[UnitName] = []
    if Kind.FULL in kinds:
        names += [(Kind.FULL, page) for page in range(ask.have_pages, matched)]
    if Kind.WINDOW in kinds:
        windows = [resume_set(manifest, depth * manifest.page_size).window for depth in points]
        pages = sorted({page for window in windows for page in range(*window)})
        names += [(Kind.WINDOW, page) for page in pages]
    if Kind.RECURRENT in kinds:
        names += [(Kind.RECURRENT, depth - 1) for depth in sorted(points)]
    return names
