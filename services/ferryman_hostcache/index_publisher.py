"""Keeps the index up to date with the resident units, in order, while it answers.

Changes wait within a bound. All resident units are announced anew beyond that bound, whenever the
index was away, and when it has forgotten that this node lives (it was flushed, or replaced by an
empty one): the index is a hint, and this process has the truth.
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
from ferryman.runtime.background import next_tick, seconds_to_tick
from ferryman.tiers.values import UnitForgotten, UnitStored
from ferryman.wire.nats.heartbeat import HEARTBEAT_SECONDS
from ferryman.wire.redis.bucket_folders import CLAIM_SECONDS
from ferryman.wire.redis.index import FolderClaim, IndexedUnit, NodeLife, PrefixIndex

log = logging.getLogger(__name__)

MAX_WAITING = 65_536
BATCH = 512
LIFE_SECONDS = 5.0
REFRESH_SECONDS = 6 * 3600.0  # well within the day after which entries of the index expire

Change = UnitStored | UnitForgotten


@dataclass(frozen=True, slots=True)
class IndexPublisherStatistics:
    """Counts since the start; `num_refreshes` counts how often all units were announced anew.
    `num_forged` counts entries in the index that no process of this cluster wrote."""

    is_away: bool
    num_waiting: int
    num_announced: int
    num_refreshes: int
    num_forged: int


class IndexPublisher:
    """`publish` never waits; `run` does the work. `holdings` lists all resident units in the order
    of insertion, and leaves out units that are dropped while it is read."""

    def __init__(
        self,
        index: PrefixIndex,
        node: NodeLife,
        holdings: Callable[[], Iterable[UnitStored]],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._index, self._node, self._holdings, self._clock = index, node, holdings, clock
        self._folder: NodeLife | None = None  # where others can read what is stored
        self._has_holdings = False
        self._waiting: deque[Change] = deque()
        self._anew: Iterator[Change] = iter(())
        self._read: deque[Change] = deque()  # the next few units of a refresh
        self._was_anew = False
        self._wake = asyncio.Event()
        self.ended = asyncio.Event()  # after it no more writes to the index
        self._all_sent = asyncio.Event()
        self._is_incomplete = self._is_stopping = False
        self._num_dropped = 0
        self._refresh_at = clock() + REFRESH_SECONDS
        self._announced = self._refreshes = 0

    @property
    def is_away(self) -> bool:
        return self._index.statistics().is_away

    def set_address(self, address: str) -> None:
        """The address of this node's host-cache; announced with its next heartbeat."""
        self._node = replace(self._node, address=address)

    def share(self, folder: NodeLife) -> None:
        """Announces the units in storage as units of this folder, too, once they are known."""
        self._folder = folder
        self._node = replace(self._node, folder=folder.node_id)

    def on_holdings(self) -> None:
        """Notes that `holdings` lists the stored units from now on. Until then, a former owner's
        entries stay."""
        self._has_holdings = True
        self._wake.set()

    def publish(self, changes: Iterable[Change]) -> None:
        before = len(self._waiting)
        self._waiting.extend(changes)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.clear()
            self._is_incomplete = True
        if len(self._waiting) != before:
            self._all_sent.clear()
            self._wake.set()

    async def flushed(self) -> None:
        """Waits until the index has received everything; the caller sets the time limit."""
        await self._all_sent.wait()

    async def run(self) -> None:
        """Sends heartbeats and changes; until cancelled or stopped."""
        try:
            while not self._is_stopping:
                await self._step()
                await self._pause()
        finally:
            self.ended.set()

    async def _step(self) -> None:
        was_known = await self._index.announce(self._node, LIFE_SECONDS)
        self._is_incomplete |= not was_known
        if self._folder and self._has_holdings:
            await self._claim(self._folder)
        if not self.is_away:
            if self._lacks_something():
                self._refresh()
            await self._send()
        self._is_incomplete |= self.is_away

    async def _claim(self, folder: NodeLife) -> None:
        """Stops announcing a folder with a later owner: it would remove that owner's entries."""
        match await self._index.claim(folder, CLAIM_SECONDS):
            case FolderClaim.SUPERSEDED:
                log.warning("%s has a later owner", folder.node_id)
                self._folder = None
            case FolderClaim.NEW:
                self._is_incomplete = True
            case FolderClaim.KNOWN:
                pass

    def _owners(self, tier: Tier) -> Sequence[NodeLife]:
        """The owners in the index of a unit in this tier."""
        if tier is Tier.STORAGE and self._has_holdings and self._folder:
            return self._node, self._folder
        return (self._node,)

    def stop(self) -> None:
        """Ends `run`, also by a flag, because a cancel in its very first calls has been lost."""
        self._is_stopping = True
        self._wake.set()

    def _lacks_something(self) -> bool:
        has_dropped = self._index.statistics().num_dropped != self._num_dropped
        return self._is_incomplete or has_dropped or self._clock() >= self._refresh_at

    def _refresh(self) -> None:
        """Announces all units anew. Waiting changes are sent too: they may be removals."""
        self._anew, self._read = iter(self._holdings()), deque()
        self._num_dropped = self._index.statistics().num_dropped
        self._is_incomplete, self._refresh_at = False, self._clock() + REFRESH_SECONDS
        self._refreshes += 1
        log.info("announcing anew")

    async def _send(self) -> None:
        changes: Sequence[Change] = ()
        while not self._is_incomplete and not self.is_away:
            if not (changes := self._next_run()):
                self._all_sent.set()
                return
            await self._send_run(changes)
            self._announced += len(changes)

    def _next_run(self) -> Sequence[Change]:
        """Alternates between a batch of the refresh and the waiting changes.

        A batch of the refresh is as new as the changes that wait when it is read, and is sent
        before all later changes. So the last message about a unit is correct.
        """
        if not self._read and not (self._waiting and self._was_anew):
            self._read.extend(islice(self._anew, BATCH))
        self._was_anew = bool(self._read)
        return _taken(self._read or self._waiting)

    async def _send_run(self, changes: Sequence[Change]) -> None:
        """Sends changes of one sort, of one chain, in one tier."""
        root, tier = changes[0].root, changes[0].tier
        for owner in self._owners(tier):
            if stored := [_indexed(change) for change in changes if isinstance(change, UnitStored)]:
                await self._index.commit(owner, root, tier, stored)
            if gone := [(c.kind, c.key) for c in changes if isinstance(c, UnitForgotten)]:
                await self._index.forget(owner, root, tier, gone)

    async def _pause(self) -> None:
        """Waits for a heartbeat's time, or until there are changes for an index that answers."""
        if self.is_away:
            await next_tick(HEARTBEAT_SECONDS)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds_to_tick(HEARTBEAT_SECONDS)):
                await self._wake.wait()
        self._wake.clear()

    async def unregister(self) -> None:
        """Removes this process and its entries from the index; those of the folder stay."""
        await self._index.withdraw(self._node)

    def statistics(self) -> IndexPublisherStatistics:
        return IndexPublisherStatistics(
            self.is_away,
            len(self._waiting) + len(self._read),
            self._announced,
            self._refreshes,
            self._index.statistics().num_forged,
        )


def _taken(changes: deque[Change]) -> Sequence[Change]:
    """Takes the first changes of one sort, chain and tier: as many as one call to the index can
    send."""

    def call(change: Change) -> tuple[type, PageKey, Tier]:
        return type(change), change.root, change.tier

    run = next((list(run) for _, run in groupby(islice(changes, BATCH), call)), [])
    for _ in run:
        changes.popleft()
    return run


def _indexed(unit: UnitStored) -> IndexedUnit:
    return IndexedUnit(unit.kind, unit.key, unit.num_bytes, unit.digest, unit.generation)
