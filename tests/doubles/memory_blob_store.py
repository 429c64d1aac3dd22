"""Blobs in memory, for tests, with the checks and the failures of a disk.

Operations may fail, lack room or be slow. A write is never torn: no medium may tear one.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock

import xxhash

from ferryman.errors import ConfigError
from ferryman.tiers.extents import ALIGNMENT, ExtentTable, aligned
from ferryman.tiers.storage_values import BlobPart, BlobRange, BlobStatistics

WAIT_SECONDS = 60.0


@dataclass
class MemoryBlob:
    """A blob's bytes, and the blocks of it that take no room."""

    content: bytearray
    holes: set[int] = field(default_factory=set)

    def punch(self, begin: int, num_bytes: int) -> None:
        end = min(begin + num_bytes, aligned(len(self.content)))
        self.holes.update(range(aligned(begin) // ALIGNMENT, end // ALIGNMENT))
        for index in range(begin, min(end, len(self.content))):
            self.content[index] = 0

    @property
    def used_bytes(self) -> int:
        return aligned(len(self.content)) - ALIGNMENT * len(self.holes)


@dataclass
class BlobMedium:
    """The part of a store in memory that outlives it, and its injected faults. `errors` are errnos
    by the name of the operation that fails; `num_failed` counts failures of each, lack of room
    included. Every operation waits until `is_quick` is set."""

    capacity_bytes: int = 1 << 40
    errors: dict[str, int] = field(default_factory=dict)
    is_quick: Event = field(default_factory=Event)
    num_failed: Counter[str] = field(default_factory=Counter)
    blobs: dict[str, MemoryBlob] = field(default_factory=dict)
    is_owned: bool = False

    def __post_init__(self) -> None:
        self.is_quick.set()

    @property
    def used_bytes(self) -> int:
        return sum(blob.used_bytes for blob in self.blobs.values())


class MemoryBlobStore:
    """A blob store over a medium that it owns until `close`."""

    def __init__(self, medium: BlobMedium) -> None:
        """Raises ConfigError when another store owns the medium."""
        if medium.is_owned:
            raise ConfigError("the medium belongs to another host-cache that runs")
        medium.is_owned = True
        self._medium, self._lock = medium, Lock()

    @property
    def term(self) -> int:
        return 0

    @property
    def place(self) -> str:
        return "memory"

    def close(self) -> None:
        self._medium.is_owned = False

    def put(self, name: str, num_bytes: int, parts: Sequence[BlobPart]) -> None:
        self._try("put")
        content = bytearray(num_bytes)
        for part in parts:
            content[part.offset : part.offset + len(part.memory)] = part.memory
        for part in parts:
            written = content[part.offset : part.offset + len(part.memory)]
            if xxhash.xxh3_128_digest(written) != part.digest:
                raise _error(errno.EBADMSG)
        with self._lock:
            # A disk holds the new file and the one it replaces together for a moment.
            if self._medium.used_bytes + aligned(num_bytes) > self._medium.capacity_bytes:
                raise self._failure("put", errno.ENOSPC)
            self._medium.blobs[name] = MemoryBlob(content)

    def read(self, name: str, begin: int, into: memoryview) -> int:
        self._try("read")
        with self._lock:
            if name not in self._medium.blobs:
                raise _error(errno.ENOENT)
            found = self._medium.blobs[name].content[begin : begin + len(into)]
        into[: len(found)] = found
        return len(found)

    def punch(self, name: str, ranges: Sequence[BlobRange]) -> None:
        self._try("punch")
        with self._lock:
            if blob := self._medium.blobs.get(name):
                for each in ranges:
                    blob.punch(*each)

    def delete(self, name: str) -> None:
        self._try("delete")
        with self._lock:
            self._medium.blobs.pop(name, None)

    def scan(self) -> Mapping[str, int]:
        self._try("scan")
        with self._lock:
            return {name: len(blob.content) for name, blob in self._medium.blobs.items()}

    def statistics(self) -> BlobStatistics:
        with self._lock:
            return BlobStatistics(len(self._medium.blobs), self._medium.used_bytes, 0)

    def extent_table(self) -> ExtentTable:
        return ExtentTable()

    def _try(self, operation: str) -> None:
        assert self._medium.is_owned, f"{operation} after close"
        if not self._medium.is_quick.wait(WAIT_SECONDS):
            raise self._failure(operation, errno.ETIMEDOUT)
        if number := self._medium.errors.get(operation):
            raise self._failure(operation, number)

    def _failure(self, operation: str, number: int) -> OSError:
        self._medium.num_failed[operation] += 1
        return _error(number)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
