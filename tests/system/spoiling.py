"""Spoils the storage tier of a cluster: many files at once, each in a way of its own.

The bytes on disk decide whether a unit counts as spoilt: its entry, its seal or its content differ
from the bytes that were written under its file's name.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster_keys import STORED
from tests.hostcache.corruptions import CORRUPTIONS, Scene, entry, payload

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.tiers.storage_values import FoundExtent
from ferryman.tiers.values import StoredUnit
from ferryman_hostcache.storage.extent import BadExtent, header_from_bytes

# A missing file is an error of the disk, not a flaw, and five in a row have the folder rest.
MAX_VANISHED = 1

UnitKey = tuple[Kind, PageKey]
Content = tuple[bytes, bytes]


@dataclass(frozen=True)
class SpoiltUnit:
    """A unit as it was stored, and the entry and bytes that were left in its place."""

    unit: StoredUnit
    left: Content


@dataclass(frozen=True)
class Spoilt:
    """The units spoilt in a round, and how many files were spoilt in each way."""

    units: Mapping[UnitKey, SpoiltUnit]
    ways: Counter[str]

    def num_usable(self, keys: Sequence[PageKey]) -> int:
        """Pages of a chain before the first whose content was spoilt."""
        spoilt = (page for page, key in enumerate(keys) if (Kind.FULL, key) in self.units)
        return next(spoilt, len(keys))

    def has_snapshot(self, keys: Sequence[PageKey], num_pages: int) -> bool:
        """Whether the snapshot after `num_pages` pages was not spoilt."""
        return (Kind.RECURRENT, keys[num_pages - 1]) not in self.units

    def asked_for(self, chains: Sequence[Sequence[PageKey]]) -> list[SpoiltUnit]:
        """The spoilt units that a request must read to resume at the end of these chains."""
        wanted = {(Kind.FULL, key) for keys in chains for key in keys}
        wanted |= {(Kind.RECURRENT, keys[-1]) for keys in chains}
        return [spoilt for name, spoilt in self.units.items() if name in wanted]


@dataclass
class StorageSpoiler:
    """Spoils one folder. `older` keeps each file as an earlier round found it, by its first unit;
    `unread` keeps the units that earlier rounds spoilt and that the host-cache has not found yet.
    """

    folder: Path
    manifest: StateManifest
    rng: random.Random
    older: dict[UnitKey, tuple[int, bytes]] = field(default_factory=dict)
    unread: dict[UnitKey, SpoiltUnit] = field(default_factory=dict)

    def spoil(self, share: float) -> Spoilt:
        """Spoils the share `share` of the files, in one round."""
        found = {path: each for path in self._files() for each in self._read(path)}
        extents = {path: extent for path, (extent, _) in found.items()}
        ways: Counter[str] = Counter()
        chosen = [path for path in sorted(found) if self.rng.random() < share]
        for path in chosen:
            ways[self._spoil_file(path, extents, ways)] += 1
        units = {
            (spoilt.unit.kind, spoilt.unit.key): spoilt
            for path in chosen
            for spoilt in _spoilt(path, *found[path])
        }
        for extent, data in found.values():
            self.older[_name_of(extent)] = extent.generation, data
        return Spoilt({**self.unread, **units}, ways)

    def keep_unread(self, spoilt: Spoilt, *, is_new_life: bool) -> None:
        """Ends a round. A spoilt unit counts as found if the host-cache has dropped it, or if its
        file no longer lists it and a new process has read the file."""
        left = self.not_given_up(spoilt.units.values())
        claimed = {unit for unit, _ in self._claims()}
        self.unread = {
            (each.unit.kind, each.unit.key): each
            for each in left
            if not is_new_life or each.unit in claimed
        }

    def not_given_up(self, units: Iterable[SpoiltUnit]) -> list[SpoiltUnit]:
        """The units whose place is unchanged, and that were not stored again.

        A dropped unit is flagged there, and its bytes become a hole; in the file of another key
        that may look no different.
        """
        stored: dict[UnitKey, set[tuple[StoredUnit, Content]]] = {}
        for unit, content in self._claims():
            stored.setdefault((unit.kind, unit.key), set()).add((unit, content))
        return [
            each
            for each in units
            if self._is_as_left(each)
            and not stored.get((each.unit.kind, each.unit.key), set()) - {(each.unit, each.left)}
        ]

    def _is_as_left(self, spoilt: SpoiltUnit) -> bool:
        path = self._path(spoilt.unit)
        return path.exists() and _content(path.read_bytes(), spoilt.unit) == spoilt.left

    def _claims(self) -> Iterable[tuple[StoredUnit, Content]]:
        """The units that all whole files list, each with the bytes at its place."""
        for path in self._files():
            for extent, data in self._read(path):
                for unit in extent.units:
                    yield unit, _content(data, unit)

    def _path(self, unit: StoredUnit) -> Path:
        return self.folder / f"{unit.generation:016x}.extent"

    def _files(self) -> Iterable[Path]:
        return self.folder.glob("*.extent")

    def _read(self, path: Path) -> Sequence[tuple[FoundExtent, bytes]]:
        """None of a file that an earlier round left spoilt, or that is going away."""
        try:
            data = path.read_bytes()
            found = header_from_bytes(
                data, STORED, generation=int(path.stem, 16), file_bytes=len(data)
            )
        except (BadExtent, OSError, ValueError):
            return ()
        is_ours = found.manifest_digest == self.manifest.digest
        return ((found, data),) if found.units and is_ours else ()

    def _spoil_file(
        self, path: Path, extents: Mapping[Path, FoundExtent], ways: Counter[str]
    ) -> str:
        scene = self._scene(path, extents)
        possible = [way for way in CORRUPTIONS if _is_possible(way, scene)]
        if ways["vanish"] >= MAX_VANISHED:
            possible.remove("vanish")
        before = path.read_bytes()
        for way in self.rng.sample(possible, len(possible)):
            CORRUPTIONS[way](scene)
            if not path.exists() or path.read_bytes() != before:
                return way  # of two files that were made the same one cannot take from the other
        raise AssertionError(f"nothing spoils {path.name}")

    def _scene(self, path: Path, extents: Mapping[Path, FoundExtent]) -> Scene:
        """Where there is no other unit, the unit itself stands for it; no older file is empty."""
        extent = extents[path]
        unit = self.rng.choice(extent.units)
        neighbours = self._like(unit, [extent])
        strangers = self._like(unit, (each for at, each in extents.items() if at != path))
        generation, older = self.older.get(_name_of(extent), (extent.generation, b""))
        return Scene(
            rng=self.rng,
            manifest=self.manifest,
            place=self.folder,
            unit=unit,
            neighbour=self.rng.choice(neighbours or [unit]),
            stranger=self.rng.choice(strangers or [unit]),
            older=b"" if generation == extent.generation else older,
        )

    def _like(self, unit: StoredUnit, extents: Iterable[FoundExtent]) -> list[StoredUnit]:
        """Others of its kind in these extents whose files are still long enough."""
        alike = (each for found in extents for each in found.units if each.kind is unit.kind)
        return [each for each in alike if each.key != unit.key and self._is_whole(each)]

    def _is_whole(self, unit: StoredUnit) -> bool:
        path = self._path(unit)
        return path.exists() and path.stat().st_size >= unit.offset + unit.num_bytes


def _is_possible(way: str, scene: Scene) -> bool:
    if "neighbour" in way:
        return scene.neighbour is not scene.unit
    if "another_key" in way:
        return scene.stranger is not scene.unit
    return bool(scene.older) if "older" in way else True


def _spoilt(path: Path, extent: FoundExtent, before: bytes) -> Iterable[SpoiltUnit]:
    """The units whose bytes differ from `before`."""
    after = path.read_bytes() if path.exists() else b""
    for unit in extent.units:
        left = _content(after, unit)
        if left != _content(before, unit):
            yield SpoiltUnit(unit, left)


def _content(data: bytes, unit: StoredUnit) -> Content:
    """A unit's entry and its bytes."""
    return data[entry(unit)], data[payload(unit)]


def _name_of(extent: FoundExtent) -> UnitKey:
    """By which a later generation of the same group is known."""
    return extent.units[0].kind, extent.units[0].key
