"""Jobs beside others, and their end; those of one period are done together, and none twice."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import pairwise

import pytest

from ferryman.runtime import background as background_module
from ferryman.runtime.background import Background, until_tick


async def test_a_job_that_a_cancelled_one_starts_ends_too() -> None:
    begun: list[str] = []

    async def for_ever(name: str) -> None:
        begun.append(name)
        await asyncio.Event().wait()

    async with asyncio.timeout(60), Background() as background:

        async def starting_another() -> None:
            try:
                await for_ever("first")
            finally:
                background.start(for_ever("late"))

        background.start(starting_another())
        await asyncio.sleep(0)
    assert begun == ["first"]


async def test_a_job_that_lost_its_cancel_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_module, "CANCEL_AGAIN_SECONDS", 0.01)

    async def losing_one() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async with asyncio.timeout(60), Background() as background:
        background.start(losing_one())
        await asyncio.sleep(0)
    assert not len(background)


@pytest.mark.parametrize(
    ("now", "left"),
    [(7.0, 1.0), (7.25, 0.75), (7.875, 0.125), (7.9375, 1.0625)],
    ids=["at a tick", "behind it", "before the next", "a moment too early"],
)
def test_the_next_tick_is_a_multiple_of_the_period(now: float, left: float) -> None:
    assert until_tick(1.0, now) == left


def ticks_of(begins: float, seconds_of_work: float) -> list[float]:
    """When a job that begins then is done, with some work each time."""
    now, ticks = begins, list[float]()
    for _ in range(20):
        now += until_tick(0.5, now)
        ticks.append(now)
        now += seconds_of_work
    return ticks


def test_jobs_that_begin_apart_and_work_for_different_times_stay_together() -> None:
    short, long = ticks_of(3.0625, 0.0078125), ticks_of(3.375, 0.125)
    assert short == long
    assert {later - sooner for sooner, later in pairwise(short)} == {0.5}
