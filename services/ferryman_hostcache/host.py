"""One node's host-cache at work: the store's decisions joined to arena, index and lifecycle log."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ConfigError, ManifestMismatch, Stale, WrongEpoch
from ferryman.runtime.logs import Tail
from ferryman.tiers.layout import split_arena
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
from ferryman_hostcache.workers import Workers

log = logging.getLogger(__name__)

MAX_REMEMBERED_REQUESTS = 8192


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
    ) -> None:
        self.identity, self.arena, self.limits = identity, arena, limits
        self._snapshot_share = snapshot_share
        self.workers = Workers(arena.is_alive)
        self._announcer, self._lifecycle, self._clock = announcer, lifecycle, clock
        self._stores: dict[str, HostStore] = {}  # by manifest digest: none or one
        self._requests: OrderedDict[str, CallTags] = OrderedDict()

    # Attaching.

    def attach(self, life: WorkerLife, manifest: StateManifest) -> int:
        """The index of the byte that this life is to lock. The first manifest is the arena's."""
        for store in self._stores.values():
            if store.manifest.digest != manifest.digest:
                raise ManifestMismatch(store.manifest.differences(manifest) or ("digest",))
        if not self._stores:
            self._stores[manifest.digest] = self._make_store(manifest)
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
            self._say(tags, "loaded", usable_pages=grant.usable_pages, **facts)
        return grant

    def reserve(self, ask: ReserveAsk, tags: CallTags) -> tuple[ReservedUnit, ...]:
        room = self.store.reserve(ask, self._clock())
        if room:
            self._remember(ask.lease_id, tags)
        self._tell(tags)
        return room

    def commit(self, lease_id: str, digests: Mapping[UnitName, bytes]) -> int:
        tags = self._requests.pop(lease_id, CallTags())
        try:
            stored = self.store.commit(lease_id, digests, self._clock())
        finally:
            self._tell(tags)
        if stored:
            self._say(tags, "stored", units=stored, reserved_units=len(digests))
        return stored

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
        self._tell(tags)
        self._say(tags, "corrupt", key=key.hex(), kind=kind.value, tier="host", dropped=dropped)

    # Time.

    def tick(self) -> None:
        """Ends what is over; frees what belonged to workers that are gone."""
        if not self._stores:
            return
        now = self._clock()
        self.store.expire(now)
        self._bury(self.workers.sweep(now))
        self._tell(CallTags())

    def _bury(self, lives: Iterable[WorkerLife]) -> None:
        for life in lives:
            log.info("worker gone %s", Tail(worker=life.worker_id, epoch=life.epoch))
            self.store.worker_gone(life)

    # Telling.

    def _tell(self, tags: CallTags) -> None:
        effects = self.store.drain_effects()
        self._announcer.tell(e for e in effects if not isinstance(e, EvictionRefused))
        for effect in effects:
            if isinstance(effect, EvictionRefused):
                facts = {"kind": effect.kind.value, "units": effect.num_slots}
                self._say(tags, "evicted_under_lease_refused", **facts)

    def _say(self, tags: CallTags, name: str, **facts: int | str) -> None:
        if tags.request_id:
            self._lifecycle.publish(
                tags.request_id, tags.attempt, name, traceparent=tags.traceparent, **facts
            )

    def _remember(self, lease_id: str, tags: CallTags) -> None:
        self._requests[lease_id] = tags
        while len(self._requests) > MAX_REMEMBERED_REQUESTS:
            self._requests.popitem(last=False)
