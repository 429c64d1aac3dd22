"""Breaks of the thread that writes files, so that it leaves the cores to a worker's steps.

A worker on a processor computes on the same cores, and each of its steps waits for the slowest of
its threads. A prompt's file takes 6 ms of a core, which would come on top of one gap between two
tokens of every stream.
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


class WriteBreaks:
    """Makes breaks after pieces of work, unless `is_behind` says that other work waits.

    `clock` counts the seconds of the calling thread on a core; `wait` is called with those of the
    break.
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

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Around a piece of work; a break follows it."""
        began = self._clock()
        yield
        if not self._is_behind():
            self._wait(min(LONGEST_SECONDS, BREAK * (self._clock() - began)))

    def end(self) -> None:
        """Ends the break that is on, and makes no others: the process ends."""
        self._ended.set()


NO_BREAKS = WriteBreaks(lambda: True)
