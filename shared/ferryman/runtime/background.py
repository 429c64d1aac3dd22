"""The jobs of a service beside its calls: tasks that end with it, and the ticks of regular ones.

All jobs that a process does every second are done at once. An idle process costs what it costs to
wake it: its caches are cold, and a heartbeat alone takes longer than after another job. So jobs of
one period go by the clock of the machine, and wake the process together, and the broker once for
the processes of a machine. Machines began at different times, so a router still receives many
workers' heartbeats evenly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Self

from ferryman.cancellation import CANCEL_AGAIN_SECONDS, end_tasks

log = logging.getLogger(__name__)

LEAST_SHARE = 0.1  # of a period: a timer that fires a moment too early is no tick of its own


class Background:
    """Tasks that belong to the service, not to the code that started them.

    `async with Background() as background: background.start(coroutine)`.

    A task that fails has a bug; the error is logged and the other tasks continue. At the end of the
    block the remaining tasks are cancelled and awaited.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if self._is_ending:
            # Started by a task that was cancelled: no caller is left to end it.
            task.cancel()
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background task failed", exc_info=task.exception())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_ending = True
        while self._tasks:
            await end_tasks(tuple(self._tasks), CANCEL_AGAIN_SECONDS)


def until_tick(period: float, now: float) -> float:
    """The seconds from `now` to the next tick, 0.1 to 1.1 periods away."""
    left = period - now % period
    return left if left >= LEAST_SHARE * period else left + period


def seconds_to_tick(period: float) -> float:
    """The seconds from now to the next tick, by the clock of the running loop."""
    return until_tick(period, asyncio.get_running_loop().time())


async def next_tick(period: float) -> None:
    """Sleeps until the next tick."""
    await asyncio.sleep(seconds_to_tick(period))
