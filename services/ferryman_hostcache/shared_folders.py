"""Reads objects that other nodes of the cluster stored in the same bucket; owns none of them.

    index: which extent of which folder ──> header, sealed ──> bytes of units, each with its digest

An owner evicts without regard to readers. So a unit that is gone, cut short, zeroed or another
model's is a miss: it is removed from the table of headers and, because the index named it, from the
index. That is no failure of the medium and is not reported as corruption. A bucket that refuses or
does not answer is left alone for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.units import Tier
from ferryman.errors import InvalidRequest
from ferryman.security.cluster_key import ClusterKey, MacKey, Purpose
from ferryman.settings.hostcache import StorageSettings
from ferryman.tiers.folder_table import ExtentName, UnitPlace
from ferryman.tiers.storage_values import UnitRead
from ferryman.tiers.unit_group import by_kind
from ferryman.tiers.values import StoredUnit, UnitName
from ferryman.tiers.write_policy import UnitKey
from ferryman.wire.redis.bucket_folders import BucketFolder, folders_beside
from ferryman.wire.redis.index import NodeLife, NodePrefix, PrefixIndex
from ferryman_hostcache.folder_headers import BucketHealth, FolderHeaders
from ferryman_hostcache.storage.blob_store import BlobReader
from ferryman_hostcache.storage.extent import ExtentSeals
from ferryman_hostcache.storage.factory import bucket_of, readers_beside
from ferryman_hostcache.storage.threads import ReaderThreads

log = logging.getLogger(__name__)

MAX_FOLDERS, MAX_UNITS = 2, 8192  # asked, and looked up in each, for one prompt


@dataclass(frozen=True, slots=True)
class SharedStatistics:
    """Counts since the start. `num_gone` units were announced and are no longer there;
    `num_refused` headers were not sealed by this cluster for their place; failures are the
    bucket's. `num_entries` of extents and units are known by their headers."""

    num_entries: int = 0
    num_headers: int = 0
    num_units: int = 0
    num_bytes: int = 0
    num_gone: int = 0
    num_refused: int = 0
    num_failures: int = 0
    is_resting: bool = False


@dataclass(frozen=True, slots=True)
class FolderView:
    """Units of a chain that a folder holds, by their headers. `root` is the chain's first key."""

    folder: NodeLife
    root: PageKey
    units: Mapping[UnitName, StoredUnit]

    @property
    def name(self) -> str:
        """The folder's name in the bucket."""
        return self.folder.folder

    @property
    def pages(self) -> Mapping[Kind, Sequence[int]]:
        return by_kind(self.units)


