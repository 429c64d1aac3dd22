"""The host tier from a worker's side: units to load are prefetched and leased before admission,
cached units are written to it by policy. It works while the engine runs; its failures only cost
hits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.node import TreeChange
from ferryman.cache.resume import CopyState, Reason, ResumePlan, Shortfall, max_resume_pages
from ferryman.cache.units import HostUnit
from ferryman.runtime.life import alongside
from ferryman.schedule.events import Cached
from ferryman.schedule.request import Request
from ferryman.schedule.scheduler import Scheduler
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched, PrefetchOptions
from ferryman.tiers.write_policy import UnitKey, WritePolicy
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.client import MISS, HostCacheClient, HostLease
from ferryman.wire.hostcache.copy_pace import StepPace
from ferryman.worker.backup import DeviceBackup

if TYPE_CHECKING:  # imports torch, which the simulator runs without
    from ferryman.engine.engine import Engine

V = TypeVar("V")

# A prefetch may take at most this share of the time that a request has left.
PREFETCH_SHARE = 0.5
# Prefill waits for decode's Reserve: beyond this it is quicker to send what is lacking.
RECEIVE_SECONDS = 0.25
# An agent answers a call within milliseconds. Decode is copying the state of the turn before then,
# which is quicker than to compute it again.
WRITTEN_SECONDS = 0.05
MAX_REMEMBERED = 1024


class NoHostTier:
    """A worker without a host-cache on its node. It stores nothing and finds nothing."""

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

    async def lease_for_receive(
        self, request: Request, tags: CallTags, *, seconds_left: float
    ) -> HostLease:
        return MISS

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        """Nothing was leased."""

    def loading(self, request_id: str, loads: Sequence[HostUnit]) -> None:
        """Nothing was loaded."""

    def planned(self, request: Request, plan: ResumePlan, tags: CallTags) -> None:
        """No tier to write to."""

    def cached(self, cached: Cached, tags: CallTags) -> None:
        """No tier to write to."""

    def chain_dropped(self, first: PageKey) -> None:
        """There is no other tier."""

    def changed(self, changes: Sequence[TreeChange]) -> None:
        """No unit to write ahead."""

    def stepped(self, num_ended: int, *, is_drawing: bool) -> None:
        """No copies."""

    def hurry(self) -> None:
        """No copies."""

    def ended(self, request_id: str, tags: CallTags) -> None:
        """No tier to store it in."""

    def pin_retracted(self) -> None:
        """A retracted request's state stays in the tree until it is evicted."""

    async def offload_retracted(self, request: Request, tags: CallTags) -> HostLease:
        return MISS


