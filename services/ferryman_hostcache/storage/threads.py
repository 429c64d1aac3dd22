"""The threads that touch the disk: one that writes, some that read, each with its own buffer."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import local

from ferryman.cache.manifest import StateManifest
from ferryman.tiers.extents import DiskWork
from ferryman.tiers.storage_values import ExtentPlan
from ferryman_hostcache.storage.direct import AlignedBuffer
from ferryman_hostcache.storage.folder import Folder
from ferryman_hostcache.storage.reading import Run, RunResult, Wanted, read_run, runs_of
from ferryman_hostcache.storage.remembered import remember
from ferryman_hostcache.storage.tier import UnitRead

Outcome = RunResult | OSError


class Readers:
    """At most `num_threads` runs are read at once, however many are asked for."""

    def __init__(self, folder: Folder, num_threads: int, clock: Callable[[], float]) -> None:
        self._folder, self._clock = folder, clock
        self._threads = ThreadPoolExecutor(num_threads, "storage-reader")
        self._own = local()
        self.read_bytes, self.read_seconds = 0, 0.0
        self.num_in_flight = 0

    async def read(
        self, reads: Sequence[UnitRead], manifest_digest: str
    ) -> list[tuple[Run, Outcome]]:
        """When this returns or is cancelled, no memory of `reads` is written any more."""
        wanted, runs, began = Wanted(), list(runs_of(reads)), self._clock()
        futures = [self._submit(run, manifest_digest, wanted) for run in runs]
        try:
            if futures:
                await asyncio.wait(futures)
        finally:
            wanted.end()
        outcomes = [future.result() for future in futures]
        self.read_bytes += sum(e.num_bytes for e in outcomes if isinstance(e, RunResult))
        self.read_seconds += self._clock() - began
        return list(zip(runs, outcomes, strict=True))

    def _submit(self, run: Run, manifest_digest: str, wanted: Wanted) -> Future[Outcome]:
        self.num_in_flight += 1
        job = partial(self._read_run, run, manifest_digest, wanted)
        future = asyncio.get_running_loop().run_in_executor(self._threads, job)
        future.add_done_callback(self._landed)
        return future

    def _landed(self, _future: Future[Outcome]) -> None:
        self.num_in_flight -= 1

    def _read_run(self, run: Run, manifest_digest: str, wanted: Wanted) -> Outcome:
        """On a thread."""
        path = self._folder.extent_path(run[0].unit.generation)
        try:
            return read_run(path, run, manifest_digest, self._buffer(), wanted)
        except OSError as error:
            return error

    def _buffer(self) -> AlignedBuffer:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = AlignedBuffer()
        buffer: AlignedBuffer = self._own.buffer
        return buffer

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


class Writer:
    """Writes, drops and removes, one after the other, in the order asked."""

    def __init__(self, folder: Folder, failed: Callable[[str, OSError], None]) -> None:
        self._folder, self._failed = folder, failed
        self._thread = ThreadPoolExecutor(1, "storage-writer")

    def do(self, work: Sequence[DiskWork]) -> None:
        """Some time soon; `failed` hears what did not work."""
        if work:
            loop = asyncio.get_running_loop()
            loop.run_in_executor(self._thread, self._do, loop, work)

    def _do(self, loop: asyncio.AbstractEventLoop, work: Sequence[DiskWork]) -> None:
        for each in work:
            self._try(loop, "drop", partial(self._folder.do, each))

    def remember(self, manifest: StateManifest) -> None:
        """Whose units these are, for the next life. Some time soon."""
        loop = asyncio.get_running_loop()
        job = partial(remember, self._folder, manifest)
        loop.run_in_executor(self._thread, self._try, loop, "remember", job)

    def _try(
        self, loop: asyncio.AbstractEventLoop, operation: str, job: Callable[[], None]
    ) -> None:
        try:
            job()
        except OSError as error:
            loop.call_soon_threadsafe(self._failed, operation, error)

    def write(
        self, plan: ExtentPlan, manifest_digest: str, memories: Sequence[memoryview]
    ) -> Future[None]:
        """Fails with OSError. Goes on although the caller's wait is cancelled, if shielded."""
        job = partial(self._folder.write, plan, manifest_digest, memories)
        return asyncio.get_running_loop().run_in_executor(self._thread, job)

    def close(self) -> None:
        """What was decided is done: at most one write, and drops."""
        self._thread.shutdown()
