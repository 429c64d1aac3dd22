"""Blobs as objects under one prefix of an object store: one owner, each put whole or not at all.

An object store shows an object when all of its bytes have come, so the name needs no detour. It has
no holes: dropping a unit writes its object anew, and the room comes back with the whole object.
The high bits of an extent's generation are the term of the owner that wrote it. An object that
could not be removed is tried again before the next one is put: so all stay within the room.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence

import obstore
import xxhash
from obstore.store import ObjectStore

from ferryman.tiers.extents import ExtentTable, WholeExtentTable
from ferryman.tiers.storage_values import BlobPart, BlobRange, BlobStatistics
from ferryman_hostcache.storage.extent import BadExtent, generation_of
from ferryman_hostcache.storage.object_owner import OWNER_NAME, ObjectOwner
from ferryman_hostcache.storage.object_reader import REQUEST_BYTES, ObjectReader, os_errors

LISTED_AT_ONCE = 1000
MAX_OBJECTS = 200_000
TERM_SHIFT = 32


class ObjectBlobStore:
    """A `BlobStore` in an object store, under the prefix of `objects`."""

    def __init__(self, objects: ObjectStore, place: str, owner: ObjectOwner) -> None:
        """Takes the ownership. Raises ConfigError when it cannot, or another process has it."""
        self._objects, self._place, self._owner = objects, place, owner
        self._reader = ObjectReader(objects)
        self._unwanted: dict[str, None] = {}
        owner.take(self._last_term)

    def _last_term(self) -> int:
        return max((_term_of(name) for name, _ in self._blobs()), default=0)

    @property
    def place(self) -> str:
        return self._place

    @property
    def term(self) -> int:
        return self._owner.term

    def close(self) -> None:
        self._owner.give_back()

    # Writing.

    def put(self, name: str, num_bytes: int, parts: Sequence[BlobPart]) -> None:
        self._remove_unwanted()
        content, parts = memoryview(bytearray(num_bytes)), tuple(parts)
        for part in parts:
            content[part.offset : part.offset + len(part.memory)] = part.memory
        # An object is visible before it can be read back, so wrong bytes must not be put at all.
        _verify(_part_of(content, part) for part in parts)
        try:
            self._upload(name, content)
            _verify(self._read_back(name, parts))
            self._owner.check()  # if lost meanwhile, the object must not be announced
        except BaseException:
            self._give_up(name)
            raise

    def _upload(self, name: str, content: memoryview) -> None:
        self._owner.check()
        with os_errors():
            obstore.put(self._objects, name, content, chunk_size=REQUEST_BYTES)

    def _read_back(
        self, name: str, parts: Sequence[BlobPart]
    ) -> Iterator[tuple[memoryview, BlobPart]]:
        """The stored bytes of each part; a request for many small ones together."""
        for run in _runs(parts):
            begin = run[0].offset
            content = memoryview(bytearray(_end(run[-1]) - begin))
            content = content[: self.read(name, begin, content)]
            for part in run:
                yield content[part.offset - begin :][: len(part.memory)], part

    def _give_up(self, name: str) -> None:
        """Removes an object that was not put; the first failure is the one to report."""
        try:
            self.delete(name)
        except OSError:
            return

    # Reading.

    def read(self, name: str, begin: int, into: memoryview) -> int:
        return self._reader.read(name, begin, into)

    def scan(self) -> Mapping[str, int]:
        return dict(self._blobs())

    def statistics(self) -> BlobStatistics:
        sizes = [size for _, size in self._blobs()]
        return BlobStatistics(len(sizes), sum(sizes), 0)

    def _blobs(self) -> Iterator[tuple[str, int]]:
        """The names and lengths under the prefix, a page of the listing at a time."""
        num_seen = 0
        with os_errors():
            for page in obstore.list(self._objects, chunk_size=LISTED_AT_ONCE):
                num_seen += len(page)
                if num_seen > MAX_OBJECTS:
                    # Objects not listed would count as no room, and their numbers would be reused.
                    raise OSError(errno.EFBIG, f"more than {MAX_OBJECTS} objects")
                yield from (
                    (entry["path"], entry["size"])
                    for entry in page
                    if entry["path"] != OWNER_NAME and "/" not in entry["path"]
                )

    def extent_table(self) -> ExtentTable:
        return WholeExtentTable(self._owner.term << TERM_SHIFT)

    # Dropping.

    def punch(self, name: str, ranges: Sequence[BlobRange]) -> None:
        try:
            content = self._whole(name)
        except FileNotFoundError:
            return
        for begin, num_bytes in ranges:
            hole = content[begin : begin + num_bytes]
            hole[:] = bytes(len(hole))
        self._upload(name, content)

    def _whole(self, name: str) -> memoryview:
        with os_errors():
            size = obstore.head(self._objects, name)["size"]
        content = memoryview(bytearray(size))
        if self.read(name, 0, content) < size:
            raise OSError(errno.EIO, "the object became shorter while it was read")
        return content

    def delete(self, name: str) -> None:
        self._unwanted[name] = None
        self._owner.check()
        try:
            with os_errors():
                obstore.delete(self._objects, name)
        except FileNotFoundError:
            pass
        del self._unwanted[name]

    def _remove_unwanted(self) -> None:
        """Removes the objects that could not be removed before. Raises OSError."""
        for name in tuple(self._unwanted):
            self.delete(name)


def _term_of(name: str) -> int:
    """The term in an extent's generation; 0 for another object."""
    try:
        return generation_of(name) >> TERM_SHIFT
    except BadExtent:
        return 0


def _runs(parts: Sequence[BlobPart]) -> Iterator[Sequence[BlobPart]]:
    """Parts in the order of their offsets, each run within one request or one part long."""
    run: list[BlobPart] = []
    for part in sorted(parts, key=lambda part: part.offset):
        if run and _end(part) - run[0].offset > REQUEST_BYTES:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _end(part: BlobPart) -> int:
    return part.offset + len(part.memory)


def _part_of(content: memoryview, part: BlobPart) -> tuple[memoryview, BlobPart]:
    """The bytes of one part of a blob, with that part."""
    return content[part.offset : part.offset + len(part.memory)], part


def _verify(contents: Iterator[tuple[memoryview, BlobPart]]) -> None:
    """Raises EBADMSG unless every part has its digest."""
    for memory, part in contents:
        if xxhash.xxh3_128_digest(memory) != part.digest:
            raise OSError(errno.EBADMSG, "what was written does not read the same")
