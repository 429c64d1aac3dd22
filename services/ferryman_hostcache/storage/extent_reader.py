"""Reads runs of units: verifies them in a buffer first, so that wrong bytes never reach the memory.

Blocking; for threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from ferryman.tiers.extents import ENTRY_BYTES, aligned
from ferryman.tiers.storage_values import Flaw, UnitRead
from ferryman.tiers.values import StoredUnit
from ferryman_hostcache.storage.blob_store import AlignedBuffer, BlobReader
from ferryman_hostcache.storage.extent import (
    ExtentSeals,
    entry_offset,
    extent_name,
    flaw_of_entry,
)

RUN_BYTES = 8 << 20

Run = tuple[UnitRead, ...]


class PendingRead:
    """Records whether the reader still waits. Once `end` has returned, its memory is not written
    any more, even if the medium answers late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted = True

    def end(self) -> None:
        with self._lock:
            self._is_wanted = False

    def deliver(self, read: UnitRead, content: memoryview) -> bool:
        """Copies verified bytes to the reader's memory."""
        with self._lock:
            if self._is_wanted:
                np.copyto(_bytes_of(read.memory), _bytes_of(content))
            return self._is_wanted

    @property
    def is_over(self) -> bool:
        return not self._is_wanted


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a run: units read, and units with flaws."""

    brought: tuple[StoredUnit, ...]
    flawed: tuple[tuple[StoredUnit, Flaw], ...]
    num_bytes: int


def runs_of(reads: Sequence[UnitRead]) -> Iterator[Run]:
    """Runs of neighbours in one extent, each of at most RUN_BYTES or one unit."""
    run: list[UnitRead] = []
    for read in sorted(reads, key=lambda read: (read.unit.generation, read.unit.index)):
        if run and not _continues(run, read):
            yield tuple(run)
            run = []
        run.append(read)
    if run:
        yield tuple(run)


def _continues(run: Sequence[UnitRead], read: UnitRead) -> bool:
    first, last, unit = run[0].unit, run[-1].unit, read.unit
    is_next = (unit.generation, unit.index) == (last.generation, last.index + 1)
    return is_next and unit.offset + aligned(unit.num_bytes) - first.offset <= RUN_BYTES


def read_run(
    blobs: BlobReader, run: Run, seals: ExtentSeals, buffer: AlignedBuffer, wanted: PendingRead
) -> ReadResult:
    """Reads neighbours at once and verifies each against its entry and its digest. Raises
    OSError."""
    if wanted.is_over:
        return ReadResult((), (), 0)
    first, last = run[0].unit, run[-1].unit
    read = partial(blobs.read, extent_name(first.generation))
    offset, length = entry_offset(first.index), len(run) * ENTRY_BYTES
    entries = bytes(buffer.read(read, offset, length))
    length = last.offset + last.num_bytes - first.offset
    payload = buffer.read(read, first.offset, length)
    brought, flawed = [], []
    for index, asked in enumerate(run):
        entry = entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]
        start = asked.unit.offset - first.offset
        content = payload[start : start + asked.unit.num_bytes]
        flaw = flaw_of_entry(entry, asked.unit, seals) or _flaw_of(content, asked)
        if flaw:
            flawed.append((asked.unit, flaw))
        elif wanted.deliver(asked, content):
            brought.append(asked.unit)
    return ReadResult(tuple(brought), tuple(flawed), len(payload))


def _flaw_of(content: memoryview, read: UnitRead) -> Flaw | None:
    if not len(content) == read.unit.num_bytes == read.memory.nbytes:
        return Flaw.LENGTH
    return None if xxhash.xxh3_128_digest(content) == read.unit.digest else Flaw.DIGEST


def _bytes_of(memory: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(memory, np.uint8)
