"""Runs prefetches: each asks slower tiers for units, reserves room, fetches, and frees the rest.

    start ──> asking ──> bringing ──> settled       FINISH, its policy, the caller's deadline or
                 └──────────┴──────────┘            the process's end lead there from any state

Settling commits the arrived units up to a resume point and releases the rest. It runs after the
readers have ended, because neither sort of reader writes any more once it has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ferryman.errors import LeaseLost, QueueFull
from ferryman.runtime.background import Background
from ferryman.runtime.logs import Tail
from ferryman.tiers.prefetch import PrefetchGrant, PrefetchPlanner, PrefetchSource
from ferryman.tiers.prefetch_progress import PrefetchProgress
from ferryman.tiers.prefetch_values import (
    Prefetched,
    PrefetchOptions,
    PrefetchPolicy,
    PrefetchRequest,
)
from ferryman.wire.grpc.rpc import CallTags
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.prefetch_io import PrefetchIO, PrefetchTiers
from ferryman_hostcache.prefetch_stats import PrefetchCounts, PrefetchStats

log = logging.getLogger(__name__)

MAX_REMEMBERED = 1024
# The part of a caller's deadline that is kept for the way back of the answer.
ANSWER_SECONDS = 0.02


@dataclass(slots=True)
class PrefetchJob:
    """One prefetch, the request it is for, and its start time. `stop` ends it early; after
    `settled` its result is final."""

    tags: CallTags
    num_tokens: int
    began: float
    progress: PrefetchProgress
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class PrefetchRunner:
    """All prefetches of one host-cache, at most `max_running` at once. `wish` is for callers that
    name no policy or no threshold."""

    def __init__(
        self,
        host: HostCache,
        tiers: PrefetchTiers,
        prefetcher: PrefetchPlanner,
        background: Background,
        *,
        wish: PrefetchOptions,
        max_running: int,
        clock: Callable[[], float],
    ) -> None:
        self.wish = wish
        self._host, self._tiers, self._prefetcher = host, tiers, prefetcher
        self._background, self._max_running, self._clock = background, max_running, clock
        self._runs: OrderedDict[tuple[str, int], PrefetchJob] = OrderedDict()
        self._running: dict[str, PrefetchJob] = {}  # by lease id
        self.tally = PrefetchStats()

    # Starting and finishing.

    def start(self, ask: PrefetchRequest, tags: CallTags, patience: float) -> PrefetchJob:
        """Starts a prefetch, or returns the one that was started for this request and attempt.

        A prefetch for a reader with more pages cannot be used (the router starts one by its last
        knowledge of the worker), nor can one of another prompt, if a client has used a request id
        again. A prefetch ends by itself, after `patience` seconds at the latest. Raises QueueFull,
        or Stale before any worker has attached.
        """
        if running := self._found(ask, tags):
            return running
        if len(self._running) >= self._max_running:
            raise QueueFull(f"{self._max_running} prefetches are under way")
        store = self._host.store
        before = store.usable_pages(ask.keys[: ask.max_pages])
        num_tokens = len(ask.keys) * store.manifest.page_size
        run = PrefetchJob(tags, num_tokens, self._clock(), PrefetchProgress(ask, before))
        self.tally.num_begun += 1
        lease_id = f"prefetch.{self._prefetcher.worker.epoch:x}.{self.tally.num_begun}"
        self._running[lease_id] = run
        self._remember(run)
        self._background.start(self._go(lease_id, run, ask, patience))
        return run

    def _found(self, ask: PrefetchRequest, tags: CallTags) -> PrefetchJob | None:
        run = self._runs.get((tags.request_id, tags.attempt)) if tags.request_id else None
        return run if run and run.progress.serves(ask) else None

    def _remember(self, run: PrefetchJob) -> None:
        """Remembers a prefetch by its request and attempt; stops the one it replaces."""
        if run.tags.request_id:
            name = run.tags.request_id, run.tags.attempt
            if replaced := self._runs.pop(name, None):
                replaced.stop.set()
            self._runs[name] = run
            while len(self._runs) > MAX_REMEMBERED:
                self._runs.popitem(last=False)

    async def finish(
        self,
        ask: PrefetchRequest,
        tags: CallTags,
        policy: PrefetchPolicy,
        *,
        patience: float,
        left: float,
    ) -> Prefetched:
        """Waits as the policy says, `left` seconds at most, ends the prefetch, and returns its
        result.

        Starts the prefetch if it is not running. With BEST_EFFORT a prefetch that starts now cannot
        help this request, so it goes on, as after `start`, for later requests with the same prefix.
        """
        is_new = self._found(ask, tags) is None
        run = self.start(ask, tags, patience)
        if is_new and policy is PrefetchPolicy.BEST_EFFORT:
            return run.progress.result()
        try:
            await self._settled(run, policy, left)
        finally:
            run.stop.set()
        await run.settled.wait()
        return run.progress.result()

    async def _settled(self, run: PrefetchJob, policy: PrefetchPolicy, left: float) -> None:
        now = self._clock()
        end = min(run.began + policy.seconds(run.num_tokens), now + left - ANSWER_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, end - now)):
                await run.settled.wait()

    # The work.

    async def _go(
        self, lease_id: str, run: PrefetchJob, ask: PrefetchRequest, patience: float
    ) -> None:
        io = PrefetchIO(self._host, self._tiers, run.tags, lease_id, clock=self._clock)
        try:
            async with asyncio.timeout(patience):
                await _until(run.stop, self._bring(lease_id, run, ask, io))
        except TimeoutError:
            log.debug("prefetch out of time %s", Tail(id=run.tags.request_id))
        finally:
            self._settle(lease_id, run, ask, io)

    async def _bring(
        self, lease_id: str, run: PrefetchJob, ask: PrefetchRequest, io: PrefetchIO
    ) -> None:
        sources = await io.sources(ask)
        grant = self._reserve(lease_id, run.tags, ask, sources)
        run.progress.on_grant(grant)
        if grant.room:
            await io.fetch(ask.keys, grant.room, sources)

    def _reserve(
        self, lease_id: str, tags: CallTags, ask: PrefetchRequest, sources: Sequence[PrefetchSource]
    ) -> PrefetchGrant:
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
            self._host.flush_effects(tags)

    @property
    def bytes_under_way(self) -> int:
        return sum(run.progress.bytes_under_way for run in self._running.values())

    def _settle(
        self, lease_id: str, run: PrefetchJob, ask: PrefetchRequest, io: PrefetchIO
    ) -> None:
        """After any end: keeps the units that make a resume point, and frees all others."""
        store, progress = self._host.store, run.progress
        progress.has_failed |= io.num_failed > 0
        progress.traffic = io.traffic
        try:
            if io.digests:
                self._host.commit_prefetched(
                    lease_id, io.digests, io.origins, ask.keys, tags=run.tags
                )
        except LeaseLost as error:
            self.tally.num_lost += 1
            log.warning("a prefetch lost its room: %s", error)
        finally:
            if progress.bytes_under_way:
                store.release(lease_id)
            del self._running[lease_id]
            progress.brought = store.usable_pages(ask.keys[: ask.max_pages])
            self.tally.add(progress, io)
            run.settled.set()

    def tick(self) -> None:
        """Prolongs the leases of running prefetches."""
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
