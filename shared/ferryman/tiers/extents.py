"""Extents: files that hold one stored group each, what of them is alive, and how long they are.

| head | entry a unit ... | page keys ... | to 4096 | unit | to 4096 | unit | to 4096 ...

A unit is dropped by its flag and its bytes go back to the filesystem, as a hole; the file goes with
its last unit. So what is charged for an extent is its header and the units alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ferryman.cache.keys import KEY_BYTES

ALIGNMENT = 4096  # what direct reads ask of offsets and lengths
HEAD_BYTES = 128
ENTRY_BYTES = 96


def aligned(num_bytes: int) -> int:
    """The least multiple of 4096 with room for so many bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def header_bytes(num_units: int, num_keys: int) -> int:
    """How long head, entries and keys are together, up to where the first unit begins."""
    return aligned(HEAD_BYTES + ENTRY_BYTES * num_units + KEY_BYTES * num_keys)


@dataclass(frozen=True, slots=True)
class ExtentLayout:
    """Where the units of one extent lie."""

    header_bytes: int
    offsets: tuple[int, ...]
    file_bytes: int


def lay_out_extent(num_keys: int, unit_bytes: Sequence[int]) -> ExtentLayout:
    """Units one behind the other, each at a multiple of 4096."""
    offset = header = header_bytes(len(unit_bytes), num_keys)
    offsets = []
    for num_bytes in unit_bytes:
        offsets.append(offset)
        offset += aligned(num_bytes)
    return ExtentLayout(header, tuple(offsets), offset)


@dataclass(frozen=True, slots=True)
class DropUnit:
    """Disk work: the flag of one unit, and the hole where it was."""

    generation: int
    index: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RemoveExtent:
    """Disk work: a file that holds nothing alive."""

    generation: int


DiskWork = DropUnit | RemoveExtent


@dataclass(slots=True)
class _Extent:
    header_bytes: int
    alive: dict[int, tuple[int, int]] = field(default_factory=dict)  # index: (offset, bytes)


class ExtentTable:
    """Every extent by its generation, a number that grows with each."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._extents: dict[int, _Extent] = {}
        self._foreign: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._last = 0
        self._work: list[DiskWork] = []

    def __len__(self) -> int:
        return len(self._extents) + len(self._foreign)

    @property
    def foreign_bytes(self) -> int:
        return sum(self._foreign.values())

    def units(self) -> Iterable[tuple[int, int]]:
        """(generation, index) of everything alive."""
        return [(name, index) for name, each in self._extents.items() for index in each.alive]

    def reserve(self, file_bytes: int) -> int:
        """Charge bytes for an extent to be written; its generation."""
        self._last += 1
        self._reserved[self._last] = file_bytes
        self.used_bytes += file_bytes
        return self._last

    def give_back(self, generation: int) -> None:
        """The extent is not written after all, or is now added as one that is."""
        self.used_bytes -= self._reserved.pop(generation)

    def add(
        self, generation: int, header: int, units: Iterable[tuple[int, tuple[int, int]]]
    ) -> None:
        """An extent on disk with its units alive: index, (offset, bytes)."""
        extent = _Extent(header, dict(units))
        self._extents[generation] = extent
        self._last = max(self._last, generation)
        self.used_bytes += header + sum(aligned(size) for _, size in extent.alive.values())
        self._remove_if_dead(generation)

    def add_foreign(self, generation: int, num_bytes: int) -> None:
        """An extent that is of no use here, and goes when room is needed."""
        self._foreign[generation] = num_bytes
        self._last = max(self._last, generation)
        self.used_bytes += num_bytes

    def drop(self, generation: int, index: int) -> None:
        """One unit is alive no more."""
        extent = self._extents[generation]
        offset, num_bytes = extent.alive.pop(index)
        self.used_bytes -= aligned(num_bytes)
        self._work.append(DropUnit(generation, index, offset, num_bytes))
        self._remove_if_dead(generation)

    def _remove_if_dead(self, generation: int) -> None:
        if not self._extents[generation].alive:
            self.used_bytes -= self._extents.pop(generation).header_bytes
            self._work.append(RemoveExtent(generation))

    def drop_oldest_foreign(self) -> bool:
        """Whether there was one."""
        if not self._foreign:
            return False
        generation = min(self._foreign)
        self.used_bytes -= self._foreign.pop(generation)
        self._work.append(RemoveExtent(generation))
        return True

    def drain_work(self) -> tuple[DiskWork, ...]:
        """What is to be done on disk since the last call; nothing within a file that goes."""
        work, self._work = self._work, []
        gone = {each.generation for each in work if isinstance(each, RemoveExtent)}
        return tuple(
            each for each in work if isinstance(each, RemoveExtent) or each.generation not in gone
        )
