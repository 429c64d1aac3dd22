"""The threads that use the blob store: one that writes, and several that read, each with a
buffer."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import local
from typing import Any, TypeVar

import xxhash

from ferryman.cache.manifest import StateManifest
from ferryman.tiers.extents import BlobWork, DropUnit, RemoveExtent
from ferryman.tiers.storage_values import BlobPart, BlobRange, ExtentPlan, UnitRead
from ferryman_hostcache.storage.blob_store import AlignedBuffer, BlobReader, BlobStore
from ferryman_hostcache.storage.extent import (
    ExtentSeals,
    dead_ranges,
    extent_name,
    header_to_bytes,
)
from ferryman_hostcache.storage.extent_reader import PendingRead, ReadResult, Run, read_run, runs_of
from ferryman_hostcache.storage.scan import write_manifest

Outcome = ReadResult | OSError
Result = TypeVar("Result")


class ReaderThreads:
    """Does at most `num_threads` reads at once; further ones wait."""

    def __init__(self, num_threads: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._threads = ThreadPoolExecutor(num_threads, "storage-reader")
        self._local = local()
        self.read_bytes, self.read_seconds = 0, 0.0
        self.num_in_flight = 0

    async def read(
        self, blobs: BlobReader, reads: Sequence[UnitRead], seals: ExtentSeals
    ) -> list[tuple[Run, Outcome]]:
        """Reads runs of units. After its return or cancel no memory of `reads` is written."""
        wanted, runs, began = PendingRead(), list(runs_of(reads)), self._clock()
        futures = [self._submit_run(blobs, run, seals, wanted) for run in runs]
        try:
            if futures:
                await asyncio.wait(futures)
        finally:
            wanted.end()
        outcomes = [future.result() for future in futures]
        self.read_bytes += sum(e.num_bytes for e in outcomes if isinstance(e, ReadResult))
        self.read_seconds += self._clock() - began
        return list(zip(runs, outcomes, strict=True))

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Runs another read on one of the threads."""
        self.num_in_flight += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, job)
        future.add_done_callback(self._landed)
        return future

    def _landed(self, _future: Future[Any]) -> None:
        self.num_in_flight -= 1

    def _submit_run(
        self, blobs: BlobReader, run: Run, seals: ExtentSeals, wanted: PendingRead
    ) -> Future[Outcome]:
        return self.submit(partial(self._read_run, blobs, run, seals, wanted))

    def _read_run(
        self, blobs: BlobReader, run: Run, seals: ExtentSeals, wanted: PendingRead
    ) -> Outcome:
        """Runs on a thread."""
        try:
            return read_run(blobs, run, seals, self._buffer(), wanted)
        except OSError as error:
            return error

    def _buffer(self) -> AlignedBuffer:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = AlignedBuffer()
        buffer: AlignedBuffer = self._local.buffer
        return buffer

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


class WriterThread:
    """Writes, drops and removes, in the order of the calls."""

    def __init__(self, blobs: BlobStore, failed: Callable[[str, OSError], None]) -> None:
        self._blobs, self._failed = blobs, failed
        self._thread = ThreadPoolExecutor(1, "storage-writer")

    def do(self, work: Sequence[BlobWork]) -> None:
        """Does the work soon; failures go to `failed`."""
        if work:
            loop = asyncio.get_running_loop()
            loop.run_in_executor(self._thread, self._do, loop, work)

    def _do(self, loop: asyncio.AbstractEventLoop, work: Sequence[BlobWork]) -> None:
        for job in give_ups(self._blobs, work):
            self._try(loop, "drop", job)

    def write_manifest(self, manifest: StateManifest) -> None:
        """Stores the manifest of these units for the next life, soon."""
        loop = asyncio.get_running_loop()
        job = partial(write_manifest, self._blobs, manifest)
        loop.run_in_executor(self._thread, self._try, loop, "write_manifest", job)

    def _try(
        self, loop: asyncio.AbstractEventLoop, operation: str, job: Callable[[], None]
    ) -> None:
        try:
            job()
        except OSError as error:
            loop.call_soon_threadsafe(self._failed, operation, error)

    def write(
        self, plan: ExtentPlan, seals: ExtentSeals, memories: Sequence[memoryview]
    ) -> Future[None]:
        """Fails with OSError. If shielded, the write goes on although the caller's wait is
        cancelled."""
        job = partial(write_extent, self._blobs, plan, seals, memories)
        return asyncio.get_running_loop().run_in_executor(self._thread, job)

    def close(self) -> None:
        """Finishes all decided work: at most one write, and drops."""
        self._thread.shutdown()


def write_extent(
    blobs: BlobStore, plan: ExtentPlan, seals: ExtentSeals, memories: Sequence[memoryview]
) -> None:
    """Writes the extent; it is there, with exactly these bytes, when this returns. Raises
    OSError."""
    header = header_to_bytes(plan, seals)
    parts = [BlobPart(0, memoryview(header), xxhash.xxh3_128_digest(header))]
    for unit, memory in zip(plan.units, memories, strict=True):
        parts.append(BlobPart(unit.offset, memory, unit.digest))
    blobs.put(extent_name(plan.generation), plan.file_bytes, parts)


def give_ups(blobs: BlobStore, work: Sequence[BlobWork]) -> list[Callable[[], None]]:
    """The calls that drop units and remove extents; what is gone already is fine. They raise
    OSError. All units of one extent are one call, because a medium may write it anew for each."""
    removed = [job for job in work if isinstance(job, RemoveExtent)]
    ranges: dict[int, list[BlobRange]] = {}
    for job in work:
        if isinstance(job, DropUnit):
            ranges.setdefault(job.generation, []).extend(dead_ranges(job))
    return [
        *(partial(blobs.delete, extent_name(job.generation)) for job in removed),
        *(partial(blobs.punch, extent_name(name), holes) for name, holes in ranges.items()),
    ]