class HostTierBridge:
    """A worker with a host-cache."""

    def __init__(
        self,
        scheduler: Scheduler,
        client: HostCacheClient,
        backup: DeviceBackup,
        wish: PrefetchOptions,
    ) -> None:
        self._scheduler, self._manifest = scheduler, scheduler.manifest
        self._client, self._wish = client, wish
        self.backup = backup
        self._loading: OrderedDict[str, frozenset[UnitKey]] = OrderedDict()
        self._paths: OrderedDict[str, tuple[PageKey, ...]] = OrderedDict()

    @property
    def node_id(self) -> str:
        return self._client.node_id

    # Before a request is admitted.

    def wants_prefetch(self, request: Request) -> bool:
        """Whether slower tiers could save enough of this prompt to be worth a request."""
        if request.prompt_logprobs is not None:
            return False  # it computes every token
        gain = self._tokens_beyond(request, self._resumable(request))
        return bool(self.node_id) and 0 < gain >= self._wish.threshold_tokens

    def _tokens_beyond(self, request: Request, have_pages: int) -> int:
        page_size = self._manifest.page_size
        max_pages = max_resume_pages(request.prompt_len, page_size)
        return (min(max_pages, len(request.keys)) - have_pages) * page_size

    def _resumable(self, request: Request) -> int:
        """Pages that the device alone can resume after, ignoring windows."""
        tree = self._scheduler.allocator.tree
        matched = tree.match_depth(request.keys)
        if Kind.RECURRENT not in self._manifest.kinds:
            return matched
        return next(tree.snapshot_depths(request.keys, matched), 0)

    async def prefetch(
        self, request: Request, tags: CallTags, *, seconds_left: float
    ) -> Prefetched:
        """The units that storage and peers brought to the host. Waits by policy, within the
        request's time."""
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
        """The units worth loading for a prompt; a miss is empty."""
        if request.prompt_logprobs is not None:
            return MISS
        have_pages = self._scheduler.allocator.tree.match_depth(request.keys)
        lease = await self._client.acquire(
            request.keys,
            request.prompt_len,
            have_pages,
            min_pages=self._resumable(request),
            tags=tags,
            patience=WRITTEN_SECONDS,
        )
        if not brought.reason:
            return lease
        shortfall = Shortfall(brought.asked_pages, Reason(brought.reason))
        return replace(lease, view=replace(lease.view, shortfall=shortfall))

    async def lease_for_receive(
        self, request: Request, tags: CallTags, *, seconds_left: float
    ) -> HostLease:
        """The units that decode can load, so that prefill need not send them: those in the host
        tier, and those that slower tiers bring within a moment."""
        have_pages = self._scheduler.allocator.tree.match_depth(request.keys)
        if have_pages >= len(request.keys):
            return MISS
        # Decode computes no token of the prompt, so a page that ends with it counts, too.
        prompt_len = request.prompt_len + 1
        gain = (len(request.keys) - have_pages) * self._manifest.page_size
        if self.node_id and gain >= self._wish.threshold_tokens:
            limits = self._wish.policy.seconds(gain), RECEIVE_SECONDS, PREFETCH_SHARE * seconds_left
            await self._client.prefetch(
                request.keys, prompt_len, have_pages=have_pages, tags=tags, patience=min(limits)
            )
        return await self._client.acquire(request.keys, prompt_len, have_pages, tags=tags)

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        """A corrupt load reports all units of the lease, because the corrupt one is not known
        here."""
        units = lease.view.units.values() if was_corrupt else ()
        self._client.release(lease, [(unit.kind, unit.key) for unit in units])

    # Reports of the schedule. None of these calls waits.

    def loading(self, request_id: str, loads: Sequence[HostUnit]) -> None:
        """A request has these units from here, so they need not be stored again."""
        units = frozenset((unit.kind, unit.key) for unit in loads)
        _remember(self._loading, request_id, units)

    def planned(self, request: Request, plan: ResumePlan, tags: CallTags) -> None:
        """A request was admitted, with this plan."""
        self.loading(request.request_id, plan.loads)
        self.backup.hit(self._reused(request.keys, plan), tags)

    def _reused(self, keys: Sequence[PageKey], plan: ResumePlan) -> Iterable[UnitKey]:
        if Kind.FULL in self._manifest.kinds:
            yield from ((Kind.FULL, key) for key in keys[: plan.anchor_pages])
        yield from ((Kind.WINDOW, keys[page]) for page in plan.window_pages)
        if isinstance(plan.initialiser, CopyState):
            yield Kind.RECURRENT, plan.initialiser.key

    def cached(self, cached: Cached, tags: CallTags) -> None:
        """A prefix came into the tree."""
        units = [(unit.kind, unit.key) for unit in cached.units]
        loaded = self._loading.pop(cached.request_id, frozenset())
        self.backup.came_from_host(unit for unit in units if unit in loaded)
        self.backup.added((unit for unit in units if unit not in loaded), tags)
        _remember(self._paths, cached.request_id, cached.keys)

    def chain_dropped(self, first: PageKey) -> None:
        """State that begins with page `first` gave numbers that are not finite: drops it in every
        tier."""
        self.backup.chain_dropped(first)

    def changed(self, changes: Sequence[TreeChange]) -> None:
        """The changes of the tree since the last call."""
        self.backup.changed(changes)
        self.backup.relieve()

    def stepped(self, num_ended: int, *, is_drawing: bool) -> None:
        """So many steps that draw tokens have ended, and one runs now, or none."""
        self.backup.stepped(num_ended, is_drawing=is_drawing)

    def hurry(self) -> None:
        """Copies wait for no step from now on: the worker drains."""
        self.backup.hurry()

    def ended(self, request_id: str, tags: CallTags) -> None:
        """A conversation paused: stores the resume set of its next turn."""
        self.backup.keep(self._paths.pop(request_id, ()), tags)

    # Retraction.

    def pin_retracted(self) -> None:
        """The caller calls `offload_retracted` for every request retracted from now on."""
        self._scheduler.retraction.pin_retracted()

    async def offload_retracted(self, request: Request, tags: CallTags) -> HostLease:
        """Stores the resume set of a retracted request, frees it here, and leases it in the host
        tier."""
        try:
            await self.backup.keep_now(request.keys, tags)
        finally:
            self._scheduler.retraction.release_retracted(request.request_id)
            self.backup.freed()
        return await self._client.acquire(request.keys, request.prompt_len, 0, tags=tags)


HostTier = HostTierBridge | NoHostTier


def _remember(table: OrderedDict[str, V], name: str, value: V) -> None:
    """Keeps the newest entries only, so that an entry that is never read does not stay for ever."""
    table[name] = value
    table.move_to_end(name)
    while len(table) > MAX_REMEMBERED:
        table.popitem(last=False)


async def _offer_what_is_owed(client: HostCacheClient, backup: DeviceBackup) -> None:
    """Tells of each attachment and recovery, for ever."""
    num_times = 0
    while True:
        num_times = await client.attachment.usable_since(num_times)
        backup.host_usable()


@asynccontextmanager
async def host_tier_of(
    engine: Engine,
    client: HostCacheClient,
    policy: WritePolicy,
    wish: PrefetchOptions,
    freed: Callable[[], None],
) -> AsyncIterator[HostTierBridge]:
    """The host tier for the length of a block; leaving the block waits for no store."""
    scheduler, store_unit = engine.scheduler, engine.transfer.store_unit
    backup = DeviceBackup(scheduler, store_unit, client, policy, freed, StepPace())
    async with alongside(backup.run(), _offer_what_is_owed(client, backup)):
        yield HostTierBridge(scheduler, client, backup, wish)
