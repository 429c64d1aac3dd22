"""What is on disk: a tree of pages over the extents that hold them, and what is given up first.

Full pages are closed under prefixes; snapshots and window pages may go from inner pages. Bytes are
one total over all kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ferryman.cache.branch import Branch
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.slots import SlotHandle
from ferryman.cache.tree import PrefixTree
from ferryman.cache.units import Tier
from ferryman.tiers.extents import ExtentTable, aligned
from ferryman.tiers.layout import kind_shares
from ferryman.tiers.matching import residency
from ferryman.tiers.room import Offer
from ferryman.tiers.storage_values import StorageEffect, StorageKindStatistics, StorageUnit
from ferryman.tiers.values import Residency, UnitForgotten, UnitStored

SNAPSHOT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Stored:
    unit: StorageUnit
    root: PageKey


def handle_of(unit: StorageUnit) -> SlotHandle:
    """How the tree calls a unit: by its extent and its place there."""
    return SlotHandle(unit.kind, unit.index, unit.generation)


class Shelf:
    """The units of one model's state. `is_free` says which of them nobody reads."""

    def __init__(
        self,
        manifest: StateManifest,
        capacity_bytes: int,
        is_free: Callable[[SlotHandle], bool],
    ) -> None:
        self.manifest, self.capacity_bytes = manifest, capacity_bytes
        self.extents = ExtentTable()
        self.effects: list[StorageEffect] = []
        self._is_free = is_free
        self._tree = PrefixTree.of(manifest)
        self._stored: dict[tuple[Kind, PageKey], _Stored] = {}
        self._counts = {kind: Counter[str]() for kind in manifest.kinds}

    # Matching: no side effects.

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        return residency(self._tree, self.manifest, keys)

    def unit(self, kind: Kind, key: PageKey) -> StorageUnit | None:
        found = self._stored.get((kind, key))
        return found.unit if found else None

    def is_path(self, keys: Sequence[PageKey]) -> bool:
        """Whether all these first pages of a chain are here."""
        return self._tree.match_depth(keys) == len(keys)

    def anchor(self, keys: Sequence[PageKey], depth: int) -> tuple[SlotHandle, ...]:
        """The full page whose lease keeps the path of `depth` pages."""
        if depth == 0 or Kind.FULL not in self.manifest.kinds:
            return ()
        return (self._tree.slot(Kind.FULL, keys[depth - 1]),)

    def handles(self, units: Iterable[tuple[Kind, PageKey]]) -> Iterator[SlotHandle]:
        """How the tree calls them. Raises KeyError for what is not here."""
        return (self._tree.slot(kind, key) for kind, key in units)

    def offer(self, keys: Sequence[PageKey], pages: Mapping[Kind, Sequence[int]]) -> Offer:
        """What of these units is new and has a place on the chain."""
        return Offer(self.manifest, keys, pages, self._tree)

    # Growing.

    def touch(self, keys: Iterable[PageKey], now: float) -> None:
        """Notes a use."""
        for key in keys:
            self._tree.touch(key, now)

    def insert(
        self, keys: Sequence[PageKey], units: Sequence[StorageUnit], now: float
    ) -> tuple[StorageUnit, ...]:
        """Units of an extent become visible, but for those that another extent holds; which."""
        branch: dict[Kind, dict[int, SlotHandle]] = {}
        for unit in units:
            branch.setdefault(unit.kind, {})[unit.page_index] = handle_of(unit)
        adopted = set(self._tree.insert(Branch(keys, branch), now).adopted)
        new = tuple(unit for unit in units if handle_of(unit) in adopted)
        for unit in new:
            self._stored[unit.kind, unit.key] = _Stored(unit, keys[0])
        self.discard(unit for unit in units if handle_of(unit) not in adopted)
        self._note_changes()
        return new

    def discard(self, units: Iterable[StorageUnit]) -> None:
        """Units on disk that no tree has."""
        for unit in units:
            self.extents.drop(unit.generation, unit.index)

    # Giving up.

    def make_room(self, num_bytes: int) -> None:
        """Other models' extents go first, then what is worth least of the kind that takes most."""
        limit = self.capacity_bytes - num_bytes
        while self.extents.used_bytes > limit and self.extents.drop_oldest_foreign():
            pass
        while (short := self.extents.used_bytes - limit) > 0:
            if not any(self._evict(kind, short) for kind in self._by_excess()):
                return

    def _by_excess(self) -> list[Kind]:
        """Kinds by how much they take in proportion to their share, the greediest first."""
        shares = kind_shares(self.manifest.kinds, SNAPSHOT_SHARE)
        taken = {kind: self._counts[kind]["num_bytes"] / share for kind, share in shares.items()}
        return sorted(taken, key=lambda kind: -taken[kind])

    def _evict(self, kind: Kind, short: int) -> bool:
        """Some units of a kind go, not all that are lacking: then it is again asked which kind."""
        each = aligned(self.manifest.layout(kind).slot_bytes)
        num_units = max(1, short // (each * len(self.manifest.kinds)))
        dropped = self._tree.evict(kind, num_units, self._is_free)
        for handle in dropped:
            self.count(handle.kind, num_evicted=1)
        self._note_changes()
        return bool(dropped)

    def flush(self) -> int:
        """Gives up all units that nobody reads; how many went."""
        before = len(self._stored)
        for kind, counts in self._counts.items():
            for handle in self._tree.evict(kind, counts["num_units"], self._is_free):
                self.count(handle.kind, num_evicted=1)
            self._note_changes()
        return before - len(self._stored)

    def drop(self, kind: Kind, key: PageKey) -> int:
        """Gives up a unit and all that stands on it, leased or not; how many went."""
        if (kind, key) not in self._stored:
            return 0
        self._tree.drop(kind, key)
        return self._note_changes()

    def _note_changes(self) -> int:
        """Tells what came and went; how many went."""
        gone = 0
        changes = self._tree.drain_changes()
        for name, is_stored in [((c.kind, key), c.is_stored) for c in changes for key in c.keys]:
            kind, _ = name
            if is_stored:
                found = self._stored[name]
                self.count(kind, num_units=1, num_bytes=found.unit.num_bytes)
                self.effects.append(_stored_effect(found))
                continue
            found = self._stored.pop(name)
            gone += 1
            self.discard([found.unit])
            self.count(kind, num_units=-1, num_bytes=-found.unit.num_bytes)
            self.effects.append(UnitForgotten(*name, found.root, tier=Tier.STORAGE))
        return gone

    # Telling.

    def holdings(self) -> Iterator[UnitStored]:
        """Everything here, in the order in which it came; what goes while this is read is not."""
        names = tuple(self._stored)
        return (_stored_effect(self._stored[name]) for name in names if name in self._stored)

    def count(self, kind: Kind, **more: int) -> None:
        """Adds to the counts of a kind, by their names in StorageKindStatistics."""
        counts = self._counts[kind]
        for name, number in more.items():
            counts[name] += number

    def counts(self) -> dict[Kind, StorageKindStatistics]:
        return {kind: StorageKindStatistics(**each) for kind, each in self._counts.items()}

    def check_integrity(self) -> None:
        """Raises AssertionError unless tree, table and extents tell the same story."""
        self._tree.check_integrity()
        assert set(self._tree.units()) == set(self._stored), "units are miscounted"
        for (kind, key), stored in self._stored.items():
            assert self._tree.slot(kind, key) == handle_of(stored.unit), "another unit is meant"
        alive = {(each.unit.generation, each.unit.index) for each in self._stored.values()}
        assert alive == set(self.extents.units()), "a unit on disk is nobody's"


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
