"""Prefetches at work: each asks what slower tiers hold, takes room, brings, and gives back.

    start ──> asking ──> bringing ──> settled       FINISH, its policy, the caller's deadline or
                 └──────────┴──────────┘            the process's end lead there from any state

Settling commits what has arrived up to a resume point and releases the rest. It comes after the
readers have ended: both sorts of readers promise that nothing writes any more once they have.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from ferryman.errors import LeaseLost, QueueFull
from ferryman.runtime.background import Background
from ferryman.runtime.logs import Tail
from ferryman.tiers.prefetch import Grant, Prefetcher, Source
from ferryman.tiers.prefetch_values import PrefetchAsk, Prefetched, PrefetchPolicy, PrefetchWish
from ferryman.wire.rpc import CallTags
from ferryman_hostcache.bringing import Bringing, SlowTiers
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.prefetch_run import Run
from ferryman_hostcache.prefetch_tally import PrefetchCounts, PrefetchTally

log = logging.getLogger(__name__)

MAX_REMEMBERED = 1024
# What is left of a caller's deadline for the answer's way back.
ANSWER_SECONDS = 0.02


class Prefetching:
    """All prefetches of one host-cache, at most `max_running` at once. `wish` is for callers that
    name no policy or no threshold."""

    def __init__(
        self,
        host: HostCache,
        tiers: SlowTiers,
        prefetcher: Prefetcher,
        background: Background,
        *,
        wish: PrefetchWish,
        max_running: int,
        clock: Callable[[], float],
    ) -> None:
        self.wish = wish
        self._host, self._tiers, self._prefetcher = host, tiers, prefetcher
        self._background, self._max_running, self._clock = background, max_running, clock
        self._runs: OrderedDict[tuple[str, int], Run] = OrderedDict()
        self._running: dict[str, Run] = {}  # by lease id
        self.tally = PrefetchTally()

    # Asking for one.

    def start(self, ask: PrefetchAsk, tags: CallTags, patience: float) -> Run:
        """Begins a prefetch, or finds the one that was begun for this request and attempt.

        One that was begun for a reader with more pages is no use: the router begins it by what it
        last heard of the worker. Nor is one of another prompt, whose id a client has used again.
        A prefetch ends by itself, after `patience` seconds at the latest.
        Raises QueueFull, or Stale before any worker has attached.
        """
        if found := self._found(ask, tags):
            return found
        if len(self._running) >= self._max_running:
            raise QueueFull(f"{self._max_running} prefetches are under way")
        store = self._host.store
        before = store.usable_pages(ask.keys[: ask.max_pages])
        num_tokens = len(ask.keys) * store.manifest.page_size
        run = Run(tags, ask, num_tokens, before=before, began=self._clock())
        self.tally.num_begun += 1
        lease_id = f"prefetch.{self._prefetcher.worker.epoch:x}.{self.tally.num_begun}"
        self._running[lease_id] = run
        self._remember(run)
        self._background.outlive(self._go(lease_id, run, ask, patience))
        return run

    def _found(self, ask: PrefetchAsk, tags: CallTags) -> Run | None:
        run = self._runs.get((tags.request_id, tags.attempt)) if tags.request_id else None
        return run if run and run.serves(ask) else None

    def _remember(self, run: Run) -> None:
        """Of the one it takes the place of, nobody hears any more."""
        if run.tags.request_id:
            name = run.tags.request_id, run.tags.attempt
            if replaced := self._runs.pop(name, None):
                replaced.stop.set()
            self._runs[name] = run
            while len(self._runs) > MAX_REMEMBERED:
                self._runs.popitem(last=False)

    async def finish(
        self,
        ask: PrefetchAsk,
        tags: CallTags,
        policy: PrefetchPolicy,
        *,
        patience: float,
        left: float,
    ) -> Prefetched:
        """Waits as the policy says, `left` seconds at most, ends the prefetch, and answers what it
        brought.

        Begins it where nobody did. Who waits for nothing can have nothing of one that begins only
        now, so then it is left to go on, as after `start`: whoever needs the prefix next finds it.
        """
        is_new = self._found(ask, tags) is None
        run = self.start(ask, tags, patience)
        if is_new and policy is PrefetchPolicy.BEST_EFFORT:
            return run.result()
        try:
            await self._settled(run, policy, left)
        finally:
            run.stop.set()
        await run.settled.wait()
        return run.result()

    async def _settled(self, run: Run, policy: PrefetchPolicy, left: float) -> None:
        now = self._clock()
        end = min(run.began + policy.seconds(run.num_tokens), now + left - ANSWER_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, end - now)):
                await run.settled.wait()

    # The work.

    async def _go(self, lease_id: str, run: Run, ask: PrefetchAsk, patience: float) -> None:
        bringing = Bringing(self._host, self._tiers, run.tags, lease_id, clock=self._clock)
        try:
            async with asyncio.timeout(patience):
                await _until(run.stop, self._bring(lease_id, run, ask, bringing))
        except TimeoutError:
            log.debug("prefetch out of time %s", Tail(id=run.tags.request_id))
        finally:
            self._settle(lease_id, run, ask, bringing)

    async def _bring(self, lease_id: str, run: Run, ask: PrefetchAsk, bringing: Bringing) -> None:
        sources = await bringing.sources(ask)
        grant = self._reserve(lease_id, run.tags, ask, sources)
        run.granted(grant)
        if grant.room:
            await bringing.fill(ask.keys, grant.room, sources)

    def _reserve(
        self, lease_id: str, tags: CallTags, ask: PrefetchAsk, sources: Sequence[Source]
    ) -> Grant:
        try:
            return self._prefetcher.reserve(
                self._host.store,
                ask,
                sources,
                lease_id=lease_id,
                bytes_under_way=self.bytes_under_way,
                now=self._clock(),
            )
        finally:
            self._host.tell(tags)

    @property
    def bytes_under_way(self) -> int:
        return sum(run.bytes_under_way for run in self._running.values())

    def _settle(self, lease_id: str, run: Run, ask: PrefetchAsk, bringing: Bringing) -> None:
        """Whatever happened: what makes a resume point stays, all else is free again."""
        store = self._host.store
        run.has_failed |= bringing.num_failed > 0
        run.traffic = bringing.traffic
        try:
            if bringing.digests:
                self._host.commit_brought(
                    lease_id, bringing.digests, bringing.origins, ask.keys, tags=run.tags
                )
        except LeaseLost as error:
            self.tally.num_lost += 1
            log.warning("a prefetch lost its room: %s", error)
        finally:
            if run.bytes_under_way:
                store.release(lease_id)
            del self._running[lease_id]
            run.brought = store.usable_pages(ask.keys[: ask.max_pages])
            self.tally.add(run, bringing)
            run.settled.set()

    def tick(self) -> None:
        """Prolongs what is under way."""
        self._host.store.renew(self._running, self._clock())

    def statistics(self) -> PrefetchCounts:
        return self.tally.counts(len(self._running), self.bytes_under_way)


async def _until(stop: asyncio.Event, job: Coroutine[Any, Any, None]) -> None:
    """Runs a job to its end, or cancels it and waits for its end when `stop` is set first."""
    async with asyncio.TaskGroup() as group:
        working, stopping = group.create_task(job), group.create_task(stop.wait())
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        stopping.cancel()
