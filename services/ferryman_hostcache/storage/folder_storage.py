"""The storage tier over a folder: decisions on the loop, I/O on threads of its own."""

from __future__ import annotations

import asyncio
import errno
import logging
from asyncio import Future
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import InvalidRequest, ManifestMismatch
from ferryman.runtime.logs import Tail
from ferryman.tiers.storage import StorageStore
from ferryman.tiers.storage_values import (
    NOTHING_STORED,
    ExtentPlan,
    FilesCorrupt,
    StorageEffect,
    StorageFailed,
    StorageLimits,
    StorageRests,
    StorageStatistics,
    StorageUnit,
    StoredGroup,
)
from ferryman.tiers.values import Residency, UnitName, UnitStored
from ferryman_hostcache.storage.breaker import Breaker
from ferryman_hostcache.storage.folder import Folder
from ferryman_hostcache.storage.reading import Run
from ferryman_hostcache.storage.scan import Scanned
from ferryman_hostcache.storage.settings import StorageSettings
from ferryman_hostcache.storage.threads import Outcome, Readers, Writer
from ferryman_hostcache.storage.tier import OfferedUnit, UnitRead

log = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 5
MAX_STORES_WAITING = 64

# Failures of this process, which say nothing about the unit.
OUR_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Storage:
    """A `StorageTier`. Touched from the event loop only."""

    def __init__(
        self,
        folder: Folder,
        scanned: Scanned,
        prepared: Mapping[str, StorageStore],
        settings: StorageSettings,
        clock: Callable[[], float],
    ) -> None:
        self._folder, self._scanned, self._clock = folder, scanned, clock
        self._prepared = dict(prepared)  # by manifest digest: what is there once it attaches
        self._limits = limits_of(settings)
        self._breaker = Breaker(MAX_FAILURES_IN_A_ROW, settings.rest_seconds)
        self._readers = Readers(folder, settings.max_reads, clock)
        self._writer = Writer(folder, self._failed)
        self._stores: dict[str, StorageStore] = {}  # by manifest digest: none or one
        self._turn = asyncio.Lock()
        self._effects: list[StorageEffect] = []
        if scanned.num_corrupt:
            self._effects.append(FilesCorrupt(scanned.num_corrupt))
        self._failures = self._waiting = self._written_bytes = 0
        self._written_seconds = 0.0

    def attach(self, manifest: StateManifest) -> None:
        """Raises ManifestMismatch when another model's state is kept already."""
        for store in self._stores.values():
            if store.manifest.digest != manifest.digest:
                raise ManifestMismatch(store.manifest.differences(manifest) or ("digest",))
            return
        store = self._stores[manifest.digest] = self._restored(manifest)
        self._scanned = replace(self._scanned, extents=())
        self._prepared.clear()
        self._writer.remember(manifest)
        self._note(store)
        counts = store.statistics()
        tail = Tail(used=counts.used_bytes, foreign=counts.foreign_bytes)
        log.info("storage %s extents=%d %s", self._folder.path, counts.num_extents, tail)

    def _restored(self, manifest: StateManifest) -> StorageStore:
        """Where another model was here before, little is to be done: its extents are not read."""
        if store := self._prepared.get(manifest.digest):
            return store
        store = StorageStore(manifest, self._limits)
        store.restore(self._scanned.extents, self._clock())
        return store

    def close(self) -> None:
        """Blocks until the I/O under way has ended, and all that was decided is done."""
        self._writer.close()
        self._readers.close()
        self._folder.close()

    # Asking.

    def _working(self) -> Iterator[StorageStore]:
        """The store, if a worker has attached and the folder is not left alone."""
        if not self._is_resting:
            yield from self._stores.values()

    @property
    def _is_resting(self) -> bool:
        return self._breaker.is_open(self._clock())

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        for store in self._working():
            return store.lookup(keys)
        return Residency(0, {})

    def holdings(self) -> Iterator[UnitStored]:
        for store in self._stores.values():
            yield from store.holdings()

    def lease(
        self, lease_id: str, keys: Sequence[PageKey], names: Iterable[UnitName]
    ) -> tuple[StorageUnit, ...]:
        for store in self._working():
            return store.lease(lease_id, keys, names, self._clock())
        return ()

    def renew(self, lease_ids: Iterable[str]) -> tuple[str, ...]:
        for store in self._stores.values():
            return store.renew(lease_ids, self._clock())
        return tuple(lease_ids)

    def release(self, lease_id: str) -> None:
        for store in self._stores.values():
            store.release(lease_id)

    def tick(self) -> None:
        for store in self._stores.values():
            store.expire(self._clock())

    def flush(self) -> int:
        dropped = 0
        for store in self._stores.values():
            dropped += store.flush()
            self._note(store)
        return dropped

    def drop(self, kind: Kind, key: PageKey) -> int:
        dropped = 0
        for store in self._stores.values():
            dropped += store.drop(kind, key)
            self._note(store)
        return dropped

    # Reading.

    async def read(self, reads: Sequence[UnitRead]) -> tuple[StorageUnit, ...]:
        """When this returns or is cancelled, no memory of `reads` is written any more."""
        brought: list[StorageUnit] = []
        for store in self._working():
            standing = [read for read in reads if store.stands(read.unit)]
            for run, outcome in await self._readers.read(standing, store.manifest.digest):
                brought += self._settle_read(store, run, outcome)
            self._note(store)
        return tuple(brought)

    def _settle_read(
        self, store: StorageStore, run: Run, outcome: Outcome
    ) -> tuple[StorageUnit, ...]:
        """What could not be read, or reads otherwise than it was written, is given up."""
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
        """One at a time; a cancelled call's extent is finished and kept all the same."""
        if self._waiting >= MAX_STORES_WAITING:
            return StoredGroup(len(units), 0, 0)
        self._waiting += 1
        try:
            async with self._turn:
                for store in self._working():
                    return await self._store(store, keys, units)
        finally:
            self._waiting -= 1
        return NOTHING_STORED

    async def _store(
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
        writing = self._writer.write(plan, store.manifest.digest, memories)
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
        """Whoever waits or not, the plan ends in a commit or an abort."""
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

    # Telling.

    def _failed(self, operation: str, error: OSError) -> None:
        name = errno.errorcode.get(error.errno or 0, "UNKNOWN")
        self._failures += 1
        self._effects.append(StorageFailed(operation, name))
        log.warning("storage failed %s", Tail(operation=operation, error=name))
        if self._breaker.failed(self._clock()):
            rests = StorageRests(self._breaker.limit, self._breaker.rest_seconds)
            self._effects.append(rests)
            log.warning("storage rests %s", Tail(seconds=rests.seconds))

    def _note(self, store: StorageStore) -> None:
        """Keeps effects in order with this shell's own, and hands over what is to be done."""
        self._effects += store.drain_effects()
        self._writer.do(store.drain_work())

    def statistics(self) -> StorageStatistics:
        counts = StorageStatistics({}, capacity_bytes=self._limits.capacity_bytes)
        for store in self._stores.values():
            counts = store.statistics()
        return replace(
            counts,
            num_failures=self._failures,
            num_removed_at_start=self._scanned.num_unfinished + self._scanned.num_corrupt,
            num_in_flight=self._readers.num_in_flight,
            read_bytes=self._readers.read_bytes,
            read_seconds=self._readers.read_seconds,
            written_bytes=self._written_bytes,
            written_seconds=self._written_seconds,
            is_resting=self._is_resting,
        )

    def drain_effects(self) -> tuple[StorageEffect, ...]:
        effects, self._effects = tuple(self._effects), []
        return effects


def limits_of(settings: StorageSettings) -> StorageLimits:
    return StorageLimits(settings.capacity_bytes, settings.lease_seconds)


def _check(manifest: StateManifest, units: Iterable[OfferedUnit]) -> None:
    for unit in units:
        expected = manifest.layout(unit.kind).slot_bytes
        if unit.memory.nbytes != expected:
            raise InvalidRequest(f"a {unit.kind} unit has {expected} bytes", "units")
