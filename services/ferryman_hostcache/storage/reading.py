"""Reads of runs of units: verified in a buffer first, so memory never holds a byte that is wrong.

Blocking; for threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import close
from pathlib import Path

import numpy as np
import xxhash

from ferryman.tiers.extents import ENTRY_BYTES, aligned
from ferryman.tiers.storage_values import Flaw, StorageUnit
from ferryman_hostcache.storage.direct import AlignedBuffer, open_direct, read_range
from ferryman_hostcache.storage.extent import entry_offset, flaw_of_entry
from ferryman_hostcache.storage.tier import UnitRead

RUN_BYTES = 8 << 20

Run = tuple[UnitRead, ...]


class Wanted:
    """Whether the reader still waits. Once `end` has returned, its memory is not written any more,
    however long the disk takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted = True

    def end(self) -> None:
        with self._lock:
            self._is_wanted = False

    def deliver(self, read: UnitRead, found: memoryview) -> bool:
        """Copy what verified to where it is wanted."""
        with self._lock:
            if self._is_wanted:
                np.copyto(_bytes_of(read.memory), _bytes_of(found))
            return self._is_wanted

    @property
    def is_over(self) -> bool:
        return not self._is_wanted


@dataclass(frozen=True, slots=True)
class RunResult:
    """What became of a run: units brought, units found flawed."""

    brought: tuple[StorageUnit, ...]
    flawed: tuple[tuple[StorageUnit, Flaw], ...]
    num_bytes: int


def runs_of(reads: Sequence[UnitRead]) -> Iterator[Run]:
    """Neighbours in one extent, at most RUN_BYTES together or one unit."""
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
    path: Path, run: Run, manifest_digest: str, buffer: AlignedBuffer, wanted: Wanted
) -> RunResult:
    """Read neighbours at once, verify each against its entry and its digest. OSError."""
    if wanted.is_over:
        return RunResult((), (), 0)
    first, last = run[0].unit, run[-1].unit
    fd = open_direct(path)
    try:
        offset, length = entry_offset(first.index), len(run) * ENTRY_BYTES
        entries = bytes(read_range(fd, offset, length, buffer))
        length = last.offset + last.num_bytes - first.offset
        payload = read_range(fd, first.offset, length, buffer)
    finally:
        close(fd)
    brought, flawed = [], []
    for index, read in enumerate(run):
        entry = entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]
        start = read.unit.offset - first.offset
        found = payload[start : start + read.unit.num_bytes]
        flaw = flaw_of_entry(entry, read.unit, manifest_digest) or _flaw_of(found, read)
        if flaw:
            flawed.append((read.unit, flaw))
        elif wanted.deliver(read, found):
            brought.append(read.unit)
    return RunResult(tuple(brought), tuple(flawed), len(payload))


def _flaw_of(found: memoryview, read: UnitRead) -> Flaw | None:
    if not len(found) == read.unit.num_bytes == read.memory.nbytes:
        return Flaw.LENGTH
    return None if xxhash.xxh3_128_digest(found) == read.unit.digest else Flaw.DIGEST


def _bytes_of(memory: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(memory, np.uint8)
