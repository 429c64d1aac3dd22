"""Extents: blobs of one stored group each, with their length and their units that are alive.

| head | entry a unit ... | page keys ... | to 4096 | unit | to 4096 | unit | to 4096 ...

Dropping a unit clears its flag and punches a hole for its bytes; the blob is removed with its last
unit. So an extent is charged with its header and the units alive, or whole if blobs have no
holes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ferryman.cache.keys import KEY_BYTES
from ferryman.cache.slots import SlotHandle

ALIGNMENT = 4096  # direct reads need offsets and lengths that are multiples of this
HEAD_BYTES = 128
ENTRY_BYTES = 96


def aligned(num_bytes: int) -> int:
    """The least multiple of 4096 with room for so many bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def header_bytes(num_units: int, num_keys: int) -> int:
    """The length of head, entries and keys together: the offset of the first unit."""
    return aligned(HEAD_BYTES + ENTRY_BYTES * num_units + KEY_BYTES * num_keys)


@dataclass(frozen=True, slots=True)
class ExtentLayout:
    """The places of the units of one extent."""

    header_bytes: int
    offsets: tuple[int, ...]
    file_bytes: int


def lay_out_extent(num_keys: int, unit_bytes: Sequence[int]) -> ExtentLayout:
    """Units one after the other, each at a multiple of 4096."""
    offset = header = header_bytes(len(unit_bytes), num_keys)
    offsets = []
    for num_bytes in unit_bytes:
        offsets.append(offset)
        offset += aligned(num_bytes)
    return ExtentLayout(header, tuple(offsets), offset)


@dataclass(frozen=True, slots=True)
class DropUnit:
    """Blob work: clear the flag of one unit and punch a hole for its bytes."""

    generation: int
    index: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RemoveExtent:
    """Blob work: remove a blob that holds no living unit."""

    generation: int


BlobWork = DropUnit | RemoveExtent


@dataclass(slots=True)
class _Extent:
    room: int  # the bytes charged
    alive: dict[int, tuple[int, int]] = field(default_factory=dict)  # index: (offset, bytes)


class ExtentTable:
    """Every extent by its generation, a number that grows with each, and the leases of their units.
    A unit's handle is the generation of its extent and its index there."""

    def __init__(self, last_generation: int = 0) -> None:
        """Generations given are above `last_generation`."""
        self.used_bytes = 0
        self._extents: dict[int, _Extent] = {}
        self._foreign: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._last = last_generation
        self._work: list[BlobWork] = []
        self._leases: Counter[SlotHandle] = Counter()

    def __len__(self) -> int:
        return len(self._extents) + len(self._foreign)

    @property
    def foreign_bytes(self) -> int:
        return sum(self._foreign.values())

    def units(self) -> Iterable[tuple[int, int]]:
        """(generation, index) of everything alive."""
        return [(name, index) for name, extent in self._extents.items() for index in extent.alive]

    def reserve(self, file_bytes: int) -> int:
        """Charges the bytes of an extent to be written and returns its generation."""
        self._last += 1
        self._reserved[self._last] = file_bytes
        self.used_bytes += file_bytes
        return self._last

    def unreserve(self, generation: int) -> None:
        """Ends the charge of `reserve`: the extent is not written, or is added next."""
        self.used_bytes -= self._reserved.pop(generation)

    def room(self, num_bytes: int, file_bytes: int) -> int:
        """The room of a blob of `file_bytes` whose header and living units have `num_bytes`."""
        return num_bytes

    def _freed(self, num_bytes: int) -> int:
        """The room that comes back with one unit."""
        return aligned(num_bytes)

    def add(
        self,
        generation: int,
        header: int,
        units: Iterable[tuple[int, tuple[int, int]]],
        file_bytes: int,
    ) -> None:
        """Adds an extent on disk with its living units: index, (offset, bytes)."""
        alive = dict(units)
        num_bytes = header + sum(aligned(size) for _, size in alive.values())
        extent = _Extent(self.room(num_bytes, file_bytes), alive)
        self._extents[generation] = extent
        self._last = max(self._last, generation)
        self.used_bytes += extent.room
        self._remove_if_dead(generation)

    def add_foreign(self, generation: int, num_bytes: int) -> None:
        """Adds an extent that this store cannot use. It is removed when room is needed."""
        self._foreign[generation] = num_bytes
        self._last = max(self._last, generation)
        self.used_bytes += num_bytes

    def drop(self, generation: int, index: int) -> None:
        """Drops one unit."""
        extent = self._extents[generation]
        offset, num_bytes = extent.alive.pop(index)
        freed = self._freed(num_bytes)
        extent.room -= freed
        self.used_bytes -= freed
        self._work.append(DropUnit(generation, index, offset, num_bytes))
        self._remove_if_dead(generation)

    def give_back(self, units: Iterable[SlotHandle]) -> None:
        """Drops these units."""
        for unit in units:
            self.drop(unit.generation, unit.slot)

    def _remove_if_dead(self, generation: int) -> None:
        if not self._extents[generation].alive:
            self.used_bytes -= self._extents.pop(generation).room
            self._work.append(RemoveExtent(generation))

    def drop_oldest_foreign(self) -> bool:
        """Removes the oldest extent that this store cannot use; False when there is none."""
        if not self._foreign:
            return False
        generation = min(self._foreign)
        self.used_bytes -= self._foreign.pop(generation)
        self._work.append(RemoveExtent(generation))
        return True

    # Leases: a unit may be in several.

    def is_unused(self, unit: SlotHandle) -> bool:
        return unit not in self._leases

    def lease(self, units: Iterable[SlotHandle]) -> None:
        self._leases.update(units)

    def release(self, units: Iterable[SlotHandle]) -> None:
        for unit in units:
            self._leases[unit] -= 1
            if not self._leases[unit]:
                del self._leases[unit]

    # Reports.

    def drain_work(self) -> tuple[BlobWork, ...]:
        """The disk work since the last call, without drops inside a blob that is removed."""
        work, self._work = self._work, []
        gone = {job.generation for job in work if isinstance(job, RemoveExtent)}
        return tuple(
            job for job in work if isinstance(job, RemoveExtent) or job.generation not in gone
        )


class WholeExtentTable(ExtentTable):
    """The table of a medium whose blobs have no holes: an extent's room comes back as a whole, with
    its last unit."""

    def room(self, num_bytes: int, file_bytes: int) -> int:
        return file_bytes

    def _freed(self, num_bytes: int) -> int:
        return 0
