"""Keeps the index told of what is here, in order, as long as it answers.

What it is to hear waits within a bound. Beyond that, whenever the index was away, and when it has
forgotten that this node lives (it was flushed, or is another one that came up empty), everything
resident is announced anew: the index is a hint, and this process holds the truth.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice

from ferryman.cache.keys import PageKey
from ferryman.cache.units import Tier
from ferryman.tiers.values import UnitForgotten, UnitStored
from ferryman.wire.index import IndexedUnit, NodeLife, PrefixIndex

log = logging.getLogger(__name__)

MAX_WAITING = 65_536
BATCH = 512
BEAT_SECONDS = 1.0
LIFE_SECONDS = 5.0
REFRESH_SECONDS = 6 * 3600.0  # well within the day after which the index forgets by itself

Change = UnitStored | UnitForgotten


@dataclass(frozen=True, slots=True)
class AnnouncerStatistics:
    """Counts since the start; `num_refreshes` times everything was announced anew."""

    is_away: bool
    num_waiting: int
    num_announced: int
    num_refreshes: int


class IndexAnnouncer:
    """`tell` never waits; `run` does the work. `holdings` lists everything resident in the order in
    which it came, and leaves out what has gone by the time it is read."""

    def __init__(
        self,
        index: PrefixIndex,
        node: NodeLife,
        holdings: Callable[[], Iterable[UnitStored]],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._index, self._node, self._holdings, self._clock = index, node, holdings, clock
        self._waiting: deque[Change] = deque()
        self._anew: Iterator[Change] = iter(())
        self._read: deque[Change] = deque()  # of what is announced anew, the next few
        self._was_anew = False
        self._wake = asyncio.Event()
        self._told = asyncio.Event()
        self._is_incomplete = self._is_stopping = False
        self._num_dropped = 0
        self._refresh_at = clock() + REFRESH_SECONDS
        self._announced = self._refreshes = 0

    @property
    def is_away(self) -> bool:
        return self._index.statistics().is_away

    def speaks_at(self, address: str) -> None:
        """Where this node's host-cache is reached; said with its next beat."""
        self._node = replace(self._node, address=address)

    def tell(self, changes: Iterable[Change]) -> None:
        before = len(self._waiting)
        self._waiting.extend(changes)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.clear()
            self._is_incomplete = True
        if len(self._waiting) != before:
            self._told.clear()
            self._wake.set()

    async def told(self) -> None:
        """Wait until the index has heard everything; the caller says how long."""
        await self._told.wait()

    async def run(self) -> None:
        """Beat, announce, forget; until cancelled or stopped."""
        while not self._is_stopping:
            was_known = await self._index.announce(self._node, LIFE_SECONDS)
            self._is_incomplete |= not was_known
            if not self.is_away:
                if self._lacks_something():
                    self._refresh()
                await self._send()
            self._is_incomplete |= self.is_away
            await self._pause()

    def stop(self) -> None:
        """End `run`. One cancelled in its very first calls was seen to go on: so ask, too."""
        self._is_stopping = True
        self._wake.set()

    def _lacks_something(self) -> bool:
        has_dropped = self._index.statistics().num_dropped != self._num_dropped
        return self._is_incomplete or has_dropped or self._clock() >= self._refresh_at

    def _refresh(self) -> None:
        """What waits is said too: it may be that something is gone, of this very life."""
        self._anew, self._read = iter(self._holdings()), deque()
        self._num_dropped = self._index.statistics().num_dropped
        self._is_incomplete, self._refresh_at = False, self._clock() + REFRESH_SECONDS
        self._refreshes += 1
        log.info("announcing anew")

    async def _send(self) -> None:
        changes: Sequence[Change] = ()
        while not self._is_incomplete and not self.is_away:
            if not (changes := self._next_run()):
                self._told.set()
                return
            await self._send_run(changes)
            self._announced += len(changes)

    def _next_run(self) -> Sequence[Change]:
        """By turns some of what is announced anew, all of what was read of it, and what changed.

        What is read is as new as all that waits then, and is said before what is told later: so the
        last word on a unit is right.
        """
        if not self._read and not (self._waiting and self._was_anew):
            self._read.extend(islice(self._anew, BATCH))
        self._was_anew = bool(self._read)
        return _taken(self._read or self._waiting)

    async def _send_run(self, changes: Sequence[Change]) -> None:
        """One sort of change, of one chain, in one tier."""
        root, tier = changes[0].root, changes[0].tier
        if stored := [_indexed(change) for change in changes if isinstance(change, UnitStored)]:
            await self._index.commit(self._node, root, tier, stored)
        if gone := [(c.kind, c.key) for c in changes if isinstance(c, UnitForgotten)]:
            await self._index.forget(self._node, root, tier, gone)

    async def _pause(self) -> None:
        """A beat's time, or until there is something to tell to an index that answers."""
        if self.is_away:
            await asyncio.sleep(BEAT_SECONDS)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                await self._wake.wait()
        self._wake.clear()

    async def leave(self) -> None:
        """This life ends, and with it all its entries."""
        await self._index.withdraw(self._node)

    def statistics(self) -> AnnouncerStatistics:
        return AnnouncerStatistics(
            self.is_away, len(self._waiting) + len(self._read), self._announced, self._refreshes
        )


def _taken(changes: deque[Change]) -> Sequence[Change]:
    """The first changes of one sort, chain and tier: what one call to the index can say."""

    def call(change: Change) -> tuple[type, PageKey, Tier]:
        return type(change), change.root, change.tier

    run = next((list(run) for _, run in groupby(islice(changes, BATCH), call)), [])
    for _ in run:
        changes.popleft()
    return run


def _indexed(unit: UnitStored) -> IndexedUnit:
    return IndexedUnit(unit.kind, unit.key, unit.num_bytes, unit.digest, unit.generation)
