"""Chooses the units of an offer that get room: all, or those of the largest smaller resume point.

keys      k0 k1 k2 k3 k4 k5 k6
here      ####### 3 pages               base
offered         ###########  s s        full pages 3.. and snapshots at the ends of 4 and 6
room for 2 pages: pages 3 and 4 with the snapshot at the end of 4
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from ferryman.cache.candidates import is_resume_point, point_units
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.tiers.values import UnitName

Group = tuple[UnitName, ...]


class GroupChoice(NamedTuple):
    """A group, and the deepest resume point that is whole with it (0: none)."""

    group: Group
    depth: int


# Upper bounds on the slots of each kind, as known at the time of the call. A point that cannot fit
# is skipped before its group is built: a chain of 128k tokens has thousands of points.
Room = Callable[[], Mapping[Kind, int]]


def any_room() -> Mapping[Kind, int]:
    """Sets no bounds."""
    return {}


class Resident(Protocol):
    """The resident units; the prefix tree implements it."""

    def match_depth(self, keys: Sequence[PageKey]) -> int: ...

    def has(self, kind: Kind, key: PageKey) -> bool: ...


class WriteOffer:
    """The units of one offer that are not here yet and have a place on the chain."""

    def __init__(
        self,
        manifest: StateManifest,
        keys: Sequence[PageKey],
        units: Mapping[Kind, Sequence[int]],
        resident: Resident,
    ) -> None:
        self._manifest, self._keys, self._resident = manifest, keys, resident
        self.base = resident.match_depth(keys) if Kind.FULL in manifest.kinds else 0
        self._top = self._end_of_path(frozenset(units.get(Kind.FULL, ())))
        self._units = {
            kind: self._new(kind, pages) for kind, pages in units.items() if kind in manifest.kinds
        }
        self._pages_of = {kind: frozenset(pages) for kind, pages in self._units.items()}

    def _end_of_path(self, offered: frozenset[int]) -> int:
        """Full pages continue the resident ones; pages after a gap have no place."""
        if Kind.FULL not in self._manifest.kinds:
            return len(self._keys)
        top = self.base
        while top < len(self._keys) and top in offered:
            top += 1
        return top

    def _new(self, kind: Kind, pages: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            page
            for page in sorted(set(pages))
            if 0 <= page < self._top and not self._resident.has(kind, self._keys[page])
        )

    def whole(self) -> GroupChoice:
        """All units offered."""
        return GroupChoice(self.prefix(self._top), next(self.points(), 0))

    def choices(self, room: Room = any_room) -> Iterator[GroupChoice]:
        """Groups to try, the most wanted first; none of them is empty."""
        whole = self.whole()
        if not whole.group:
            return
        yield whole
        for depth in self.points():
            if self.may_fit(depth, room):
                for group in (self.prefix(depth), self.minimal(depth)):
                    if group:
                        yield GroupChoice(group, depth)

    def reused(self, depth: int) -> tuple[tuple[Kind, PageKey], ...]:
        """The units of the resume set at `depth` that are here already. Full pages are left out
        because their path keeps them."""
        names = point_units(self._manifest, depth)
        units = ((kind, self._keys[page]) for kind, page in names)
        return tuple(unit for unit in units if self._resident.has(*unit))

    def may_fit(self, depth: int, room: Room) -> bool:
        """Whether there may be room for the full pages before page `depth`."""
        at_most = room().get(Kind.FULL)
        return at_most is None or bisect_left(self._units.get(Kind.FULL, ()), depth) <= at_most

    def _pages(self, kind: Kind, first: int, end: int) -> tuple[int, ...]:
        """Offered pages in [first, end)."""
        pages = self._units.get(kind, ())
        return pages[bisect_left(pages, first) : bisect_left(pages, end)]

    def prefix(self, depth: int) -> Group:
        """All offered units before page `depth`."""
        return tuple((kind, page) for kind in self._units for page in self._pages(kind, 0, depth))

    def minimal(self, depth: int) -> Group:
        """Only the units that the resume set at `depth` needs."""
        needs = resume_set(self._manifest, depth * self._manifest.page_size)
        first = {Kind.FULL: 0, Kind.WINDOW: needs.window.first, Kind.RECURRENT: depth - 1}
        return tuple(
            (kind, page) for kind in self._units for page in self._pages(kind, first[kind], depth)
        )

    def points(self) -> Iterator[int]:
        """Depths, descending, whose resume set would be complete."""
        for depth in range(self._top, 0, -1):
            if self.is_point(depth):
                yield depth

    def is_point(self, depth: int) -> bool:
        """Whether the resume set would be complete, with the units that are here now."""
        return is_resume_point(self._manifest, depth, self._would_have)

    def _would_have(self, kind: Kind, page: int) -> bool:
        is_offered = page in self._pages_of.get(kind, ())
        return is_offered or self._resident.has(kind, self._keys[page])


class RoomPolicy(Protocol):
    """The groups of an offer to try, the most wanted first. The first that fits gets its room."""

    def choices(self, offer: WriteOffer, room: Room) -> Iterator[GroupChoice]: ...


class LargestPrefix:
    """The policy of a writer: all its units, or the most that a reader could resume from."""

    def choices(self, offer: WriteOffer, room: Room) -> Iterator[GroupChoice]:
        return offer.choices(room)


LARGEST_PREFIX = LargestPrefix()


def by_kind(names: Iterable[UnitName]) -> dict[Kind, tuple[int, ...]]:
    """Pages by kind, ascending."""
    pages: dict[Kind, set[int]] = {}
    for kind, page in names:
        pages.setdefault(kind, set()).add(page)
    return {kind: tuple(sorted(pages[kind])) for kind in sorted(pages)}


def demand_of(group: Group) -> dict[Kind, int]:
    """The number of slots of each kind that a group takes."""
    return dict(Counter(kind for kind, _ in group))
