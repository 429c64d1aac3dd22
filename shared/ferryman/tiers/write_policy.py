"""Policies that decide when the units of one tier are written to the tier below it.

    WriteThrough            as soon as a unit is new
    WriteThroughSelective   at its second hit
    WriteBack               when it is about to be evicted, a little ahead

`PendingBackups` applies one policy to one tier: its caller reports new units, hits, shortages
and evictions, and it returns the units to write now. Eviction does not wait for it: a unit that is
evicted before it could be written is lost, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError

UnitKey = tuple[Kind, PageKey]

HITS_TO_WRITE = 2
# When less than this share of a pool is free, its coldest units are written ahead of eviction, this
# many at a time.
LOW_FREE_SHARE = 0.25
NUM_WRITTEN_AHEAD = 32


class WritePolicy(Protocol):
    """The rule by which a unit is due to be written."""

    def is_due_when_new(self, unit: UnitKey) -> bool: ...

    def is_due_when_hit(self, unit: UnitKey) -> bool:
        """Counts the hit."""
        ...

    def num_due_ahead(self, free_share: float) -> int:
        """The number of coldest units that are due while `free_share` of their pool is free."""
        ...

    def is_lost(self, unit: UnitKey) -> bool:
        """Whether evicting this unit unwritten is a loss; the policy forgets the unit."""
        ...


class WriteThrough:
    """Every unit, at once. A failed write is tried again at the next hit."""

    def is_due_when_new(self, unit: UnitKey) -> bool:
        return True

    def is_due_when_hit(self, unit: UnitKey) -> bool:
        return True

    def num_due_ahead(self, free_share: float) -> int:
        return 0

    def is_lost(self, unit: UnitKey) -> bool:
        return True


class WriteThroughSelective:
    """Units that proved useful: at their second hit, and at every later one."""

    def __init__(self) -> None:
        self._hits: dict[UnitKey, int] = {}

    def is_due_when_new(self, unit: UnitKey) -> bool:
        return False

    def is_due_when_hit(self, unit: UnitKey) -> bool:
        hits = self._hits[unit] = self._hits.get(unit, 0) + 1
        return hits >= HITS_TO_WRITE

    def num_due_ahead(self, free_share: float) -> int:
        return 0

    def is_lost(self, unit: UnitKey) -> bool:
        return self._hits.pop(unit, 0) >= HITS_TO_WRITE


class WriteBack:
    """No unit before its room is needed."""

    def is_due_when_new(self, unit: UnitKey) -> bool:
        return False

    def is_due_when_hit(self, unit: UnitKey) -> bool:
        return False

    def num_due_ahead(self, free_share: float) -> int:
        return NUM_WRITTEN_AHEAD if free_share < LOW_FREE_SHARE else 0

    def is_lost(self, unit: UnitKey) -> bool:
        return True


WRITE_POLICIES: Mapping[str, Callable[[], WritePolicy]] = MappingProxyType(
    {
        "write_through": WriteThrough,
        "write_through_selective": WriteThroughSelective,
        "write_back": WriteBack,
    }
)


def write_policy_named(name: str) -> WritePolicy:
    """A new policy for one tier. Raises ConfigError for a name that is not known."""
    make = WRITE_POLICIES.get(name)
    if make is None:
        raise ConfigError(f"write_policy {name}: known are {', '.join(WRITE_POLICIES)}")
    return make()


class PendingBackups:
    """The units of a tier that are written to the tier below it, or on their way there.

    A unit that was returned counts as on its way and is not returned again unless `on_failed` is
    called.
    """

    def __init__(self, policy: WritePolicy) -> None:
        self._policy = policy
        self._on_its_way: set[UnitKey] = set()
        self._written: set[UnitKey] = set()

    # Events in this tier.

    def on_added(self, units: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """Units came in, by any way; returns those to write now."""
        return self.start(unit for unit in units if self._policy.is_due_when_new(unit))

    def on_hit(self, units: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """A request reuses units; returns those to write now."""
        return self.start(unit for unit in units if self._policy.is_due_when_hit(unit))

    def on_pressure(self, free_share: float, coldest: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """`coldest` are the next units to evict, in order; returns those to write now.

        A unit that is written already can be evicted without loss, so it counts as written ahead.
        """
        return self.start(islice(coldest, self._policy.num_due_ahead(free_share)))

    def on_removed(self, units: Iterable[UnitKey]) -> int:
        """Units were evicted; returns how many should have been written and were not."""
        num_lost = 0
        for unit in units:
            num_lost += self._policy.is_lost(unit) and unit not in self._written
            self._forget(unit)
        return num_lost

    # Events in the tier below it.

    def start(self, units: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """Starts to write units, under any policy; returns those that are not settled."""
        fresh = tuple(dict.fromkeys(unit for unit in units if not self.is_settled(unit)))
        self._on_its_way.update(fresh)
        return fresh

    def is_settled(self, unit: UnitKey) -> bool:
        """Whether the unit is written, or on its way."""
        return unit in self._written or unit in self._on_its_way

    def is_written(self, unit: UnitKey) -> bool:
        """Whether the unit is written to the tier below."""
        return unit in self._written

    def mark_written(self, units: Iterable[UnitKey]) -> None:
        """The units are in the tier below now, or came from there."""
        for unit in units:
            self._on_its_way.discard(unit)
            self._written.add(unit)

    def on_failed(self, units: Iterable[UnitKey]) -> None:
        """The units are not in the tier below: they were not written, or were dropped there."""
        for unit in units:
            self._forget(unit)

    def forget_all(self) -> None:
        """The tier below is a new and empty one."""
        self._on_its_way.clear()
        self._written.clear()

    def _forget(self, unit: UnitKey) -> None:
        self._on_its_way.discard(unit)
        self._written.discard(unit)
