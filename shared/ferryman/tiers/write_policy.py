"""Policies that decide when the units of one tier are written to the tier below it.

    write_through             as soon as a unit is new
    write_through_selective   at its second hit
    write_back                when it is about to be evicted, a little ahead

`PendingBackups` applies one policy to one tier: its caller reports new units, hits, shortages
and evictions, and it returns the units to write now. Eviction does not wait for it: a unit that is
evicted before it could be written is lost, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError

UnitKey = tuple[Kind, PageKey]

# When less than this share of a pool is free, its coldest units are written ahead of eviction, this
# many at a time.
LOW_FREE_SHARE = 0.25
NUM_WRITTEN_AHEAD = 32


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """The rule by which a unit is due to be written: when it is new, from its hit number `hits` on
    (0: at no hit), and ahead of its eviction.

    A failed write is tried again at the next hit that counts.
    """

    when_new: bool = False
    hits: int = 0
    ahead: bool = False

    def num_due_ahead(self, free_share: float) -> int:
        """The number of coldest units that are due while `free_share` of their pool is free."""
        return NUM_WRITTEN_AHEAD if self.ahead and free_share < LOW_FREE_SHARE else 0


WRITE_POLICIES: Mapping[str, WritePolicy] = MappingProxyType(
    {
        "write_through": WritePolicy(when_new=True, hits=1),
        "write_through_selective": WritePolicy(hits=2),
        "write_back": WritePolicy(ahead=True),
    }
)


def write_policy_named(name: str) -> WritePolicy:
    """Raises ConfigError for a name that is not known."""
    policy = WRITE_POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"write_policy {name}: known are {', '.join(WRITE_POLICIES)}")
    return policy


class PendingBackups:
    """The units of a tier that are written to the tier below it, or on their way there.

    A unit that was returned counts as on its way and is not returned again unless `on_failed` is
    called.
    """

    def __init__(self, policy: WritePolicy) -> None:
        self._policy = policy
        self._hits = Counter[UnitKey]()  # of units in this tier, if a policy counts them
        self._on_its_way: set[UnitKey] = set()
        self._written: set[UnitKey] = set()

    # Events in this tier.

    def on_added(self, units: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """Units came in, by any way; returns those to write now."""
        return self.start(units if self._policy.when_new else ())

    def on_hit(self, units: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """A request reuses units; returns those to write now."""
        return self.start(unit for unit in units if self._is_due_when_hit(unit))

    def _is_due_when_hit(self, unit: UnitKey) -> bool:
        """Counts the hit."""
        if self._policy.hits > 1:
            self._hits[unit] += 1
            return self._hits[unit] >= self._policy.hits
        return self._policy.hits == 1

    def on_pressure(self, free_share: float, coldest: Iterable[UnitKey]) -> tuple[UnitKey, ...]:
        """`coldest` are the next units to evict, in order; returns those to write now.

        A unit that is written already can be evicted without loss, so it counts as written ahead.
        """
        return self.start(islice(coldest, self._policy.num_due_ahead(free_share)))

    def on_removed(self, units: Iterable[UnitKey]) -> int:
        """Units were evicted; returns how many should have been written and were not."""
        num_lost = 0
        for unit in units:
            was_due = self._policy.hits < 2 or self._hits.pop(unit, 0) >= self._policy.hits
            num_lost += was_due and unit not in self._written
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

    def is_on_its_way(self, unit: UnitKey) -> bool:
        """Whether the unit is due in the tier below, and not there yet."""
        return unit in self._on_its_way

    def mark_written(self, units: Iterable[UnitKey]) -> None:
        """The units are in the tier below now, or came from there."""
        for unit in units:
            self._on_its_way.discard(unit)
            self._written.add(unit)

    def on_failed(self, units: Iterable[UnitKey]) -> None:
        """The units are not in the tier below: they were not written, or were dropped there."""
        for unit in units:
            self._forget(unit)

    def forget_all(self) -> tuple[UnitKey, ...]:
        """The tier below is a new and empty one; returns the units that the last one had, or was to
        have."""
        forgotten = (*self._on_its_way, *self._written)
        self._on_its_way.clear()
        self._written.clear()
        return forgotten

    def _forget(self, unit: UnitKey) -> None:
        self._on_its_way.discard(unit)
        self._written.discard(unit)
