"""What of the host tier is to be written to storage, by policy: the books, and a bounded queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.tiers.storage_values import StorageEffect
from ferryman.tiers.values import Effect, UnitForgotten, UnitStored
from ferryman.tiers.write_policy import Backups, UnitKey
from ferryman.wire.rpc import CallTags

MAX_WAITING = 256


@dataclass(frozen=True, slots=True)
class BacklogCounts:
    """Jobs and units. A unit is lost when it leaves the host tier before it could be written."""

    num_waiting: int = 0
    num_dropped: int = 0
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class BackupJob:
    """Units to be written, and whose they are."""

    units: tuple[UnitKey, ...]
    tags: CallTags


class Backlog:
    """Hears what happens in both tiers; never waits. Jobs beyond a bound are dropped, counted, and
    get another chance when their units are hit."""

    def __init__(self, backups: Backups) -> None:
        self._backups = backups
        self._jobs: deque[BackupJob] = deque()
        self._wake = asyncio.Event()
        self._dropped = self._lost = 0

    # What happens.

    def host_changed(self, effects: Sequence[Effect], tags: CallTags) -> None:
        """Units came into the host tier, and left it."""
        new = [(each.kind, each.key) for each in effects if isinstance(each, UnitStored)]
        gone = [(each.kind, each.key) for each in effects if isinstance(each, UnitForgotten)]
        self._lost += self._backups.gone(gone)
        self._put(self._backups.added(new), tags)

    def hit(self, units: Iterable[UnitKey], tags: CallTags) -> None:
        """A reader has leased units."""
        self._put(self._backups.hit(units), tags)

    def pressed(self, kind: Kind, free_share: float, next_to_evict: Iterable[PageKey]) -> None:
        """So much of a pool is free; what would be evicted next may be written ahead."""
        coldest = ((kind, key) for key in next_to_evict)
        self._put(self._backups.pressed(free_share, coldest), CallTags())

    def storage_changed(self, effects: Sequence[StorageEffect]) -> None:
        """Units came into the storage tier, and left it."""
        for each in effects:
            if isinstance(each, UnitStored):
                self._backups.written([(each.kind, each.key)])
            elif isinstance(each, UnitForgotten):
                self._backups.failed([(each.kind, each.key)])

    def written(self, units: Iterable[UnitKey]) -> None:
        """These are in storage already."""
        self._backups.written(units)

    def unsettled(self, units: Iterable[UnitKey]) -> None:
        """A job for these is over; those that did not come into storage may be tried again."""
        self._backups.failed([unit for unit in units if not self._backups.is_written(unit)])

    # Working it off.

    def _put(self, units: tuple[UnitKey, ...], tags: CallTags) -> None:
        if not units:
            return
        self._jobs.append(BackupJob(units, tags))
        if len(self._jobs) > MAX_WAITING:
            dropped = self._jobs.popleft()
            self._dropped += len(dropped.units)
            self._backups.failed(dropped.units)
        self._wake.set()

    async def next_job(self) -> BackupJob:
        """The oldest job; waits for one."""
        while not self._jobs:
            self._wake.clear()
            await self._wake.wait()
        return self._jobs.popleft()

    def statistics(self) -> BacklogCounts:
        return BacklogCounts(len(self._jobs), self._dropped, self._lost)
