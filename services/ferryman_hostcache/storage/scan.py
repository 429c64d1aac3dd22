"""Scans a blob store at start: finds whole extents by their headers, and removes other blobs.

The manifest of the last model is stored with them, so that the next process can restore its extents
before it serves. It is a hint only, because `attach` compares digests. Blocking; for threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import xxhash

from ferryman.cache.manifest import StateManifest, manifest_from_json
from ferryman.security.cluster_key import MacKey
from ferryman.tiers.extents import HEAD_BYTES
from ferryman.tiers.storage import StorageStore
from ferryman.tiers.storage_values import BlobPart, FoundExtent, StorageLimits
from ferryman_hostcache.storage.blob_store import AlignedBuffer, BlobReader, BlobStore
from ferryman_hostcache.storage.extent import (
    EXTENT_SUFFIX,
    BadExtent,
    ForeignExtent,
    extent_name,
    file_bytes_in,
    generation_of,
    header_from_bytes,
    header_length,
)

log = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
FIRST_BYTES = 16 << 10  # first read of a remote header; all of it for up to 145 pages
# the manifest digest of extents that were not read in time, or that another cluster wrote
NOT_LOOKED_AT = ""


@dataclass(frozen=True, slots=True)
class Scanned:
    """All extents of a blob store, and how many blobs were removed, because they were unfinished or
    corrupt."""

    extents: tuple[FoundExtent, ...]
    num_unfinished: int
    num_corrupt: int


def scan(blobs: BlobStore, key: MacKey, seconds: float, clock: Callable[[], float]) -> Scanned:
    """Reads headers only, newest first, for `seconds`. Extents that are not read, or that another
    cluster wrote, count as another model's: they stay until their room is needed."""
    end, extents, num_corrupt = clock() + seconds, [], 0
    sizes = {name: size for name, size in blobs.scan().items() if name.endswith(EXTENT_SUFFIX)}
    for name in sorted(sizes, reverse=True):
        try:
            size = sizes[name]
            unread = FoundExtent(generation_of(name), NOT_LOOKED_AT, (), (), 0, size, size)
            extents.append(unread if clock() >= end else _look(blobs, name, unread, key))
        except (BadExtent, OSError) as error:
            log.warning("removed %s of %s: %s", name, blobs.place, error)
            _remove(blobs, name)
            num_corrupt += 1
    return Scanned(tuple(extents), blobs.statistics().num_unfinished, num_corrupt)


def _look(blobs: BlobStore, name: str, unread: FoundExtent, key: MacKey) -> FoundExtent:
    try:
        header = _header(blobs, name)
        return header_from_bytes(
            header, key, generation=unread.generation, file_bytes=unread.num_bytes
        )
    except ForeignExtent as error:
        log.debug("left %s of %s alone: %s", name, blobs.place, error)
        return unread


def read_header(blobs: BlobReader, generation: int, key: MacKey, most: int) -> FoundExtent:
    """The extent of this generation, by a header of at most `most` bytes. Raises BadExtent, and
    OSError.

    A blob may be replaced between two reads by the same one with fewer living units: no seal
    covers the difference.
    """
    name = extent_name(generation)
    header = _range(blobs, name, 0, FIRST_BYTES)
    length = header_length(header)
    if length > most:
        raise BadExtent(f"a header of {length} bytes")
    if len(header) < length:
        header += _range(blobs, name, len(header), length - len(header))
    return header_from_bytes(header, key, generation=generation, file_bytes=file_bytes_in(header))


def _header(blobs: BlobStore, name: str) -> bytes:
    """Reads the head, then the rest, whose length is in the head. Neither read is aligned, so the
    page cache may serve both."""
    head = _range(blobs, name, 0, HEAD_BYTES)
    return head + _range(blobs, name, HEAD_BYTES, header_length(head) - HEAD_BYTES)


def _range(blobs: BlobReader, name: str, begin: int, num_bytes: int) -> bytes:
    into = bytearray(num_bytes)
    return bytes(into[: blobs.read(name, begin, memoryview(into))])


def _remove(blobs: BlobStore, name: str) -> None:
    with suppress(OSError):
        blobs.delete(name)


def write_manifest(blobs: BlobStore, manifest: StateManifest) -> None:
    """Stores the manifest for the next life. Raises OSError."""
    text = manifest.text.encode()
    part = BlobPart(0, memoryview(text), xxhash.xxh3_128_digest(text))
    blobs.put(MANIFEST_NAME, len(text), [part])


def read_manifest(
    blobs: BlobStore, scanned: Scanned, limits: StorageLimits, now: float
) -> StorageStore | None:
    """The store of the model whose manifest was kept; None if there is none."""
    read = partial(blobs.read, MANIFEST_NAME)
    try:
        text = AlignedBuffer().read(read, 0, MAX_MANIFEST_BYTES)
        manifest = manifest_from_json(bytes(text).decode())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    store = StorageStore(manifest, limits, blobs.extent_table())
    store.restore(scanned.extents, now)
    return store
