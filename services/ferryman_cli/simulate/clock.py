"""An event loop whose time nobody waits for: when nothing is left to do now, it is later at once.

With it the workers' own coroutines run here as they do there, only without the waiting.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stalled(RuntimeError):
    """Everybody waits for somebody: nothing will ever happen again."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is in seconds from 0 on, and moves by what would have been waited."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Leaping(self))

    def time(self) -> float:
        return self._now

    def leap(self, seconds: float) -> None:
        self._now += seconds


class _Leaping(selectors.DefaultSelector):
    """Nothing comes from outside, so there is nothing to wait for but time."""

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
