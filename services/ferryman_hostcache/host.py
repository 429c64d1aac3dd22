"""One node's host-cache at work: the store's decisions joined to arena, index and lifecycle log."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.units import Tier
from ferryman.errors import ConfigError, ManifestMismatch, Stale, WrongEpoch
from ferryman.ids import NO_REQUEST
from ferryman.runtime.logs import Tail
from ferryman.tiers.layout import budget_of, split_arena
from ferryman.tiers.storage_values import FilesCorrupt, StorageFailed, UnitCorrupt
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import (
    AcquireAsk,
    EvictionRefused,
    Grant,
    ReserveAsk,
    ReservedUnit,
    StoreLimits,
    UnitForgotten,
    UnitName,
    UnitStored,
    WorkerLife,
)
from ferryman.wire.index import NodeLife
from ferryman.wire.rpc import CallTags
from ferryman_hostcache.arena import Arena
from ferryman_hostcache.backlog import Backlog
from ferryman_hostcache.origins import Origins
from ferryman_hostcache.storage.tier import StorageTier
from ferryman_hostcache.workers import Workers

log = logging.getLogger(__name__)

MAX_REMEMBERED_REQUESTS = 8192
STORAGE = Tier.STORAGE.value


class Announcer(Protocol):
    """Tells the index what is here; never waits, never fails."""

    def tell(self, changes: Iterable[UnitStored | UnitForgotten]) -> None: ...


class LifecycleLog(Protocol):
    """Says what happened to a request; never waits."""

    def publish(
        self,
        request_id: str,
        attempt: int,
        name: str,
        *,
        traceparent: str = "",
        **facts: bool | int | float | str,
    ) -> None: ...


class HostCache:
    """Touched from the event loop only. There is no store before the first worker has attached."""

    def __init__(
        self,
        identity: NodeLife,
        arena: Arena,
        limits: StoreLimits,
        snapshot_share: float,
        *,
        announcer: Announcer,
        lifecycle: LifecycleLog,
        clock: Callable[[], float],
        storage: StorageTier,
        backlog: Backlog,
    ) -> None:
        self.identity, self.arena, self.limits = identity, arena, limits
        self.storage, self._backlog = storage, backlog
        self._snapshot_share = snapshot_share
        self.workers, self.origins = Workers(arena.is_alive), Origins()
        self._announcer, self._lifecycle, self._clock = announcer, lifecycle, clock
        self._stores: dict[str, HostStore] = {}  # by manifest digest: none or one
        self._requests: OrderedDict[str, CallTags] = OrderedDict()

    @property
    def life(self) -> WorkerLife:
        """The host-cache itself as a reader and writer of its arena."""
        return WorkerLife(self.identity.node_id, self.identity.epoch)

    # Attaching.

    def attach(self, life: WorkerLife, manifest: StateManifest) -> int:
        """The index of the byte that this life is to lock. The first manifest is the arena's."""
        for store in self._stores.values():
            if store.manifest.digest != manifest.digest:
                raise ManifestMismatch(store.manifest.differences(manifest) or ("digest",))
        if not self._stores:
            self._stores[manifest.digest] = self._make_store(manifest)
            self.storage.attach(manifest)
            self.tell_storage(CallTags())
        self._bury(self.workers.sweep(self._clock()))
        log.info("attached %s", Tail(worker=life.worker_id, epoch=life.epoch))
        return self.workers.attach(life, self._clock())

    def _make_store(self, manifest: StateManifest) -> HostStore:
        try:
            layout = split_arena(manifest, self.arena.num_bytes, self._snapshot_share)
        except ConfigError as error:
            log.warning("arena too small: %s", error)
            raise ManifestMismatch((str(error),)) from error
        slots = {kind.value: count for kind, count in layout.num_slots.items()}
        log.info("arena laid out %s", Tail(manifest=manifest.digest, **slots))
        fits = budget_of(manifest, layout)
        parts = {f"{pool.kind}_bytes": pool.num_bytes for pool in fits.pools}
        room = Tail(tokens=fits.num_tokens, snapshots=fits.num_snapshots, **parts)
        log.info("arena bytes=%d %s", self.arena.num_bytes, room)
        return HostStore(manifest, layout, self.limits)

    def check_epoch(self, epoch: int) -> None:
        if epoch != self.identity.epoch:
            raise WrongEpoch(f"this is epoch {self.identity.epoch}, the message is for {epoch}")

    @property
    def store(self) -> HostStore:
        """Stale before the first worker has attached."""
        for store in self._stores.values():
            return store
        raise Stale("no worker has attached; attach first")

    @property
    def is_laid_out(self) -> bool:
        return bool(self._stores)

    # Readers and writers.

    def acquire(self, ask: AcquireAsk, tags: CallTags) -> Grant:
        grant = self.store.acquire(ask, self._clock())
        if grant.units:
            self._remember(ask.lease_id, tags)
        if grant.usable_pages:
            counts = dict.fromkeys(self.store.manifest.kinds, 0)
            for unit in grant.units:
                counts[unit.kind] += 1
            facts = {f"{kind}_units": count for kind, count in counts.items()}
            self.say(tags, "loaded", usable_pages=grant.usable_pages, **facts)
        self._backlog.hit([(unit.kind, unit.key) for unit in grant.units], tags)
        return self._with_origins(grant, tags)

    def _with_origins(self, grant: Grant, tags: CallTags) -> Grant:
        """To the attempt whose prefetch brought a unit it came from there; to others from here."""
        brought = self.origins.of(tags)
        if not brought:
            return grant
        units = (
            replace(unit, origin=brought.get((unit.kind, unit.key), Tier.HOST))
            for unit in grant.units
        )
        return replace(grant, units=tuple(units))

    def reserve(self, ask: ReserveAsk, tags: CallTags) -> tuple[ReservedUnit, ...]:
        room = self.store.reserve(ask, self._clock())
        if room:
            self._remember(ask.lease_id, tags)
        self.tell(tags)
        return room

    def commit(self, lease_id: str, digests: Mapping[UnitName, bytes]) -> int:
        tags = self._requests.pop(lease_id, CallTags())
        try:
            stored = self.store.commit(lease_id, digests, self._clock())
        finally:
            self.tell(tags)
        if stored:
            self.say(tags, "stored", units=stored, reserved_units=len(digests))
        return stored

    def commit_brought(
        self,
        lease_id: str,
        digests: Mapping[UnitName, bytes],
        origins: Mapping[UnitName, Tier],
        keys: Sequence[PageKey],
        *,
        tags: CallTags,
    ) -> None:
        """Makes visible what of a prefetch has arrived up to a resume point. Raises LeaseLost."""
        names = self.store.commit_arrived(lease_id, digests, self._clock())
        units = {(kind, keys[page]): origins[kind, page] for kind, page in names}
        self._backlog.written(unit for unit, tier in units.items() if tier is Tier.STORAGE)
        self.origins.remember(tags, units)
        self.tell(tags)
        for tier in sorted(set(units.values())):
            count = sum(each is tier for each in units.values())
            self.say(tags, "stored", units=count, origin=tier.value)

    def renew(self, lease_ids: Iterable[str]) -> tuple[str, ...]:
        return self.store.renew(lease_ids, self._clock())

    def release(self, lease_ids: Iterable[str]) -> CallTags:
        """Ends leases; answers who the last of them was for."""
        tags = CallTags()
        for lease_id in lease_ids:
            self.store.release(lease_id)
            tags = self._requests.pop(lease_id, tags)
        return tags

    async def reported_corrupt(self, kind: Kind, key: PageKey, tags: CallTags) -> None:
        """Drops the unit if its bytes are not those written. A reader whose lease was over may
        have read what came after them; then all is well here."""
        before = self.store.resident(kind, key)
        if before is None:
            return
        handle, digest = before
        layout = self.store.layout
        offset, num_bytes = layout.offset_of(kind, handle.slot), layout.slot_bytes(kind)
        found = await asyncio.to_thread(self.arena.digest, offset, num_bytes)
        if found == digest or self.store.resident(kind, key) != before:
            return
        log.error("corrupt unit %s", Tail(kind=kind, key=key.hex(), slot=handle.slot))
        dropped = self.store.drop_corrupt(kind, key)
        self.tell(tags)
        facts = {"key": key.hex(), "kind": kind.value, "dropped": dropped}
        self.say_trouble(tags, "corrupt", tier=Tier.HOST.value, **facts)

    # Orders.

    def flush(self) -> int:
        """Gives up everything of the host tier that nobody uses; how many units that were."""
        if not self._stores:
            return 0
        dropped = self.store.flush()
        self.tell(CallTags())
        return dropped

    def flush_all(self) -> int:
        """And everything of the storage tier that nobody reads."""
        dropped = self.flush() + self.storage.flush()
        self.tell_storage(CallTags())
        return dropped

    # Time.

    def tick(self) -> None:
        """Ends what is over; frees what belonged to workers that are gone."""
        if not self._stores:
            return
        now = self._clock()
        self.store.expire(now)
        self._bury(self.workers.sweep(now))
        self.storage.tick()
        self.tell(CallTags())
        self.tell_storage(CallTags())

    def _bury(self, lives: Iterable[WorkerLife]) -> None:
        for life in lives:
            log.info("worker gone %s", Tail(worker=life.worker_id, epoch=life.epoch))
            self.store.worker_gone(life)

    # Telling.

    def tell(self, tags: CallTags) -> None:
        """What happened in the host tier goes to the index, the storage tier and the log."""
        effects = self.store.drain_effects()
        self._announcer.tell(e for e in effects if not isinstance(e, EvictionRefused))
        self._backlog.host_changed(effects, tags)
        for effect in effects:
            if isinstance(effect, EvictionRefused):
                facts = {"kind": effect.kind.value, "units": effect.num_slots}
                self.say(tags, "evicted_under_lease_refused", **facts)

    def tell_storage(self, tags: CallTags) -> None:
        """What happened in the storage tier."""
        effects = self.storage.drain_effects()
        self._announcer.tell(e for e in effects if isinstance(e, UnitStored | UnitForgotten))
        self._backlog.storage_changed(effects)
        for effect in effects:
            match effect:
                case UnitCorrupt():
                    facts = {"key": effect.key.hex(), "kind": effect.kind.value}
                    dropped = effect.num_dropped
                    self.say_trouble(tags, "corrupt", tier=STORAGE, dropped=dropped, **facts)
                case FilesCorrupt():
                    self.say_trouble(tags, "corrupt", tier=STORAGE, files=effect.num_files)
                case StorageFailed():
                    error, operation = effect.error, effect.operation
                    self.say_trouble(tags, "storage_failed", operation=operation, error=error)

    def holdings(self) -> Iterator[UnitStored]:
        """Everything here, in both tiers, for an index that was away."""
        if self._stores:
            yield from self.store.holdings()
            yield from self.storage.holdings()

    def say(self, tags: CallTags, name: str, **facts: int | str) -> None:
        """What happened to a request; without one nobody would look for it."""
        if tags.request_id:
            self._publish(tags, name, facts)

    def say_trouble(self, tags: CallTags, name: str, **facts: int | str) -> None:
        """What somebody has to hear of, request or not."""
        self._publish(tags if tags.request_id else CallTags(NO_REQUEST), name, facts)

    def _publish(self, tags: CallTags, name: str, facts: Mapping[str, int | str]) -> None:
        self._lifecycle.publish(
            tags.request_id, tags.attempt, name, traceparent=tags.traceparent, **facts
        )

    def _remember(self, lease_id: str, tags: CallTags) -> None:
        self._requests[lease_id] = tags
        while len(self._requests) > MAX_REMEMBERED_REQUESTS:
            self._requests.popitem(last=False)
