"""Waits for what sends no event: looks at a condition again and again, until a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LOOK_SECONDS = 0.02


def wait_until(
    condition: Callable[[], bool],
    what: str,
    details: Callable[[], object] = lambda: "",
    seconds: float = 30.0,
) -> None:
    """Blocks until another process has brought something about; fails with what it saw last."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}: {details()}"
        time.sleep(LOOK_SECONDS)


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Lets other tasks run until they have brought something about; raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # its cause sends no event
            await asyncio.sleep(0.001)
