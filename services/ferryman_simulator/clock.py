"""An event loop in virtual time: when nothing is left to do now, its clock jumps to the next timer.

With it the workers' own coroutines run as in a service, but without waiting.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stalled(RuntimeError):
    """Every coroutine waits for another one: no event can happen any more."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is in seconds from 0 and advances by the time that would have been waited."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Leaping(self))

    def time(self) -> float:
        return self._now

    def leap(self, seconds: float) -> None:
        self._now += seconds


class _Leaping(selectors.DefaultSelector):
    """Waits for no input, because there is none: a wait only moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled("nothing will ever happen again")
        self._loop.leap(timeout)
        return []


def run(job: Coroutine[Any, Any, T]) -> T:
    """Runs a job in virtual time, to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(job)


def now() -> float:
    return asyncio.get_running_loop().time()
