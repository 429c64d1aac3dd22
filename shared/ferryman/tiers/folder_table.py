"""Extents that other nodes own, as their sealed headers show them. Pure.

The table owns nothing and leases nothing: an owner drops units and removes extents at any moment.
So an entry is a place to try, and a reader that does not find the unit there drops the entry. Only
living units are remembered; all others are looked up again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.tiers.storage_values import FoundExtent
from ferryman.tiers.values import StoredUnit


class ExtentName(NamedTuple):
    """An extent of another node: the name of that node's folder, and a generation there."""

    folder: str
    generation: int


UnitPlace = tuple[ExtentName, Kind, PageKey]


class FolderTable:
    """The extents of one model that were looked at last: `max_entries` at most; an extent is an
    entry, and so is each of its units."""

    def __init__(self, manifest_digest: str, max_entries: int) -> None:
        self.max_entries = max_entries
        self._digest = manifest_digest
        self._extents: OrderedDict[ExtentName, dict[tuple[Kind, PageKey], StoredUnit]]
        self._extents = OrderedDict()
        self.num_entries = 0

    def lacking(self, places: Iterable[UnitPlace], most: int) -> tuple[ExtentName, ...]:
        """The extents for which the table lacks one of these units; the first `most`, each once."""
        unknown = (name for name, kind, key in places if self.unit(name, kind, key) is None)
        return tuple(dict.fromkeys(unknown))[:most]

    def add(self, name: ExtentName, extent: FoundExtent) -> None:
        """Replaces an extent by its living units: none if it is another model's, or if they are
        more than the whole table may hold."""
        is_ours = extent.manifest_digest == self._digest and extent.generation == name.generation
        units = {(unit.kind, unit.key): unit for unit in extent.units if is_ours}
        self._put(name, units if len(units) < self.max_entries else {})

    def _put(self, name: ExtentName, units: dict[tuple[Kind, PageKey], StoredUnit]) -> None:
        self.remove(name)
        if units:
            self._extents[name] = units
            self.num_entries += 1 + len(units)
        while self.num_entries > self.max_entries:
            self.remove(next(iter(self._extents)))

    def remove(self, name: ExtentName) -> None:
        """Forgets an extent that is not there, or was not sealed for this place."""
        if (units := self._extents.pop(name, None)) is not None:
            self.num_entries -= 1 + len(units)

    def unit(self, name: ExtentName, kind: Kind, key: PageKey) -> StoredUnit | None:
        """The unit, if that extent is known to hold it; marks the extent as used."""
        if name not in self._extents:
            return None
        self._extents.move_to_end(name)
        return self._extents[name].get((kind, key))

    def drop(self, name: ExtentName, unit: StoredUnit) -> None:
        """Forgets a unit that was not at the place in its header."""
        if self._extents.get(name, {}).pop((unit.kind, unit.key), None):
            self.num_entries -= 1

    def check_integrity(self) -> None:
        """Raises AssertionError unless the count is right and within its bound."""
        counted = sum(1 + len(units) for units in self._extents.values())
        assert self.num_entries == counted <= self.max_entries, "entries are not counted right"
