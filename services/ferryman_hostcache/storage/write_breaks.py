"""Breaks of the thread that writes files, so that it leaves the cores to a worker's steps.

A worker on a processor computes on the same cores, and each of its steps waits for the slowest of
its threads. A prompt's file takes 6 ms of a core, which would come on top of one gap between two
tokens of every stream. But the units of a file keep their slots until it is written, so its breaks
have an end, however large it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BREAK = 15
"""A break is so many times as long as the piece of work before it: a sixteenth of a core."""

LONGEST_SECONDS = 0.05
"""The longest break, if a piece took long for another reason than its bytes."""

FILE_SECONDS = 0.2
"""All breaks of a file: those of 10 MB, which is a prompt of some hundred tokens."""


class WriteBreaks:
    """Makes breaks after pieces of files, unless `is_behind` says that other work waits.

    `is_behind` is called on the thread that writes. `clock` counts the seconds of the calling
    thread on a core; `wait` is called with those of the break.
    """

    def __init__(
        self,
        is_behind: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.thread_time,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._is_behind, self._clock = is_behind, clock
        self._ended = threading.Event()
        self._wait = wait or self._ended.wait

    def of_one_file(self) -> FileBreaks:
        """The breaks while one file is written and read back."""
        return FileBreaks(self)

    @property
    def are_due(self) -> bool:
        return not self._is_behind()

    def seconds_on_core(self) -> float:
        return self._clock()

    def wait(self, seconds: float) -> None:
        self._wait(seconds)

    def end(self) -> None:
        """Ends the break that is on, and makes no others: the process ends."""
        self._ended.set()


class FileBreaks:
    """The breaks of one file: `FILE_SECONDS` together, then none."""

    def __init__(self, breaks: WriteBreaks) -> None:
        self._breaks = breaks
        self._left = FILE_SECONDS

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Around a piece of work; a break follows it."""
        began = self._breaks.seconds_on_core()
        yield
        if self._left <= 0 or not self._breaks.are_due:
            return
        took = self._breaks.seconds_on_core() - began
        seconds = min(LONGEST_SECONDS, BREAK * took, self._left)
        self._left -= seconds
        self._breaks.wait(seconds)


NO_BREAKS = WriteBreaks(lambda: True)
