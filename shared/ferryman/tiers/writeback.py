"""Writes from the host tier to storage: which units, in which order, as which groups.

Both the host-cache, which copies bytes, and the simulator, which counts seconds, take their groups
from here:

    effects ──> backlog ──> job ──> group, group, ... ──> settle
                                    the caller writes each one before it takes the next

Other servers say write back, offload or backup.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.tiers.storage_values import TierEffect
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import EvictionRefused, Residency, UnitForgotten, UnitName, UnitStored
from ferryman.tiers.write_policy import LOW_FREE_SHARE, PendingBackups, UnitKey, WritePolicy

MAX_WAITING = 256

# The request for which units are written; the host-cache names it in the events it publishes.
Tags = TypeVar("Tags")


@dataclass(frozen=True, slots=True)
class BacklogCounts:
    """Jobs and units. A unit is lost when it leaves the host tier before it could be written."""

    num_waiting: int = 0
    num_dropped: int = 0
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class WritebackJob(Generic[Tags]):
    """Units to be written, and the tags of the request they are written for."""

    units: tuple[UnitKey, ...]
    tags: Tags


class WritebackGroup(NamedTuple):
    """Units of one chain that are written together, with the full pages that they stand on."""

    chain: tuple[PageKey, ...]
    names: tuple[UnitName, ...]


class WritebackBacklog(Generic[Tags]):
    """The units of the host tier that the policy wants in storage, as a bounded queue of jobs.

    Jobs beyond the bound are dropped, the oldest first, and counted; their units are tried again
    when they are hit. `wake` is called when there is a job to take.
    """

    def __init__(self, policy: WritePolicy, wake: Callable[[], None]) -> None:
        self._backups, self._wake = PendingBackups(policy), wake
        self._jobs: deque[WritebackJob[Tags]] = deque()
        self._dropped = self._lost = 0
        self._num_to_group = 0  # units of the job that is being written, in no group yet
        self._lacks_room = False  # because of the group that is being written

    # Events in both tiers.

    def on_host_effects(self, effects: Sequence[TierEffect], tags: Tags) -> None:
        """Units came into the host tier or left it."""
        new = [(unit.kind, unit.key) for unit in effects if isinstance(unit, UnitStored)]
        gone = [(unit.kind, unit.key) for unit in effects if isinstance(unit, UnitForgotten)]
        self._lost += self._backups.on_removed(gone)
        self._lacks_room |= any(isinstance(effect, EvictionRefused) for effect in effects)
        self._put(self._backups.on_added(new), tags)

    def on_hit(self, units: Iterable[UnitKey], tags: Tags) -> None:
        """A reader has leased units."""
        self._put(self._backups.on_hit(units), tags)

    def on_pressure(self, host: HostStore, tags: Tags) -> None:
        """Writes the next units to evict ahead, if little of a pool is free."""
        for kind in host.manifest.kinds:
            coldest = ((kind, key) for key in host.next_to_evict(kind))
            self._put(self._backups.on_pressure(host.free_share(kind), coldest), tags)

    def on_storage_effects(self, effects: Sequence[TierEffect]) -> None:
        """Units came into the storage tier or left it."""
        for effect in effects:
            if isinstance(effect, UnitStored):
                self._backups.mark_written([(effect.kind, effect.key)])
            elif isinstance(effect, UnitForgotten):
                self._backups.on_failed([(effect.kind, effect.key)])

    def mark_written(self, units: Iterable[UnitKey]) -> None:
        """These units are in storage already."""
        self._backups.mark_written(units)

    def _put(self, units: tuple[UnitKey, ...], tags: Tags) -> None:
        if not units:
            return
        self._jobs.append(WritebackJob(units, tags))
        if len(self._jobs) > MAX_WAITING:
            dropped = self._jobs.popleft()
            self._dropped += len(dropped.units)
            self._backups.on_failed(dropped.units)
        self._wake()

    # Taking jobs.

    def take(self) -> WritebackJob[Tags] | None:
        """The oldest job."""
        return self._jobs.popleft() if self._jobs else None

    def groups(
        self,
        job: WritebackJob[Tags],
        host: HostStore,
        in_storage: Callable[[Sequence[PageKey]], Residency],
    ) -> Iterator[WritebackGroup]:
        """Each group is made when the caller asks for it, from the units in both tiers at that
        time. Units that have left the host tier are in no group."""
        waiting = set(job.units)
        try:
            while chain := host.deepest_chain(waiting):
                path = set(chain)
                units = {unit for unit in waiting if unit[1] in path}
                waiting -= units
                names = self._lacking(chain, units, host.manifest.kinds, in_storage(chain))
                group = WritebackGroup(chain, names)
                self._num_to_group = len(waiting)
                self._lacks_room = _keeps_most(group, host)
                yield group
        finally:
            self._num_to_group, self._lacks_room = 0, False

    def _lacking(
        self,
        chain: Sequence[PageKey],
        units: set[UnitKey],
        kinds: Sequence[Kind],
        stored: Residency,
    ) -> tuple[UnitName, ...]:
        """The units, and the full pages they stand on, without those that storage has."""
        there = {(kind, page) for kind, pages in stored.pages.items() for page in pages}
        self._backups.mark_written((kind, chain[page]) for kind, page in there)
        return tuple(
            (kind, page)
            for page, key in enumerate(chain)
            for kind in kinds
            if (kind is Kind.FULL or (kind, key) in units) and (kind, page) not in there
        )

    def settle(self, job: WritebackJob[Tags]) -> None:
        """Ends a job. Units of it that did not reach storage may be tried again. The caller has
        passed the effects of storage to `on_storage_effects` before."""
        self._backups.on_failed(unit for unit in job.units if not self._backups.is_written(unit))

    @property
    def is_behind(self) -> bool:
        """Whether the group that is being written should be written as fast as it can: others wait,
        or the slots that it keeps are wanted. Any thread may ask."""
        return bool(self._jobs) or self._num_to_group > 0 or self._lacks_room

    def statistics(self) -> BacklogCounts:
        return BacklogCounts(len(self._jobs), self._dropped, self._lost)


def _keeps_most(group: WritebackGroup, host: HostStore) -> bool:
    """Whether a group keeps so many slots of a pool from eviction that little of it is left. A page
    keeps all before it."""
    kept = Counter(kind for kind, _ in group.names)
    if group.names:
        kept[Kind.FULL] = len(group.chain)
    slots = host.layout.num_slots
    return any(kept[kind] > (1 - LOW_FREE_SHARE) * count for kind, count in slots.items())
