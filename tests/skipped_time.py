"""The running loop's time, which a test moves on instead of waiting."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest


@dataclass
class SkippedTime:
    """Time of the running loop that passes when the test says so."""

    seconds: float = 0.0

    async def skip(self, seconds: float) -> None:
        """Lets running tasks reach their waits, moves the time, and runs all that is due then."""
        await self._settle()
        self.seconds += seconds
        await self._settle()

    async def _settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def skipped_time(monkeypatch: pytest.MonkeyPatch) -> SkippedTime:
    """For the loop that runs now; other clocks go on as before."""
    loop, skipped = asyncio.get_running_loop(), SkippedTime()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + skipped.seconds)
    return skipped
