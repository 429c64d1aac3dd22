"""Prefetches at work: each asks what slower tiers hold, takes room, brings, and gives back.

    start ──> asking ──> bringing ──> settled       FINISH, its policy, the caller's deadline or
                 └──────────┴──────────┘            the process's end lead there from any state

Settling commits what has arrived up to a resume point and releases the rest. It comes after the
readers have ended: both sorts of readers promise that nothing writes any more once they have.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.errors import LeaseLost, QueueFull
from ferryman.runtime.background import Background
from ferryman.runtime.logs import Tail
from ferryman.tiers.prefetch import Grant, Prefetcher, Source
from ferryman.tiers.prefetch_values import (
    Lack,
    PrefetchAsk,
    Prefetched,
    PrefetchPolicy,
    PrefetchWish,
    Traffic,
)
from ferryman.wire.rpc import CallTags
from ferryman_hostcache.bringing import Bringing, SlowTiers
from ferryman_hostcache.host import HostCache

log = logging.getLogger(__name__)

MAX_REMEMBERED = 1024
# What is left of a caller's deadline for the answer's way back.
ANSWER_SECONDS = 0.02
# What is left of the past in a tier's bandwidth after each prefetch: the last ten or so count.
KEPT = 0.9


@dataclass(frozen=True, slots=True)
class PrefetchCounts:
    """Counts since the start. Bytes and seconds are of units that were verified."""

    num_running: int = 0
    num_begun: int = 0
    num_complete: int = 0
    num_truncated: int = 0
    num_fruitless: int = 0
    num_failed_reads: int = 0
    num_corrupt: int = 0
    num_mismatched: int = 0
    num_lost: int = 0
    bytes_under_way: int = 0


class Run:
    """One prefetch. `stop` ends it early; after `settled` its result stands.

    It outlives its work, so it keeps nothing that grows with the prompt.
    """

    def __init__(
        self, tags: CallTags, ask: PrefetchAsk, num_tokens: int, *, before: int, began: float
    ) -> None:
        self.tags, self.num_tokens, self.began = tags, num_tokens, began
        self._have, self._last_key = ask.have_pages, tuple(ask.keys[-1:])
        self.grant = Grant(before, before, before, None, ())
        self.brought, self.bytes_under_way = before, 0
        self.has_failed = False
        self.traffic: dict[Tier, Traffic] = {}
        self.stop, self.settled = asyncio.Event(), asyncio.Event()

    def serves(self, ask: PrefetchAsk) -> bool:
        """Whether it brings what is asked. Keys chain: chains with one end are one chain."""
        return self._last_key == tuple(ask.keys[-1:]) and self._have <= ask.have_pages

    def granted(self, grant: Grant) -> None:
        """Room was reserved, or none."""
        self.grant, self.bytes_under_way = replace(grant, room=()), grant.num_bytes

    def result(self) -> Prefetched:
        grant = self.grant
        return Prefetched(
            before_pages=grant.before,
            asked_pages=grant.asked,
            granted_pages=grant.granted,
            brought_pages=self.brought,
            is_truncated=grant.before < grant.granted < grant.asked,
            reason=self._lack(),
            traffic=dict(self.traffic),
        )

    def _lack(self) -> str:
        """What came short last: the room, or after it the bringing."""
        if self.brought >= self.grant.asked:
            return ""
        if self.brought < self.grant.granted:
            return Lack.TIER_FAILED if self.has_failed else Lack.STORAGE_TIMEOUT
        return self.grant.lack or ""


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
        self._begun = self._complete = self._truncated = self._fruitless = 0
        self._failed_reads = self._corrupt = self._mismatched = self._lost = 0
        self.traffic: dict[Tier, Traffic] = {}
        self._recent: dict[Tier, tuple[float, float]] = {}  # bytes and seconds, decaying
        self.brought_units, self.lacking_units = Counter[tuple[Tier, Kind]](), Counter[Kind]()

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
        self._begun += 1
        lease_id = f"prefetch.{self._prefetcher.worker.epoch:x}.{self._begun}"
        self._running[lease_id] = run
        self._remember(run)
        self._background.outlive(self._go(lease_id, run, ask, patience))
        return run

    def _found(self, ask: PrefetchAsk, tags: CallTags) -> Run | None:
        run = self._runs.get((tags.request_id, tags.attempt)) if tags.request_id else None
        return run if run and run.serves(ask) else None

    def _remember(self, run: Run) -> None:
        if run.tags.request_id:
            self._runs[run.tags.request_id, run.tags.attempt] = run
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
            self._lost += 1
            log.warning("a prefetch lost its room: %s", error)
        finally:
            if run.bytes_under_way:
                store.release(lease_id)
            del self._running[lease_id]
            run.brought = store.usable_pages(ask.keys[: ask.max_pages])
            self._count(run, bringing)
            run.settled.set()

    def _count(self, run: Run, bringing: Bringing) -> None:
        result = run.result()
        self._truncated += result.is_truncated
        self._complete += result.before_pages < result.asked_pages <= result.brought_pages
        self._fruitless += result.brought_pages <= result.before_pages < result.asked_pages
        self._failed_reads += bringing.num_failed
        self._corrupt += bringing.num_corrupt
        self._mismatched += bringing.num_mismatched
        self.lacking_units.update(run.grant.lacking)
        self.brought_units.update((tier, name[0]) for name, tier in bringing.origins.items())
        for tier, each in bringing.traffic.items():
            self.traffic[tier] = self.traffic.get(tier, Traffic()) + each
            num_bytes, seconds = self._recent.get(tier, (0.0, 0.0))
            self._recent[tier] = KEPT * num_bytes + each.num_bytes, KEPT * seconds + each.seconds

    def tick(self) -> None:
        """Prolongs what is under way."""
        self._host.store.renew(self._running, self._clock())

    def seconds_per_byte(self, tier: Tier) -> float:
        """Learned from what came from a tier of late; 0 before anything did."""
        num_bytes, seconds = self._recent.get(tier, (0.0, 0.0))
        return seconds / num_bytes if num_bytes else 0.0

    def statistics(self) -> PrefetchCounts:
        return PrefetchCounts(
            num_running=len(self._running),
            num_begun=self._begun,
            num_complete=self._complete,
            num_truncated=self._truncated,
            num_fruitless=self._fruitless,
            num_failed_reads=self._failed_reads,
            num_corrupt=self._corrupt,
            num_mismatched=self._mismatched,
            num_lost=self._lost,
            bytes_under_way=self.bytes_under_way,
        )


async def _until(stop: asyncio.Event, job: Coroutine[Any, Any, None]) -> None:
    """Runs a job to its end, or cancels it and waits for its end when `stop` is set first."""
    async with asyncio.TaskGroup() as group:
        working, stopping = group.create_task(job), group.create_task(stop.wait())
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        stopping.cancel()
