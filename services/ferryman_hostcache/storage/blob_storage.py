"""The storage tier over a blob store: decisions on the loop, I/O on threads of its own."""

from __future__ import annotations

import asyncio
import errno
import logging
from asyncio import Future
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import InvalidRequest, ManifestMismatch
from ferryman.runtime.logs import Tail
from ferryman.security.cluster_key import MacKey
from ferryman.settings.hostcache import StorageSettings
from ferryman.tiers.storage import StorageStore
from ferryman.tiers.storage_values import (
    NOTHING_STORED,
    ExtentPlan,
    FilesCorrupt,
    OfferedUnit,
    StorageFailed,
    StorageLimits,
    StorageStatistics,
    StorageSuspended,
    StoredGroup,
    TierEffect,
    UnitRead,
)
from ferryman.tiers.values import Residency, StoredUnit, UnitName, UnitStored
from ferryman_hostcache.storage.blob_store import BlobStore
from ferryman_hostcache.storage.extent import ExtentSeals
from ferryman_hostcache.storage.extent_reader import Run
from ferryman_hostcache.storage.scan import Scanned
from ferryman_hostcache.storage.threads import Outcome, ReaderThreads, WriterThread

log = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 5
MAX_STORES_WAITING = 64

# Failures of this process, which mean nothing about the unit.
OUR_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Breaker:
    """Opens after `limit` failures in a row, for `rest_seconds`; then one more failure opens it
    again."""

    def __init__(self, limit: int, rest_seconds: float) -> None:
        self.limit, self.rest_seconds = limit, rest_seconds
        self._in_a_row = 0
        self._until = float("-inf")

    def is_open(self, now: float) -> bool:
        return now < self._until

    def worked(self) -> None:
        self._in_a_row = 0

    def failed(self, now: float) -> bool:
        """Whether this failure opens the breaker."""
        self._in_a_row += 1
        if self._in_a_row < self.limit or self.is_open(now):
            return False
        self._until = now + self.rest_seconds
        return True


