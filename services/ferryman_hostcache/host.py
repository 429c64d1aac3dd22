"""One node's host-cache at work: connects the store's decisions to arena, index and lifecycle
log."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.units import Tier
from ferryman.errors import ConfigError, ManifestMismatch, Stale, WrongEpoch
from ferryman.ids import NO_REQUEST
from ferryman.runtime.lifecycle import LifecyclePublisher
from ferryman.runtime.logs import Tail
from ferryman.tiers.layout import ArenaLayout, budget_of, split_arena
from ferryman.tiers.prefetch_progress import AttemptName, PrefetchOrigins
from ferryman.tiers.prefetch_values import OWN_STORAGE, UnitOrigin
from ferryman.tiers.storage_values import FilesCorrupt, StorageFailed, UnitCorrupt
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import (
    AcquireGrant,
    AcquireRequest,
    EvictionRefused,
    ReservedUnit,
    ReserveRequest,
    StoreLimits,
    UnitForgotten,
    UnitName,
    UnitStored,
    WorkerLife,
)
from ferryman.tiers.writeback import WritebackBacklog
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.redis.index import NodeLife
from ferryman_hostcache.arena import Arena, ArenaGrowth, AttachedWorkers
from ferryman_hostcache.index_publisher import IndexPublisher
from ferryman_hostcache.storage.factory import StorageTier

log = logging.getLogger(__name__)

MAX_REMEMBERED_REQUESTS = 8192
# How long peers are not asked for a chain that was dropped here, and the limit on such chains.
DISTRUST_SECONDS, MAX_DISTRUSTED = 600.0, 1024
STORAGE = Tier.STORAGE.value


class HostCache:
    """Used from the event loop only. There is no store before a worker maps the arena."""

    def __init__(
        self,
        identity: NodeLife,
        arena: Arena,
        limits: StoreLimits,
        snapshot_share: float,
        *,
        publisher: IndexPublisher,
        lifecycle: LifecyclePublisher,
        clock: Callable[[], float],
        storage: StorageTier,
        backlog: WritebackBacklog[CallTags],
    ) -> None:
        self.identity, self.arena, self.limits = identity, arena, limits
        self.storage, self._backlog = storage, backlog
        self._snapshot_share = snapshot_share
        self.workers, self.origins = AttachedWorkers(arena.is_alive), PrefetchOrigins()
        self.publisher, self._lifecycle, self._clock = publisher, lifecycle, clock
        self._store: HostStore | None = None  # before a worker maps the arena
        self._written = asyncio.Event()  # a writer has ended
        self._requests: OrderedDict[str, CallTags] = OrderedDict()
        self._distrusted: OrderedDict[PageKey, float] = OrderedDict()

    @property
    def life(self) -> WorkerLife:
        """The host-cache itself as a reader and writer of its arena."""
        return WorkerLife(self.identity.node_id, self.identity.epoch)

    # Attaching.

    def attach(self, life: WorkerLife, manifest: StateManifest) -> int:
        """The index of the byte that this life must lock.

        The arena is laid out for the first life that holds its lock, which only a process that maps
        the arena can: a caller that shows a role's token alone fixes nothing for others. Raises
        ManifestMismatch for another manifest than the arena's, or one that does not fit.
        """
        self._remove_workers(self.workers.sweep(self._clock()))
        self._lay_out()
        if self._store is None:
            self._split(manifest)
        elif self._store.manifest.digest != manifest.digest:
            raise ManifestMismatch(self._store.manifest.differences(manifest) or ("digest",))
        log.info("attached %s", Tail(worker=life.worker_id, epoch=life.epoch))
        return self.workers.attach(life, manifest, self._clock())

    def _lay_out(self) -> None:
        """Lays the arena out as soon as a life maps it; lives with another manifest attach again,
        and hear why not."""
        while self._store is None and (manifest := self.workers.first_manifest()) is not None:
            try:
                self._store = self._make_store(manifest)
            except ManifestMismatch:
                self.workers.refuse(manifest)
                continue
            self.workers.refuse_others(manifest)
            self.storage.attach(manifest)
            self.flush_storage_effects(CallTags())
            self.publisher.on_holdings()

    def _split(self, manifest: StateManifest) -> ArenaLayout:
        try:
            return split_arena(manifest, self.arena.num_bytes, self._snapshot_share)
        except ConfigError as error:
            log.warning("arena too small: %s", error)
            raise ManifestMismatch((str(error),)) from error

    def _make_store(self, manifest: StateManifest) -> HostStore:
        layout = self._split(manifest)
        growth = ArenaGrowth(self.arena, layout)
        ready = [growth.prepare(kind, 0) for kind in layout.regions]
        if not all(ready):
            raise ManifestMismatch(("shared memory for the arena's first slots",))
        slots = {kind.value: count for kind, count in layout.num_slots.items()}
        log.info("arena laid out %s", Tail(manifest=manifest.digest, **slots))
        fits = budget_of(manifest, layout)
        parts = {f"{pool.kind}_bytes": pool.num_bytes for pool in fits.pools}
        room = Tail(tokens=fits.num_tokens, snapshots=fits.num_snapshots, **parts)
        log.info("arena bytes=%d %s", self.arena.num_bytes, room)
        return HostStore(manifest, layout, self.limits, growth.prepare)

    def check_epoch(self, epoch: int) -> None:
        if epoch != self.identity.epoch:
            raise WrongEpoch(f"this is epoch {self.identity.epoch}, the message is for {epoch}")

    @property
    def store(self) -> HostStore:
        """Raises Stale before a worker maps the arena."""
        self._lay_out()
        if self._store is None:
            raise Stale("no worker maps the arena; attach first")
        return self._store

    @property
    def is_laid_out(self) -> bool:
        self._lay_out()
        return self._store is not None

    # Readers and writers.

    def acquire(self, ask: AcquireRequest, tags: CallTags) -> AcquireGrant:
        grant = self.store.acquire(ask, self._clock())
        if grant.units:
            self._remember(ask.lease_id, tags)
        if grant.usable_pages:
            counts = dict.fromkeys(self.store.manifest.kinds, 0)
            for unit in grant.units:
                counts[unit.kind] += 1
            facts = {f"{kind}_units": count for kind, count in counts.items()}
            self.log_event(tags, "loaded", usable_pages=grant.usable_pages, **facts)
        self._backlog.on_hit([(unit.kind, unit.key) for unit in grant.units], tags)
        return self.origins.label(grant, _attempt(tags))

    async def settle(self, ask: AcquireRequest, patience: float) -> None:
        """Waits for a worker that is writing what this reader wants: the state of a turn that has
        ended just now, whose next turn is here already. Not for what prefetches bring, which have a
        patience of their own."""
        not_by = (self.life, ask.worker)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while self.store.is_awaited(ask, not_by):
                    self._written.clear()
                    await self._written.wait()

    def reserve(self, ask: ReserveRequest, tags: CallTags) -> tuple[ReservedUnit, ...]:
        room = self.store.reserve(ask, self._clock())
        if room:
            self._remember(ask.lease_id, tags)
        self.flush_effects(tags)
        return room

    def commit(self, lease_id: str, digests: Mapping[UnitName, bytes]) -> int:
        tags = self._requests.pop(lease_id, CallTags())
        try:
            stored = self.store.commit(lease_id, digests, self._clock())
        finally:
            self._written.set()
            self.flush_effects(tags)
        if stored:
            self.log_event(tags, "stored", units=stored, reserved_units=len(digests))
        return stored

    def commit_prefetched(
        self,
        lease_id: str,
        digests: Mapping[UnitName, bytes],
        origins: Mapping[UnitName, UnitOrigin],
        keys: Sequence[PageKey],
        *,
        tags: CallTags,
    ) -> None:
        """Makes the arrived units of a prefetch visible up to a resume point. Raises LeaseLost.

        Units of another node's folder are written to storage like a peer's units, because their
        owner may evict them at any time."""
        names = self.store.commit_arrived(lease_id, digests, self._clock())
        units = {(kind, keys[page]): origins[kind, page] for kind, page in names}
        self._backlog.mark_written(unit for unit, origin in units.items() if origin == OWN_STORAGE)
        tiers = {unit: origin.tier for unit, origin in units.items()}
        self.origins.remember(_attempt(tags), tiers)
        self.flush_effects(tags)
        for origin in sorted(set(units.values())):
            facts = {"folder": origin.folder} if origin.folder else {}
            count = sum(other == origin for other in units.values())
            self.log_event(tags, "stored", units=count, origin=origin.tier.value, **facts)

    def renew(self, lease_ids: Iterable[str]) -> tuple[str, ...]:
        return self.store.renew(lease_ids, self._clock())

    def release(self, lease_ids: Iterable[str]) -> CallTags:
        """Ends leases; returns the tags of the last one."""
        tags = CallTags()
        for lease_id in lease_ids:
            self.store.release(lease_id)
            tags = self._requests.pop(lease_id, tags)
        self._written.set()
        return tags

    async def check_reported_corrupt(self, kind: Kind, key: PageKey, tags: CallTags) -> None:
        """Drops the unit if its bytes are not those written. If they are, the reader may have read
        after its lease had ended, when the slot held another unit."""
        before = self.store.unit(kind, key)
        if before is None:
            return
        digest = await asyncio.to_thread(self.arena.digest, before.offset, before.num_bytes)
        if digest == before.digest or self.store.unit(kind, key) != before:
            return
        log.error("corrupt unit %s", Tail(kind=kind, key=key.hex(), slot=before.index))
        dropped = self.store.drop_corrupt(kind, key)
        self.flush_effects(tags)
        facts = {"key": key.hex(), "kind": kind.value, "dropped": dropped}
        self.log_incident(tags, "corrupt", tier=Tier.HOST.value, **facts)

    def drop_chain(self, first: PageKey) -> None:
        """Drops in both tiers the chains that begin with a page, because a row without finite
        numbers was computed from it. The bytes are those written, so nothing is verified. Peers are
        not asked for the chain for a while, because they may have the same state."""
        dropped = {
            Tier.HOST: self.store.drop_chain(first),
            Tier.STORAGE: self.storage.drop_chain(first),
        }
        self._distrust(first)
        self.flush_effects(CallTags())
        self.flush_storage_effects(CallTags())
        for tier in [tier for tier, num_units in dropped.items() if num_units]:
            facts = {"tier": tier.value, "key": first.hex(), "dropped": dropped[tier]}
            log.error("state without numbers %s", Tail(**facts))
            self.log_incident(CallTags(), "corrupt", cause="non_finite", **facts)

    def _distrust(self, first: PageKey) -> None:
        self._distrusted.pop(first, None)
        self._distrusted[first] = self._clock() + DISTRUST_SECONDS
        while len(self._distrusted) > MAX_DISTRUSTED:
            self._distrusted.popitem(last=False)

    def is_distrusted(self, first: PageKey) -> bool:
        """Whether peers may hold the state of this chain that was dropped here."""
        return self._clock() < self._distrusted.get(first, 0.0)

    # Commands.

    def flush(self) -> int:
        """Drops every unit of the host tier that is not in use; returns how many."""
        if self._store is None:
            return 0
        dropped = self.store.flush()
        self.flush_effects(CallTags())
        return dropped

    def flush_all(self) -> int:
        """Drops also every unit of the storage tier without a reader; returns how many."""
        dropped = self.flush() + self.storage.flush()
        self.flush_storage_effects(CallTags())
        return dropped

    # Time.

    def tick(self) -> None:
        """Ends leases whose time is over; frees the slots of workers that are gone."""
        now = self._clock()
        if not self.is_laid_out:
            self.workers.sweep(now)
            return
        self._forget(self.store.expire(now))
        self._remove_workers(self.workers.sweep(now))
        self.storage.tick()
        self.flush_effects(CallTags())
        self.flush_storage_effects(CallTags())

    def _remove_workers(self, lives: Iterable[WorkerLife]) -> None:
        for life in lives:
            log.info("worker gone %s", Tail(worker=life.worker_id, epoch=life.epoch))
            if self._store is not None:
                self._forget(self._store.on_worker_gone(life))

    # Reports.

    def flush_effects(self, tags: CallTags) -> None:
        """Passes the effects of the host tier to the index, the backlog and the log."""
        effects = self.store.drain_effects()
        self.publisher.publish(e for e in effects if isinstance(e, UnitStored | UnitForgotten))
        self._backlog.on_host_effects(effects, tags)
        for effect in effects:
            if isinstance(effect, EvictionRefused):
                facts = {"kind": effect.kind.value, "units": effect.num_slots}
                self.log_event(tags, "evicted_under_lease_refused", **facts)

    def flush_storage_effects(self, tags: CallTags) -> None:
        """Passes the effects of the storage tier to the index, the backlog and the log."""
        effects = self.storage.drain_effects()
        self.publisher.publish(e for e in effects if isinstance(e, UnitStored | UnitForgotten))
        self._backlog.on_storage_effects(effects)
        for effect in effects:
            match effect:
                case UnitCorrupt():
                    facts = {"key": effect.key.hex(), "kind": effect.kind.value}
                    dropped = effect.num_dropped
                    self.log_incident(tags, "corrupt", tier=STORAGE, dropped=dropped, **facts)
                case FilesCorrupt():
                    self.log_incident(tags, "corrupt", tier=STORAGE, files=effect.num_files)
                case StorageFailed():
                    error, operation = effect.error, effect.operation
                    self.log_incident(tags, "storage_failed", operation=operation, error=error)

    def holdings(self) -> Iterator[UnitStored]:
        """Every unit in both tiers, for an index that was away."""
        if self._store is not None:
            yield from self.store.holdings()
            yield from self.storage.holdings()

    def log_event(self, tags: CallTags, name: str, **facts: int | str) -> None:
        """Logs an event of a request. An event without a request would not be found, so it is left
        out."""
        if tags.request_id:
            self._publish(tags, name, facts)

    def log_incident(self, tags: CallTags, name: str, **facts: int | str) -> None:
        """Logs an event that operators must see, with or without a request."""
        self._publish(tags if tags.request_id else CallTags(NO_REQUEST), name, facts)

    def _publish(self, tags: CallTags, name: str, facts: Mapping[str, int | str]) -> None:
        self._lifecycle.publish(
            tags.request_id, tags.attempt, name, traceparent=tags.traceparent, **facts
        )

    def _forget(self, lease_ids: Iterable[str]) -> None:
        for lease_id in lease_ids:
            self._requests.pop(lease_id, None)

    def _remember(self, lease_id: str, tags: CallTags) -> None:
        self._requests[lease_id] = tags
        while len(self._requests) > MAX_REMEMBERED_REQUESTS:
            self._requests.popitem(last=False)


def _attempt(tags: CallTags) -> AttemptName:
    return tags.request_id, tags.attempt
