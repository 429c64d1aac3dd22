"""The host tier from a worker's side: what to load is prefetched and leased before admission, what
is cached is written to it by policy. It runs beside the engine and can only miss, never fail.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from ferryman.cache.branch import CacheChange
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import CopyFrom, Reason, ResumePlan, Shortfall
from ferryman.runtime.life import alongside
from ferryman.schedule.events import Cached
from ferryman.schedule.request import Request
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched, PrefetchWish
from ferryman.tiers.write_policy import UnitKey, WritePolicy
from ferryman.wire.host_client import MISS, HostCacheClient, HostLease
from ferryman.wire.rpc import CallTags
from ferryman.worker.backup import DeviceBackup

if TYPE_CHECKING:  # torch: the simulator runs this without any
    from ferryman.engine.assembly import Engine

V = TypeVar("V")

# Of what is left of a request's time, a prefetch may take this share at most.
PREFETCH_SHARE = 0.5
MAX_REMEMBERED = 1024


class HostTierClient(Protocol):
    """What a worker does with the host tier."""

    @property
    def node_id(self) -> str: ...

    # Before a request is admitted.

    def wants_prefetch(self, request: Request) -> bool:
        """Whether slower tiers could spare enough of this prompt to be asked."""
        ...

    async def prefetch(
        self, request: Request, tags: CallTags, *, seconds_left: float
    ) -> Prefetched:
        """What storage and peers brought to the host; waits by policy, and never too long."""
        ...

    async def lease_for(
        self, request: Request, tags: CallTags, brought: Prefetched = NOTHING_BROUGHT
    ) -> HostLease:
        """The units worth loading for a prompt; a miss is empty."""
        ...

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None: ...

    # What the schedule reports; none of it waits.

    def planned(self, request: Request, plan: ResumePlan, tags: CallTags) -> None:
        """A request was admitted, with this plan."""
        ...

    def cached(self, cached: Cached, tags: CallTags) -> None:
        """A prefix came into the tree."""
        ...

    def changed(self, changes: Sequence[CacheChange]) -> None:
        """What came and went since the last call."""
        ...

    def ended(self, request_id: str, tags: CallTags) -> None:
        """A conversation paused: what its next turn resumes from is to be stored."""
        ...

    # Retraction.

    def keep_retracted(self) -> None:
        """Whoever calls this calls `put_away` for every request that is retracted from now on."""
        ...

    async def put_away(self, request: Request, tags: CallTags) -> HostLease:
        """Stores what a retracted request would resume from, frees it here, and leases it there."""
        ...


class NoHostTier:
    """A worker without a host-cache on its node."""

    node_id = ""

    def wants_prefetch(self, request: Request) -> bool:
        return False

    async def prefetch(
        self, request: Request, tags: CallTags, *, seconds_left: float
    ) -> Prefetched:
        return NOTHING_BROUGHT

    async def lease_for(
        self, request: Request, tags: CallTags, brought: Prefetched = NOTHING_BROUGHT
    ) -> HostLease:
        return MISS

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        """Nothing was leased."""

    def planned(self, request: Request, plan: ResumePlan, tags: CallTags) -> None:
        """Nowhere to write what is hit."""

    def cached(self, cached: Cached, tags: CallTags) -> None:
        """Nowhere to write."""

    def changed(self, changes: Sequence[CacheChange]) -> None:
        """Nothing to write ahead."""

    def ended(self, request_id: str, tags: CallTags) -> None:
        """Nowhere to store it."""

    def keep_retracted(self) -> None:
        """What is retracted stays in the tree as long as it may."""

    async def put_away(self, request: Request, tags: CallTags) -> HostLease:
        return MISS


class HostTier:
    """A worker with a host-cache."""

    def __init__(
        self, engine: Engine, client: HostCacheClient, backup: DeviceBackup, wish: PrefetchWish
    ) -> None:
        self._scheduler, self._manifest = engine.scheduler, engine.manifest
        self._client, self._wish = client, wish
        self.backup = backup
        self._loading: OrderedDict[str, frozenset[UnitKey]] = OrderedDict()
        self._paths: OrderedDict[str, tuple[PageKey, ...]] = OrderedDict()

    @property
    def node_id(self) -> str:
        return self._client.node_id

    # Before a request is admitted.

    def wants_prefetch(self, request: Request) -> bool:
        gain = self._tokens_beyond(request, self._resumable(request))
        return bool(self.node_id) and 0 < gain >= self._wish.threshold_tokens

    def _tokens_beyond(self, request: Request, have_pages: int) -> int:
        page_size = self._manifest.page_size
        last_page = (request.prompt_len - 1) // page_size
        return (min(last_page, len(request.keys)) - have_pages) * page_size

    def _resumable(self, request: Request) -> int:
        """Pages that the device alone can resume behind, windows aside."""
        tree = self._scheduler.residence.tree
        matched = tree.match_depth(request.keys)
        if Kind.RECURRENT not in self._manifest.kinds:
            return matched
        return next(tree.snapshot_depths(request.keys, matched), 0)

    async def prefetch(
        self, request: Request, tags: CallTags, *, seconds_left: float
    ) -> Prefetched:
        have_pages = self._resumable(request)
        by_policy = self._wish.policy.seconds(self._tokens_beyond(request, have_pages))
        return await self._client.prefetch(
            request.keys,
            request.prompt_len,
            have_pages=have_pages,
            tags=tags,
            patience=max(0.0, min(by_policy, PREFETCH_SHARE * seconds_left)),
        )

    async def lease_for(
        self, request: Request, tags: CallTags, brought: Prefetched = NOTHING_BROUGHT
    ) -> HostLease:
        have_pages = self._scheduler.residence.tree.match_depth(request.keys)
        lease = await self._client.acquire(
            request.keys,
            request.prompt_len,
            have_pages,
            min_pages=self._resumable(request),
            tags=tags,
        )
        if not brought.reason:
            return lease
        shortfall = Shortfall(brought.asked_pages, Reason(brought.reason))
        return replace(lease, view=replace(lease.view, shortfall=shortfall))

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        """A corrupt load reports all units of the lease: which one it was is not known here."""
        units = lease.view.units.values() if was_corrupt else ()
        self._client.release(lease, [(unit.kind, unit.key) for unit in units])

    # What the schedule reports.

    def planned(self, request: Request, plan: ResumePlan, tags: CallTags) -> None:
        _remember(
            self._loading,
            request.request_id,
            frozenset((unit.kind, unit.key) for unit in plan.loads),
        )
        self.backup.hit(self._reused(request.keys, plan), tags)

    def _reused(self, keys: Sequence[PageKey], plan: ResumePlan) -> Iterable[UnitKey]:
        if Kind.FULL in self._manifest.kinds:
            yield from ((Kind.FULL, key) for key in keys[: plan.anchor_pages])
        yield from ((Kind.WINDOW, keys[page]) for page in plan.window_pages)
        if isinstance(plan.initialiser, CopyFrom):
            yield Kind.RECURRENT, plan.initialiser.key

    def cached(self, cached: Cached, tags: CallTags) -> None:
        units = [(unit.kind, unit.key) for unit in cached.units]
        loaded = self._loading.pop(cached.request_id, frozenset())
        self.backup.came_from_host(unit for unit in units if unit in loaded)
        self.backup.added((unit for unit in units if unit not in loaded), tags)
        _remember(self._paths, cached.request_id, cached.keys)

    def changed(self, changes: Sequence[CacheChange]) -> None:
        self.backup.changed(changes)
        self.backup.relieve()

    def ended(self, request_id: str, tags: CallTags) -> None:
        self.backup.keep(self._paths.pop(request_id, ()), tags)

    # Retraction.

    def keep_retracted(self) -> None:
        self._scheduler.retraction.keep_retracted()

    async def put_away(self, request: Request, tags: CallTags) -> HostLease:
        try:
            await self.backup.keep_now(request.keys, tags)
        finally:
            self._scheduler.retraction.let_go(request.request_id)
            self.backup.freed()
        return await self._client.acquire(request.keys, request.prompt_len, 0, tags=tags)


def _remember(table: OrderedDict[str, V], name: str, value: V) -> None:
    """The newest so many: what is never asked for is forgotten in the end."""
    table[name] = value
    table.move_to_end(name)
    while len(table) > MAX_REMEMBERED:
        table.popitem(last=False)


@asynccontextmanager
async def host_tier_of(
    engine: Engine,
    client: HostCacheClient,
    policy: WritePolicy,
    wish: PrefetchWish,
    freed: Callable[[], None],
) -> AsyncIterator[HostTier]:
    """The tier for the length of a block; leaving waits for no store."""
    backup = DeviceBackup(engine, client, policy, freed)
    async with alongside(backup.run()):
        yield HostTier(engine, client, backup, wish)
