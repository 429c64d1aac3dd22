"""Headers of extents in other nodes' folders, read once and kept, and the health of the bucket.

A header is sealed with the cluster's key. Place, size and digest of a unit come from it alone.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from asyncio import Future
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.runtime.logs import Tail
from ferryman.security.cluster_key import MacKey
from ferryman.tiers.folder_table import ExtentName, FolderTable, UnitPlace
from ferryman.tiers.storage_values import FoundExtent
from ferryman.tiers.values import StoredUnit
from ferryman_hostcache.storage.blob_storage import MAX_FAILURES_IN_A_ROW, Breaker
from ferryman_hostcache.storage.blob_store import BlobReader
from ferryman_hostcache.storage.extent import BadExtent
from ferryman_hostcache.storage.scan import read_header
from ferryman_hostcache.storage.threads import ReaderThreads

log = logging.getLogger(__name__)

MAX_HEADERS = 64  # read for one prompt; the others stay unknown
MAX_HEADER_BYTES = 1 << 20
MAX_ENTRIES = 1 << 16  # extents and units together whose headers are known
LOOKUP_SECONDS = 1.0  # for the headers of one prompt; those that come later serve the next one


class BucketHealth:
    """Whether a bucket answers. After failures in a row it is left alone for a while."""

    def __init__(self, rest_seconds: float, clock: Callable[[], float]) -> None:
        self._breaker, self._clock = Breaker(MAX_FAILURES_IN_A_ROW, rest_seconds), clock
        self.num_failures = 0

    @property
    def is_resting(self) -> bool:
        return self._breaker.is_open(self._clock())

    def worked(self) -> None:
        self._breaker.worked()

    def failed(self, error: OSError) -> None:
        self.num_failures += 1
        name = errno.errorcode.get(error.errno or 0, "UNKNOWN")
        log.warning("cannot read other nodes' objects %s", Tail(error=name))
        if self._breaker.failed(self._clock()):
            tail = Tail(seconds=self._breaker.rest_seconds)
            log.warning("other nodes' objects are left alone %s", tail)


class FolderHeaders:
    """The headers of one model's extents. `reader_of` gives the reader of a folder by its name."""

    def __init__(
        self,
        manifest_digest: str,
        reader_of: Callable[[str], BlobReader],
        key: MacKey,
        threads: ReaderThreads,
        health: BucketHealth,
    ) -> None:
        self.manifest_digest = manifest_digest
        self._table = FolderTable(manifest_digest, MAX_ENTRIES)
        self._reader_of, self._key = reader_of, key
        self._threads, self._health = threads, health
        self._under_way: dict[ExtentName, Future[FoundExtent]] = {}
        self.num_read = self.num_refused = 0

    @property
    def num_entries(self) -> int:
        return self._table.num_entries

    def unit(self, name: ExtentName, kind: Kind, key: PageKey) -> StoredUnit | None:
        return self._table.unit(name, kind, key)

    def drop(self, name: ExtentName, unit: StoredUnit) -> None:
        """Forgets a unit that was not at the place in its header."""
        self._table.drop(name, unit)

    def forget(self, name: ExtentName) -> None:
        """Forgets an extent that is gone: the next lookup checks it, and reports all its units."""
        self._table.remove(name)

    async def read(
        self, places: Iterable[UnitPlace]
    ) -> Mapping[ExtentName, Set[tuple[Kind, PageKey]]]:
        """Reads unknown headers of `places` within LOOKUP_SECONDS. Returns the units of each extent
        that was read, none for one that is not there; other units are not in these extents."""
        lacking = self._table.lacking(places, MAX_HEADERS)
        if not lacking or self._health.is_resting:
            return {}
        reading = {self._under_way.get(name) or self._start(name): name for name in lacking}
        done, _ = await asyncio.wait(reading, timeout=LOOKUP_SECONDS)
        listed = ((reading[future], self._shown(future)) for future in done)
        return {name: units for name, units in listed if units is not None}

    def _shown(self, future: Future[FoundExtent]) -> Set[tuple[Kind, PageKey]] | None:
        """The units in a header; None if the bucket did not answer."""
        if future.cancelled():
            return None
        match future.exception():
            case None:
                extent = future.result()
                is_ours = extent.manifest_digest == self.manifest_digest
                return {(unit.kind, unit.key) for unit in extent.units if is_ours}
            case BadExtent() | FileNotFoundError():
                return frozenset()
        return None

    def _start(self, name: ExtentName) -> Future[FoundExtent]:
        blobs = self._reader_of(name.folder)
        job = partial(read_header, blobs, name.generation, self._key, MAX_HEADER_BYTES)
        future = self._under_way[name] = self._threads.submit(job)
        # A future's first callbacks run before those that wait for it go on.
        future.add_done_callback(partial(self._on_header, name))
        return future

    def _on_header(self, name: ExtentName, future: Future[FoundExtent]) -> None:
        del self._under_way[name]
        if future.cancelled():
            return
        match future.exception():
            case None:
                self._health.worked()
                self.num_read += 1
                self._table.add(name, future.result())
            case BadExtent() as error:
                self.num_refused += 1
                self._table.remove(name)
                log.warning("no header of ours %s: %s", Tail(folder=name.folder), error)
            case FileNotFoundError():
                self._table.remove(name)
            case OSError() as error:
                self._health.failed(error)
            case error:
                log.error("a bug while reading a header", exc_info=error)
