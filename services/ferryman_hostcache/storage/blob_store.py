"""The interface of a storage medium: blobs by name, each there as a whole or not at all.

All other code (extents, seals, leases, eviction, threads) knows blobs only. So a new medium, such
as an object store, is one class that implements `BlobStore` and passes its tests.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ferryman.tiers.extents import ALIGNMENT, ExtentTable, aligned
from ferryman.tiers.storage_values import BlobPart, BlobRange, BlobStatistics


class BlobReader(Protocol):
    """Blobs that may belong to another process. Blocking; for threads, several at once."""

    def read(self, name: str, begin: int, into: memoryview) -> int:
        """Reads bytes from `begin` on and returns how many; fewer than `into` holds only at the
        blob's end.

        Any range is allowed; the aligned ranges of `AlignedBuffer.read` may be faster. Raises
        OSError, ENOENT if there is no such blob. A part of `into` may be written although this
        fails.
        """


class BlobStore(BlobReader, Protocol):
    """Blobs that stay after this process ends, and that it owns until `close`.

    Blocking; for threads: several may read while one puts, punches or deletes. Every failure is an
    OSError, whose errno is reported to the operator. The caller makes the names: ASCII letters,
    digits and dots, at most 64. Unfinished blobs of a former owner are not visible.
    """

    @property
    def place(self) -> str:
        """The place of the blobs, for logs."""

    @property
    def term(self) -> int:
        """The number of this ownership, above all former ones, if other nodes can read the blobs; 0
        if they cannot."""

    def put(self, name: str, num_bytes: int, parts: Sequence[BlobPart]) -> None:
        """Writes a blob of `num_bytes`, at least one: the parts, and zeros between them.

        The blob is visible as a whole or not at all, even if this process is killed. When this
        returns it survives a power cut, and each part was read back and has its digest: EBADMSG if
        not. A blob with the same name is replaced; if the call fails it may be gone.
        """

    def punch(self, name: str, ranges: Sequence[BlobRange]) -> None:
        """Writes zeros to ranges of a blob, in the order given; durable soon, but not at once.

        A range of whole blocks of ALIGNMENT bytes frees their room. A medium without holes writes
        the blob anew. An unknown name is fine.
        """

    def delete(self, name: str) -> None:
        """Removes the blob; an unknown name is fine."""

    def scan(self) -> Mapping[str, int]:
        """All blobs and their lengths, holes included, from any owner."""

    def statistics(self) -> BlobStatistics:
        """The number and size of the blobs."""

    def extent_table(self) -> ExtentTable:
        """An empty table, which charges extents as this medium does. If a former owner that only
        seemed dead may still write, the table's numbers are above that owner's."""

    def close(self) -> None:
        """Releases the ownership: another process may own the blobs now. No other call is allowed
        afterwards."""


class AlignedBuffer:
    """Page-aligned memory that grows with its reads. For one thread."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, ALIGNMENT)

    def read(
        self, read: Callable[[int, memoryview], int], begin: int, num_bytes: int
    ) -> memoryview:
        """Reads a range with `read`, shorter at the end; valid until the next call. Raises OSError.

        `read` gets whole blocks, because only those can bypass the page cache.
        """
        start = begin - begin % ALIGNMENT
        room = self._first(aligned(begin + num_bytes - start))
        count = read(start, room)
        return room[:count][begin - start :][:num_bytes]

    def _first(self, num_bytes: int) -> memoryview:
        """Memory of this size; its old contents are lost."""
        if len(self._map) < num_bytes:
            self._map = mmap.mmap(-1, aligned(num_bytes))
        return memoryview(self._map)[:num_bytes]
