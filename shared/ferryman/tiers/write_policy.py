"""When the units of one tier are written to the tier behind it: three answers, three types.

    WriteThrough            as soon as a unit is new
    WriteThroughSelective   at its second hit
    WriteBack               when it is about to be evicted, a little ahead

`Backups` keeps the books of one tier by one of them: it hears what comes in, what is hit, what is
short and what leaves, and answers with the units to write now. Eviction asks nobody: what must go
before it could be written is gone, and counted.
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
# With less than this share of a pool free, its coldest units are written ahead, so many at a time.
LOW_FREE_SHARE = 0.25
NUM_WRITTEN_AHEAD = 32


class WritePolicy(Protocol):
    """When a unit is due to be written."""

    def is_due_when_new(self, unit: UnitKey) -> bool: ...

    def is_due_when_hit(self, unit: UnitKey) -> bool:
        """Counts the hit."""
        ...

    def num_due_ahead(self, free_share: float) -> int:
        """How many of the coldest are due while `free_share` of their pool is free."""
        ...

    def is_lost(self, unit: UnitKey) -> bool:
        """Whether it is a loss that this unit leaves unwritten; the policy forgets it."""
        ...


class WriteThrough:
    """Everything, at once. What failed gets another chance when it is hit."""

    def is_due_when_new(self, unit: UnitKey) -> bool:
        return True

    def is_due_when_hit(self, unit: UnitKey) -> bool:
        return True

    def num_due_ahead(self, free_share: float) -> int:
        return 0

    def is_lost(self, unit: UnitKey) -> bool:
        return True


class WriteThroughSelective:
    """What has proved useful: at its second hit, and after it at any."""

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
    """Nothing before its room is wanted."""

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


class Backups:
    """What of a tier is behind it, what is on its way there, and what is to go there now.

    Every answer is on its way from then on, and is not given again unless it `failed`.
    """

    def __init__(self, policy: WritePolicy) -> None:
        self._policy = policy
        self._on_its_way: set[UnitKey] = set()
        self._written: set[UnitKey] = set()

    # What happens in this tier.

    def added(self, units: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """Units came in, whatever way; those to write now."""
        return self.start(unit for unit in units if self._policy.is_due_when_new(unit))

    def hit(self, units: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """A request reuses units; those to write now."""
        return self.start(unit for unit in units if self._policy.is_due_when_hit(unit))

    def pressed(self, free_share: float, coldest: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """`coldest` is what would be evicted next, in that order; those to write now.

        What is behind already may go without cost, so it counts as written ahead.
        """
        return self.start(islice(coldest, self._policy.num_due_ahead(free_share)))

    def gone(self, units: Iterable[UnitKey]) -> int:
        """Units were evicted; how many of them should have been written and were not."""
        num_lost = 0
        for unit in units:
            num_lost += self._policy.is_lost(unit) and unit not in self._written
            self._forget(unit)
        return num_lost

    # What happens behind it.

    def start(self, units: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """Units are to be written whatever the policy; those that are not settled."""
        fresh = tuple(dict.fromkeys(unit for unit in units if not self.is_settled(unit)))
        self._on_its_way.update(fresh)
        return fresh

    def is_settled(self, unit: UnitKey) -> bool:
        """Whether it is behind, or on its way there."""
        return unit in self._written or unit in self._on_its_way

    def is_written(self, unit: UnitKey) -> bool:
        """Whether it is behind."""
        return unit in self._written

    def written(self, units: Iterable[UnitKey]) -> None:
        """They are behind now, or came from there."""
        for unit in units:
            self._on_its_way.discard(unit)
            self._written.add(unit)

    def failed(self, units: Iterable[UnitKey]) -> None:
        """They are not behind: could not be written, or were given up there."""
        for unit in units:
            self._forget(unit)

    def all_lost(self) -> None:
        """The tier behind is a new one, and empty."""
        self._on_its_way.clear()
        self._written.clear()

    def _forget(self, unit: UnitKey) -> None:
        self._on_its_way.discard(unit)
        self._written.discard(unit)
