"""The copy stream: copies into slots during forwards, and how a forward waits for them.

submit k ──► loads of k ─────────────────► fence of k
forward      k - 2       k - 1    wait for fence of k, then k

One thread makes the copies. On a host device a copy is done when its call returns. A card copies on
a second stream from pinned memory; the forward stream waits for an event of it, and the host does
not wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Protocol, TypeVar

import torch

from ferryman.engine.stream import StreamClosed
from ferryman.errors import QueueFull


class CopyFence(Protocol):
    """The end of a run of copies."""

    def wait(self) -> None:
        """Work that the calling thread gives the device from now on runs after the copies."""
        ...

    def finish(self) -> None:
        """Returns when the copies have ended."""
        ...

    def seconds(self) -> float:
        """The seconds that the copies took; waits for their end if need be."""
        ...


class CopyRun(Protocol):
    """Copies under way since `CopySide.begin`."""

    def end(self) -> CopyFence: ...


class CopySide(Protocol):
    """The side that runs copies, and makes a forward stream wait for them."""

    def entered(self) -> AbstractContextManager[object]:
        """The context that the copy stream's thread enters for each job."""
        ...

    def begin(self) -> CopyRun: ...


class HostSide:
    """Copies are done when the call returns."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self) -> CopyRun:
        return _HostRun()


class _HostRun:
    def __init__(self) -> None:
        self._began = perf_counter()

    def end(self) -> CopyFence:
        return _Passed(perf_counter() - self._began)


class _Passed:
    """A fence that has passed already."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self) -> None:
        """The copies are done already."""

    def finish(self) -> None:
        """The copies are done already."""

    def seconds(self) -> float:
        return self._seconds


PASSED: CopyFence = _Passed(0.0)


class CudaSide:
    """A second stream of one card."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The slabs were filled on the default stream.
        self._stream.wait_stream(torch.cuda.default_stream(device))

    def entered(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return stream

    def begin(self) -> CopyRun:
        return _CudaRun()


class _CudaRun:
    def __init__(self) -> None:
        self._began = recorded_event()

    def end(self) -> CopyFence:
        return _CudaFence(self._began, recorded_event())


class _CudaFence:
    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began, self._ended = began, ended

    def wait(self) -> None:
        self._ended.wait()

    def finish(self) -> None:
        self._ended.synchronize()

    def seconds(self) -> float:
        self.finish()
        return float(self._began.elapsed_time(self._ended)) / 1000.0


def recorded_event() -> torch.cuda.Event:
    """An event of the calling thread's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


T = TypeVar("T")


class Copies(Protocol):
    """Runs jobs one after the other, in the order in which they were taken."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """An error of the job goes to its future. Raises QueueFull, StreamClosed."""
        ...


class AtOnce:
    """Runs every job within the call: the earliest moment at which a copy stream may run it."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        _attempt(job, future)
        return future


class CopyStream:
    """One thread with a bounded queue. A full queue refuses jobs, as the forward stream's does."""

    def __init__(self, *, depth: int = 64) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(depth)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="copy-stream", daemon=True)
        self._thread.start()

    def __enter__(self) -> CopyStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise StreamClosed("the copy stream is closed")
        future: Future[T] = Future()
        try:
            self._jobs.put_nowait(lambda: _attempt(job, future))
        except queue.Full:
            raise QueueFull(f"{self._jobs.maxsize} jobs wait on the copy stream") from None
        return future

    def close(self) -> None:
        """Runs the submitted jobs, then ends the thread. Blocks; may be called twice."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _attempt(job: Callable[[], T], future: Future[T]) -> None:
    future.set_running_or_notify_cancel()
    try:
        result = job()
    except Exception as error:  # the top of a device thread: any error goes to the waiting caller
        future.set_exception(error)
    else:
        future.set_result(result)
