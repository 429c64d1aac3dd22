"""Ticks: all jobs that a process does every second are done at once.

An idle process costs what it costs to wake it: its caches are cold, and a heartbeat alone takes
longer than after another job. So jobs of one period go by the clock of the machine, and wake the
process together, and the broker once for the processes of a machine. Machines began at different
times, so a router still receives many workers' heartbeats evenly.
"""

from __future__ import annotations

import asyncio

LEAST_SHARE = 0.1  # of a period: a timer that fires a moment too early is no tick of its own


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