class BlobStorage:
    """Units of one model's state in storage, stored in whole groups. Used from the event loop only.

    Every method except `read` and `store` returns at once. Failures of the medium raise no error: a
    unit that cannot be read is a miss, one that cannot be written is not stored, and both are
    reported as effects.
    """

    def __init__(
        self,
        blobs: BlobStore,
        scanned: Scanned,
        prepared: StorageStore | None,
        settings: StorageSettings,
        key: MacKey,
        clock: Callable[[], float],
    ) -> None:
        self._blobs, self._scanned, self._key, self._clock = blobs, scanned, key, clock
        self._prepared = prepared  # the tier as it will be once a worker of this model attaches
        self._limits = limits_of(settings)
        self._breaker = Breaker(MAX_FAILURES_IN_A_ROW, settings.rest_seconds)
        self._readers = ReaderThreads(settings.max_reads, clock)
        self._writer = WriterThread(blobs, self._failed)
        self._store: StorageStore | None = None  # before the first worker has attached
        self._turn = asyncio.Lock()
        self._effects: list[TierEffect] = []
        if scanned.num_corrupt:
            self._effects.append(FilesCorrupt(scanned.num_corrupt))
        self._failures = self._waiting = self._written_bytes = 0
        self._written_seconds = 0.0

    @property
    def term(self) -> int:
        """The number of this ownership, above all former ones, if other nodes can read what is
        stored; 0 if they cannot."""
        return self._blobs.term

    def attach(self, manifest: StateManifest) -> None:
        """Makes the stored units of this model visible; before, every lookup misses. Raises
        ManifestMismatch when another model is attached already."""
        if self._store is not None:
            there = self._store.manifest
            if there.digest != manifest.digest:
                raise ManifestMismatch(there.differences(manifest) or ("digest",))
            return
        store = self._store = self._restored(manifest)
        self._scanned = replace(self._scanned, extents=())
        self._prepared = None
        self._writer.write_manifest(manifest)
        self._note(store)
        counts = store.statistics()
        tail = Tail(used=counts.used_bytes, foreign=counts.foreign_bytes)
        log.info("storage %s extents=%d %s", self._blobs.place, counts.num_extents, tail)

    def _restored(self, manifest: StateManifest) -> StorageStore:
        """Extents of another model are not read, so restoring is quick if the model has changed."""
        if self._prepared is not None and self._prepared.manifest.digest == manifest.digest:
            return self._prepared
        store = StorageStore(manifest, self._limits, self._blobs.extent_table())
        store.restore(self._scanned.extents, self._clock())
        return store

    def close(self) -> None:
        """Blocks until running I/O has ended, and all decided work on disk is done."""
        self._writer.close()
        self._readers.close()

    # Lookups.

    @property
    def _working(self) -> StorageStore | None:
        """The store, if a worker has attached and the breaker is closed."""
        return None if self._is_resting else self._store

    @property
    def _is_resting(self) -> bool:
        return self._breaker.is_open(self._clock())

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        """The units of a chain that are here; marks nothing as used."""
        store = self._working
        return store.lookup(keys) if store else Residency(0, {})

    def holdings(self) -> Iterator[UnitStored]:
        """Every unit here, in the order of insertion; units dropped during the iteration are left
        out."""
        return self._store.holdings() if self._store else iter(())

    def lease(
        self, lease_id: str, keys: Sequence[PageKey], names: Iterable[UnitName]
    ) -> tuple[StoredUnit, ...]:
        """Keeps the named units that are here from eviction, and returns them.

        The lease lasts until `release`, or until its end if it is not renewed. There is no lease
        when none of the units is here. Raises LeaseLost when `lease_id` exists, QueueFull when too
        many do.
        """
        store = self._working
        return store.lease(lease_id, keys, names, self._clock()) if store else ()

    def renew(self, lease_ids: Iterable[str]) -> tuple[str, ...]:
        """Prolongs leases; returns those that are gone."""
        return self._store.renew(lease_ids, self._clock()) if self._store else tuple(lease_ids)

    def release(self, lease_id: str) -> None:
        """Ends a lease: the reader no longer reads under this name. An unknown name is fine."""
        if self._store:
            self._store.release(lease_id)

    def tick(self) -> None:
        """Ends leases whose time is over."""
        if self._store:
            self._store.expire(self._clock())

    def flush(self) -> int:
        """Drops every unit without a reader; returns how many."""
        return self._give_up(StorageStore.flush)

    def drop(self, kind: Kind, key: PageKey) -> int:
        """Drops a unit and what stands on it; returns how many, 0 when it is not here."""
        return self._give_up(lambda store: store.drop(kind, key))

    def drop_chain(self, first: PageKey) -> int:
        """Drops the chains that begin with a page, also while they are written; returns how many
        units."""
        return self._give_up(lambda store: store.drop_chain(first))

    def _give_up(self, dropped_by: Callable[[StorageStore], int]) -> int:
        if self._store is None:
            return 0
        dropped = dropped_by(self._store)
        self._note(self._store)
        return dropped

    # Reading.

    async def read(self, reads: Sequence[UnitRead]) -> tuple[StoredUnit, ...]:
        """Reads bytes into memory; returns the units whose bytes are the ones stored. After its
        return or cancel no memory of `reads` is written."""
        store = self._working
        if store is None:
            return ()
        brought: list[StoredUnit] = []
        standing = [read for read in reads if store.stands(read.unit)]
        seals = self._seals(store)
        for run, outcome in await self._readers.read(self._blobs, standing, seals):
            brought += self._settle_read(store, run, outcome)
        self._note(store)
        return tuple(brought)

    def _settle_read(
        self, store: StorageStore, run: Run, outcome: Outcome
    ) -> tuple[StoredUnit, ...]:
        """Drops units that could not be read, or that differ from the ones written."""
        if isinstance(outcome, OSError):
            self._failed("read", outcome)
            if outcome.errno not in OUR_OWN:
                for read in run:
                    if store.stands(read.unit):
                        store.drop(read.unit.kind, read.unit.key)
            return ()
        self._breaker.worked()
        for unit, flaw in outcome.flawed:
            if store.drop_corrupt(unit, flaw):
                tail = Tail(kind=unit.kind, key=unit.key.hex(), flaw=flaw)
                log.error("corrupt unit in storage %s", tail)
        return outcome.brought

    # Writing.

    async def store(self, keys: Sequence[PageKey], units: Sequence[OfferedUnit]) -> StoredGroup:
        """Stores one group under a chain as a whole: visible when all of it is stored. One group at
        a time; the extent of a cancelled call is still finished and kept.

        Full pages continue those that are here, so offer all that `lookup` does not list. Raises
        InvalidRequest when a unit's size is not the one in the manifest.
        """
        if self._waiting >= MAX_STORES_WAITING:
            return StoredGroup(len(units), 0, 0)
        self._waiting += 1
        try:
            async with self._turn:
                store = self._working
                return await self._write(store, keys, units) if store else NOTHING_STORED
        finally:
            self._waiting -= 1

    async def _write(
        self, store: StorageStore, keys: Sequence[PageKey], units: Sequence[OfferedUnit]
    ) -> StoredGroup:
        _check(store.manifest, units)
        offered = {(unit.kind, unit.page_index): unit for unit in units}
        digests = {name: unit.digest for name, unit in offered.items()}
        plan = store.plan(keys, digests, self._clock())
        self._note(store)
        if plan is None:
            return NOTHING_STORED
        memories = [offered[unit.kind, unit.page_index].memory for unit in plan.units]
        writing = self._writer.write(plan, self._seals(store), memories)
        settled: Future[StoredGroup] = asyncio.get_running_loop().create_future()
        settle = partial(self._settle_write, store, plan, settled, self._clock())
        writing.add_done_callback(settle)
        return await asyncio.shield(settled)

    def _settle_write(
        self,
        store: StorageStore,
        plan: ExtentPlan,
        settled: Future[StoredGroup],
        began: float,
        writing: Future[None],
    ) -> None:
        """Ends the plan with a commit or an abort, also if no caller waits any more."""
        error = asyncio.CancelledError() if writing.cancelled() else writing.exception()
        if error is None:
            self._breaker.worked()
            num_stored = store.commit(plan.generation, self._clock())
            self._written_bytes += plan.file_bytes
            self._written_seconds += self._clock() - began
            settled.set_result(StoredGroup(plan.num_asked, num_stored, plan.file_bytes))
        else:
            store.abort(plan.generation)
            if isinstance(error, OSError):
                self._failed("store", error)
            elif not isinstance(error, asyncio.CancelledError):
                log.error("a bug while storing", exc_info=error)
            settled.set_result(StoredGroup(plan.num_asked, 0, 0))
        self._note(store)

    def _seals(self, store: StorageStore) -> ExtentSeals:
        return ExtentSeals(self._key, store.manifest.digest)

    # Reports.

    def _failed(self, operation: str, error: OSError) -> None:
        name = errno.errorcode.get(error.errno or 0, "UNKNOWN")
        self._failures += 1
        self._effects.append(StorageFailed(operation, name))
        log.warning("storage failed %s", Tail(operation=operation, error=name))
        if self._breaker.failed(self._clock()):
            rests = StorageSuspended(self._breaker.limit, self._breaker.rest_seconds)
            self._effects.append(rests)
            log.warning("storage rests %s", Tail(seconds=rests.seconds))

    def _note(self, store: StorageStore) -> None:
        """Adds the store's effects to this tier's own, in order, and passes on its work on disk."""
        self._effects += store.drain_effects()
        self._writer.do(store.drain_work())

    def statistics(self) -> StorageStatistics:
        nothing = StorageStatistics({}, capacity_bytes=self._limits.capacity_bytes)
        return replace(
            self._store.statistics() if self._store else nothing,
            num_failures=self._failures,
            num_removed_at_start=self._scanned.num_unfinished + self._scanned.num_corrupt,
            num_in_flight=self._readers.num_in_flight,
            read_bytes=self._readers.read_bytes,
            read_seconds=self._readers.read_seconds,
            written_bytes=self._written_bytes,
            written_seconds=self._written_seconds,
            is_resting=self._is_resting,
        )

    def drain_effects(self) -> tuple[TierEffect, ...]:
        """The effects since the last call, in order."""
        effects, self._effects = tuple(self._effects), []
        return effects


def limits_of(settings: StorageSettings) -> StorageLimits:
    return StorageLimits(settings.capacity_bytes, settings.lease_seconds)


def _check(manifest: StateManifest, units: Iterable[OfferedUnit]) -> None:
    for unit in units:
        expected = manifest.layout(unit.kind).slot_bytes
        if unit.memory.nbytes != expected:
            raise InvalidRequest(f"a {unit.kind} unit has {expected} bytes", "units")
