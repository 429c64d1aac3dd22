"""The values of a hand-off: units named by absolute position, and reservations of them.

A unit is one slot's worth of state. Its `index` is absolute: the page number for full and window
state, the position itself for a recurrent state. Both sides name units by (kind, index) only, never
by their place in a list, so two lists of different length cannot be paired wrongly:

    decode wants   |    2 3 4 5 6 |
    prefill offers | 0 1 2 3 4    |       intersection 2 3 4, wanted but not offered 5 6
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest

UnitName = tuple[Kind, int]


@dataclass(frozen=True, slots=True, order=True)
class PageRange:
    """The units [first, end) of one kind, never empty; a recurrent state at p is [p, p + 1)."""

    kind: Kind
    first: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise InvalidRequest(f"[{self.first}, {self.end}) is no range of {self.kind} units")

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class WantedUnit:
    """A unit that decode wants, and the generation of its slot there."""

    kind: Kind
    index: int
    slot_generation: int

    @property
    def name(self) -> UnitName:
        return self.kind, self.index


@dataclass(frozen=True, slots=True)
class UnitDigest:
    """The digest of a unit's bytes (xxh3_128)."""

    kind: Kind
    index: int
    digest: bytes

    @property
    def name(self) -> UnitName:
        return self.kind, self.index


@dataclass(frozen=True, slots=True)
class Reservation:
    """Decode's promise of slots for one attempt of one request. `epoch` is decode's epoch."""

    reservation_id: str
    epoch: int
    attempt: int
    wanted: tuple[WantedUnit, ...]
    lease_seconds: float

    @property
    def ranges(self) -> tuple[PageRange, ...]:
        return ranges_of(unit.name for unit in self.wanted)


def ranges_of(units: Iterable[UnitName]) -> tuple[PageRange, ...]:
    """The fewest ranges that hold exactly these units, in order."""
    indices: dict[Kind, set[int]] = {}
    for kind, index in units:
        indices.setdefault(kind, set()).add(index)
    return tuple(
        PageRange(kind, first, end)
        for kind in sorted(indices)
        for first, end in _runs(sorted(indices[kind]))
    )


def _runs(ascending: list[int]) -> Iterator[tuple[int, int]]:
    """The begin and end of each run of consecutive integers: 2 3 4 7 → [2, 5) [7, 8)."""
    first = end = ascending[0]
    for index in ascending:
        if index != end:
            yield first, end
            first = index
        end = index + 1
    yield first, end


def units_of(ranges: Iterable[PageRange]) -> Iterator[UnitName]:
    """Every unit in `ranges`, once and in order."""
    for span in merged(ranges):
        for index in range(span.first, span.end):
            yield span.kind, index


def num_units(ranges: Iterable[PageRange]) -> int:
    return sum(len(span) for span in merged(ranges))


def merged(ranges: Iterable[PageRange]) -> tuple[PageRange, ...]:
    """The same units as sorted, disjoint ranges that do not touch: equal sets are equal values."""
    disjoint: list[PageRange] = []
    for _, same_kind in groupby(sorted(ranges), key=lambda span: span.kind):
        first, end = -1, -1
        for span in same_kind:
            if span.first <= end:
                end = max(end, span.end)
                disjoint[-1] = PageRange(span.kind, first, end)
            else:
                first, end = span.first, span.end
                disjoint.append(span)
    return tuple(disjoint)


def intersection(left: Iterable[PageRange], right: Iterable[PageRange]) -> tuple[PageRange, ...]:
    """The units in both: those that a transfer moves."""
    others = merged(right)
    return tuple(
        PageRange(mine.kind, max(mine.first, other.first), min(mine.end, other.end))
        for mine in merged(left)
        for other in others
        if mine.kind is other.kind and max(mine.first, other.first) < min(mine.end, other.end)
    )


def difference(left: Iterable[PageRange], right: Iterable[PageRange]) -> tuple[PageRange, ...]:
    """The units of `left` that are not in `right`."""
    others, rest = merged(right), []
    for mine in merged(left):
        first = mine.first
        for other in others:
            if other.kind is not mine.kind or other.end <= first or other.first >= mine.end:
                continue
            if first < other.first:
                rest.append(PageRange(mine.kind, first, other.first))
            first = other.end
        if first < mine.end:
            rest.append(PageRange(mine.kind, first, mine.end))
    return tuple(rest)


def covers(have: Iterable[PageRange], need: Iterable[PageRange]) -> bool:
    """Whether every unit of `need` is in `have`."""
    return not difference(need, have)
