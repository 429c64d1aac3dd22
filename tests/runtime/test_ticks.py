"""Jobs of one period are done together, and none is done twice."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ferryman.runtime.ticks import until_tick


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
