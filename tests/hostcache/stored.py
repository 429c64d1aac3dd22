"""Helpers of the storage tier's tests: prompts of random bytes, stored and read back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from tests.cluster_keys import STORED
from tests.doubles.memory_blob_store import BlobMedium, MemoryBlob, MemoryBlobStore
from tests.hostcache.ledger import settle_storage
from tests.hostcache.object_server import ObjectFaults

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.security.cluster_key import MacKey
from ferryman.settings.hostcache import StorageSettings
from ferryman.tiers.storage_values import OfferedUnit, UnitRead
from ferryman.tiers.values import UnitName
from ferryman_hostcache.storage.blob_store import BlobStore
from ferryman_hostcache.storage.extent import EXTENT_SUFFIX
from ferryman_hostcache.storage.factory import StorageTier, open_storage, storage_over
from ferryman_hostcache.storage.file_blob_store import FileBlobStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore


@dataclass(frozen=True)
class Bucket:
    """The address of a prefix of its own in an object store, and the faults of it."""

    url: str
    faults: ObjectFaults = field(default_factory=ObjectFaults)
    lease_seconds: float = 30.0


Place = Path | BlobMedium | Bucket  # where blobs outlive their store


@dataclass(frozen=True)
class StoredChain:
    """A chain and the bytes of its units."""

    keys: tuple[PageKey, ...]
    units: Mapping[UnitName, bytes]

    def offers(self) -> list[OfferedUnit]:
        return [
            OfferedUnit(kind, page, memoryview(data), xxhash.xxh3_128_digest(data))
            for (kind, page), data in self.units.items()
        ]


def prompt_with(
    manifest: StateManifest, keys: Sequence[PageKey], snapshots: Sequence[int] = ()
) -> StoredChain:
    """Every page of the chain, and recurrent states at the pages named. The bytes are made from
    the keys: the same unit has the same bytes whoever makes it."""
    names: list[UnitName] = []
    for kind in manifest.kinds:
        pages = snapshots if kind is Kind.RECURRENT else range(len(keys))
        names += [(kind, page) for page in pages]
    units = {(kind, page): bytes_of(manifest, kind, keys[page]) for kind, page in names}
    return StoredChain(tuple(keys), units)


def bytes_of(manifest: StateManifest, kind: Kind, key: PageKey) -> bytes:
    return random.Random(kind.encode() + key).randbytes(manifest.layout(kind).slot_bytes)


@asynccontextmanager
async def opened(
    place: Place,
    *,
    clock: Callable[[], float] = time.monotonic,
    key: MacKey = STORED,
    **settings: float,
) -> AsyncIterator[StorageTier]:
    """A storage tier that has nothing under way at the end."""
    async with _opened(place, clock, key, settings) as storage:
        yield storage
        await settle_storage(storage)


def _opened(
    place: Place, clock: Callable[[], float], key: MacKey, settings: Mapping[str, float]
) -> AbstractAsyncContextManager[StorageTier]:
    if isinstance(place, BlobMedium):
        chosen = StorageSettings.model_validate(settings)
        return storage_over(MemoryBlobStore(place), chosen, key, clock=clock)
    if isinstance(place, Bucket):
        chosen = StorageSettings.model_validate(settings)
        return _over_objects(place, chosen, key, clock)
    folder = str(place) if place.name else ""
    return open_storage(
        StorageSettings.model_validate({"folder": folder, **settings}), key, clock=clock
    )


@asynccontextmanager
async def _over_objects(
    place: Bucket, settings: StorageSettings, key: MacKey, clock: Callable[[], float]
) -> AsyncIterator[StorageTier]:
    blobs = await asyncio.to_thread(blobs_at, place)
    async with storage_over(blobs, settings, key, clock=clock) as storage:
        yield storage


def blobs_at(place: Place) -> BlobStore:
    """The blob store below a storage tier, for tests of the blob store alone."""
    if isinstance(place, Bucket):
        from ferryman_hostcache.storage.object_blob_store import ObjectBlobStore
        from ferryman_hostcache.storage.object_owner import ObjectOwner

        objects = _client(place)
        owner = ObjectOwner(objects, "bucket", place.lease_seconds)
        return ObjectBlobStore(objects, "bucket", owner)
    return MemoryBlobStore(place) if isinstance(place, BlobMedium) else FileBlobStore(place)


def has_holes(place: Place) -> bool:
    """Whether a dropped unit's room comes back before its extent's."""
    return not isinstance(place, Bucket)


def extents_at(place: Place) -> list[str]:
    """The names of all extents, in order."""
    if isinstance(place, BlobMedium):
        return sorted(name for name in place.blobs if name.endswith(EXTENT_SUFFIX))
    if isinstance(place, Bucket):
        return sorted(name for name in _objects(place) if name.endswith(EXTENT_SUFFIX))
    return sorted(path.name for path in place.glob(f"*{EXTENT_SUFFIX}"))


def bytes_at(place: Place) -> int:
    """The bytes that all extents take, without their holes."""
    if isinstance(place, BlobMedium):
        return sum(place.blobs[name].used_bytes for name in extents_at(place))
    if isinstance(place, Bucket):
        sizes = _objects(place)
        return sum(sizes[name] for name in extents_at(place))
    return sum((place / name).stat().st_blocks * 512 for name in extents_at(place))


def _objects(place: Bucket) -> dict[str, int]:
    """The lengths of objects, seen past the owner."""
    import obstore

    return {each["path"]: each["size"] for each in obstore.list(_client(place)).collect()}


def _client(place: Bucket) -> ObjectStore:
    from ferryman_hostcache.storage.object_address import objects_at

    return objects_at(place.url)


def content_at(place: Place, name: str) -> bytearray | None:
    """The bytes of a blob, seen past its owner; None if it is gone."""
    try:
        if isinstance(place, BlobMedium):
            return bytearray(place.blobs[name].content)
        if isinstance(place, Bucket):
            import obstore

            return bytearray(obstore.get(_client(place), name).bytes())
        return bytearray((place / name).read_bytes())
    except (FileNotFoundError, KeyError):
        return None


def spoil_at(place: Place, name: str, content: bytes | bytearray) -> None:
    """Puts other bytes in the place of a blob's, past its owner."""
    if isinstance(place, BlobMedium):
        place.blobs[name] = MemoryBlob(bytearray(content))
    elif isinstance(place, Bucket):
        import obstore

        obstore.put(_client(place), name, bytes(content))
    else:
        (place / name).write_bytes(content)


def remove_at(place: Place, name: str) -> None:
    """Removes a blob past its owner."""
    if isinstance(place, BlobMedium):
        del place.blobs[name]
    elif isinstance(place, Bucket):
        import obstore

        obstore.delete(_client(place), name)
    else:
        (place / name).unlink()


async def read_all(
    storage: StorageTier,
    prompt: StoredChain,
    names: Sequence[UnitName] = (),
    *,
    reader: str = "reader",
) -> dict[UnitName, bytes]:
    """The bytes of a prompt's units that can be read back."""
    units = storage.lease(reader, prompt.keys, names or list(prompt.units))
    reads = [UnitRead(unit, memoryview(bytearray(unit.num_bytes))) for unit in units]
    try:
        brought = set(await storage.read(reads))
    finally:
        storage.release(reader)
    return {
        (read.unit.kind, read.unit.page_index): bytes(read.memory)
        for read in reads
        if read.unit in brought
    }
