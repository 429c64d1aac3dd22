"""The copy stream: one thread that brings bytes into slots beside the forward stream.

submit k ──► loads of k ─────────────────► fence of k
forward      k - 2       k - 1    wait for fence of k, then k
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from ferryman.engine.stream import StreamClosed
from ferryman.errors import QueueFull

T = TypeVar("T")


class Copies(Protocol):
    """Runs jobs one after the other, in the order in which they were taken."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """What the job raises goes to its future. Raises QueueFull, StreamClosed."""
        ...


class AtOnce:
    """Every job runs within the call: the earliest moment at which a copy stream may run it."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        _attempt(job, future)
        return future


class CopyStream:
    """One thread with a bounded queue. A full one refuses, as the forward stream's does."""

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
        """Runs what was submitted, then ends the thread. Blocks; may be called twice."""
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
        found = job()
    except Exception as error:  # a device thread's top: whatever it is goes to who waits
        future.set_exception(error)
    else:
        future.set_result(found)
