"""Cancels that a library loses.

Until Python 3.12 `asyncio.wait_for` loses a cancel that comes when its wait has ended and its
caller has not been resumed (https://github.com/python/cpython/issues/86296). redis-py sends each
command by it, and nats-py waits for each answer. A loop around such a call would go on for ever,
and so would whoever waits for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

CANCEL_AGAIN_SECONDS = 8.0  # longer than a stalled write takes to end


@contextmanager
def cancels_kept() -> Iterator[None]:
    """Around a library's call: raises CancelledError behind it if a cancel came meanwhile.

    One that came before is not meant: what a cancelled task still tidies up may call, too.
    """
    task = asyncio.current_task()
    assert task is not None, "only tasks are cancelled"
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def ended(job: asyncio.Future[None]) -> None:
    """Waits for a job that cannot be cancelled, however often the caller is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        try:
            await asyncio.wait((job,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def finished_in_thread(job: Callable[[], None]) -> None:
    """Runs a job in a thread; ends when the job has, however often the caller is cancelled."""
    running = asyncio.ensure_future(asyncio.to_thread(job))
    try:
        await asyncio.shield(running)
    finally:
        await ended(running)


async def end_tasks(
    tasks: Collection[asyncio.Task[None]], again_seconds: float = CANCEL_AGAIN_SECONDS
) -> None:
    """Cancels tasks and waits until all have ended. One that goes on is cancelled again after
    `again_seconds`."""
    going = set(tasks)
    while going:
        for task in going:
            task.cancel()
        _, going = await asyncio.wait(going, timeout=again_seconds)
