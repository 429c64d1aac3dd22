"""Opens a storage tier: over a folder, an object store, any other blob store, or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ConfigError
from ferryman.security.cluster_key import MacKey
from ferryman.settings.hostcache import StorageSettings
from ferryman.tiers.storage_values import (
    NOTHING_STORED,
    OfferedUnit,
    StorageStatistics,
    StoredGroup,
    TierEffect,
    UnitRead,
)
from ferryman.tiers.values import Residency, StoredUnit, UnitName, UnitStored
from ferryman_hostcache.storage.blob_storage import BlobStorage, limits_of
from ferryman_hostcache.storage.blob_store import BlobReader, BlobStore
from ferryman_hostcache.storage.file_blob_store import FileBlobStore
from ferryman_hostcache.storage.scan import read_manifest, scan
from ferryman_hostcache.storage.write_breaks import NO_BREAKS, WriteBreaks


class NoStorage:
    """The calls of a `BlobStorage` where there is none: every lookup is empty."""

    @property
    def term(self) -> int:
        return 0

    def attach(self, manifest: StateManifest) -> None:
        """Makes no unit visible: there is none."""

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        return Residency(0, {})

    def holdings(self) -> Iterator[UnitStored]:
        return iter(())

    def lease(
        self, lease_id: str, keys: Sequence[PageKey], names: Iterable[UnitName]
    ) -> tuple[StoredUnit, ...]:
        return ()

    def renew(self, lease_ids: Iterable[str]) -> tuple[str, ...]:
        return tuple(lease_ids)

    def release(self, lease_id: str) -> None:
        """There are no leases."""

    async def read(self, reads: Sequence[UnitRead]) -> tuple[StoredUnit, ...]:
        return ()

    async def store(self, keys: Sequence[PageKey], units: Sequence[OfferedUnit]) -> StoredGroup:
        return NOTHING_STORED

    def flush(self) -> int:
        return 0

    def drop(self, kind: Kind, key: PageKey) -> int:
        return 0

    def drop_chain(self, first: PageKey) -> int:
        return 0

    def tick(self) -> None:
        """There are no leases to end."""

    def statistics(self) -> StorageStatistics:
        return StorageStatistics({})

    def drain_effects(self) -> tuple[TierEffect, ...]:
        return ()


StorageTier = BlobStorage | NoStorage


@asynccontextmanager
async def open_storage(
    settings: StorageSettings,
    key: MacKey,
    *,
    clock: Callable[[], float],
    breaks: WriteBreaks = NO_BREAKS,
) -> AsyncIterator[StorageTier]:
    """A storage tier for the length of a block; units become visible with `attach`, except units
    that were not sealed with `key`. A folder is written with `breaks`; who made them
    ends them before the block ends, which waits for the file that is being written.

    Raises ConfigError when the place cannot be used or belongs to another process.
    """
    if not settings.folder:
        yield NoStorage()
        return
    blobs = await asyncio.to_thread(open_blobs, settings.folder, breaks)
    async with storage_over(blobs, settings, key, clock=clock) as storage:
        yield storage


def open_blobs(place: str, breaks: WriteBreaks = NO_BREAKS) -> BlobStore:
    """The blobs in a folder, given as a path or a `file:` URL, or under an `s3:` URL. Blocking.
    Raises ConfigError."""
    parts = urlsplit(place)
    if parts.scheme == "s3":
        return _open_objects(place)
    if parts.scheme == "file" and not parts.netloc:
        return FileBlobStore(Path(unquote(parts.path)), breaks)
    if "://" in place:
        raise ConfigError(f"storage {parts.scheme}://{parts.netloc}: no such kind of storage")
    return FileBlobStore(Path(place), breaks)


def _open_objects(url: str) -> BlobStore:
    blobs: BlobStore = _object_address().open_object_store(url)
    return blobs


def _object_address() -> ModuleType:
    try:
        return import_module("ferryman_hostcache.storage.object_address")
    except ModuleNotFoundError as error:
        raise ConfigError("object storage needs obstore: pip install 'ferryman[s3]'") from error


def bucket_of(place: str) -> tuple[str, str, str, str] | None:
    """The endpoint that its URL names, the bucket, the prefix of all nodes' folders there, and the
    name of this node's folder; None for a place that is not in a bucket. Raises ConfigError."""
    if urlsplit(place).scheme != "s3":
        return None
    parts: tuple[str, str, str, str] = _object_address().split_url(place)
    return parts


def readers_beside(url: str) -> Callable[[str], BlobReader]:
    """Readers of other nodes' folders next to the one at `url`, by name. Raises ConfigError."""
    readers: Callable[[str], BlobReader] = _object_address().folders_beside(url)
    return readers


@asynccontextmanager
async def storage_over(
    blobs: BlobStore, settings: StorageSettings, key: MacKey, *, clock: Callable[[], float]
) -> AsyncIterator[BlobStorage]:
    """A storage tier over any blob store, which it closes."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, blobs.close)
        scanned = await asyncio.to_thread(scan, blobs, key, settings.scan_seconds, clock)
        limits = limits_of(settings)
        prepared = await asyncio.to_thread(read_manifest, blobs, scanned, limits, clock())
        storage = BlobStorage(blobs, scanned, prepared, settings, key, clock)
        stack.push_async_callback(asyncio.to_thread, storage.close)
        yield storage