class SharedFolders:
    """The other nodes' folders in the bucket of `folder`, this node's. For the event loop only.
    `reader_of` gives the reader of a folder by its name."""

    def __init__(
        self,
        folder: BucketFolder,
        reader_of: Callable[[str], BlobReader],
        index: PrefixIndex,
        key: MacKey,
        settings: StorageSettings,
        clock: Callable[[], float],
    ) -> None:
        self.own, self._reader_of, self._index, self._key = folder, reader_of, index, key
        self._threads = ReaderThreads(settings.max_reads, clock)
        self._health = BucketHealth(settings.rest_seconds, clock)
        self._headers = self._headers_of("")  # of no model, before the first lookup
        self._units = self._bytes = self._gone = 0

    def _headers_of(self, manifest_digest: str) -> FolderHeaders:
        return FolderHeaders(
            manifest_digest, self._reader_of, self._key, self._threads, self._health
        )

    def close(self) -> None:
        """Blocks until running reads have ended."""
        self._threads.close()

    # Lookups.

    def better(self, prefixes: Iterable[NodePrefix], have: int) -> list[NodeLife]:
        """The folders that have more than `have` pages of a chain, the best first."""
        if self._health.is_resting:
            return []
        beside = folders_beside(self.own.node_id, prefixes)
        return [prefix.node for prefix in beside if prefix.usable_pages > have][:MAX_FOLDERS]

    async def lookup(
        self, folder: NodeLife, keys: Sequence[PageKey], manifest: StateManifest
    ) -> FolderView:
        """The units of a chain that are in a folder, as far as their headers come in time."""
        if self._headers.manifest_digest != manifest.digest:
            self._headers = self._headers_of(manifest.digest)
        wanted = [(kind, key) for key in keys for kind in manifest.kinds][:MAX_UNITS]
        indexed = await self._index.stored_units(folder, keys[0], wanted)
        places: dict[UnitKey, UnitPlace] = {
            unit: (ExtentName(folder.folder, indexed[unit].generation), *unit)
            for unit in wanted
            if unit in indexed
        }
        headers = await self._headers.read(places.values())
        units = self._found(places.values(), keys)
        # An extent whose header was not read may hold the unit that the index names.
        gone = [unit for unit, at in places.items() if unit not in headers.get(at[0], (unit,))]
        await self._report(folder, keys[0], gone)
        return FolderView(folder, keys[0], units)

    def _found(
        self, places: Iterable[UnitPlace], keys: Sequence[PageKey]
    ) -> dict[UnitName, StoredUnit]:
        """The units whose headers confirm the place in the index. The index only names places to
        look; the headers decide."""
        pages = {key: page for page, key in enumerate(keys)}
        units = (self._headers.unit(*place) for place in places)
        return {
            (unit.kind, unit.page_index): unit
            for unit in units
            if unit and pages[unit.key] == unit.page_index
        }

    # Reading.

    async def read(self, view: FolderView, reads: Sequence[UnitRead]) -> tuple[StoredUnit, ...]:
        """Returns the units whose bytes are the ones stored. When this returns or is cancelled, no
        memory of `reads` is written any more."""
        if self._health.is_resting:
            return ()
        brought: list[StoredUnit] = []
        gone: list[StoredUnit] = []
        seals = ExtentSeals(self._key, self._headers.manifest_digest)
        for run, outcome in await self._threads.read(self._reader_of(view.name), reads, seals):
            if isinstance(outcome, FileNotFoundError):
                gone += [read.unit for read in run]
                self._headers.forget(ExtentName(view.name, run[0].unit.generation))
            elif isinstance(outcome, OSError):
                self._health.failed(outcome)
            else:
                self._health.worked()
                brought += outcome.brought
                gone += [unit for unit, _ in outcome.flawed]
        for unit in gone:
            self._headers.drop(ExtentName(view.name, unit.generation), unit)
        self._units += len(brought)
        self._bytes += sum(unit.num_bytes for unit in brought)
        await self._report(view.folder, view.root, [(unit.kind, unit.key) for unit in gone])
        return tuple(brought)

    async def _report(self, folder: NodeLife, root: PageKey, gone: Sequence[UnitKey]) -> None:
        """Removes units that are not there from the index. An owner that still has one announces it
        again, within some hours."""
        if gone:
            self._gone += len(gone)
            await self._index.forget(folder, root, Tier.STORAGE, gone)

    def statistics(self) -> SharedStatistics:
        return SharedStatistics(
            num_entries=self._headers.num_entries,
            num_headers=self._headers.num_read,
            num_units=self._units,
            num_bytes=self._bytes,
            num_gone=self._gone,
            num_refused=self._headers.num_refused,
            num_failures=self._health.num_failures,
            is_resting=self._health.is_resting,
        )


@asynccontextmanager
async def open_shared_folders(
    settings: StorageSettings, key: ClusterKey, index: PrefixIndex
) -> AsyncIterator[SharedFolders | None]:
    """Other nodes' folders next to this node's, for the length of a block; None if its storage is
    not in a bucket, or its folder has a name that no host has. Raises ConfigError."""
    folder = _own_folder(settings.folder, key)
    if folder is None:
        yield None
        return
    stored = key.subkey(Purpose.STORED_UNIT)
    readers = readers_beside(settings.folder)
    folders = SharedFolders(folder, readers, index, stored, settings, time.monotonic)
    try:
        yield folders
    finally:
        await asyncio.to_thread(folders.close)


def _own_folder(url: str, key: ClusterKey) -> BucketFolder | None:
    if (place := bucket_of(url)) is None:
        return None
    *bucket, name = place
    tag = key.subkey(Purpose.BUCKET).tag(*(part.encode() for part in bucket)).hex()
    try:
        return BucketFolder(tag[:16], name)
    except InvalidRequest as error:
        log.warning("other nodes cannot read this node's objects: %s", error)
        return None
