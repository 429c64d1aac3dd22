"""The step timings that a worker reports."""

from __future__ import annotations

import pytest

from ferryman.cache.resume import FIRST_GUESS
from ferryman.schedule.batch import NOTHING_LOADED, LoadReport
from ferryman.worker.loop import DecayingMean, StepTimings


def test_a_step_of_one_token_hardly_changes_the_seconds_per_token() -> None:
    pace = StepTimings()
    for _ in range(5):
        pace.prefilled(500, 0.5)
    pace.prefilled(1, 0.02)
    assert pace.seconds_per_token == pytest.approx(0.001, rel=0.05)


def test_the_newest_steps_count_most() -> None:
    pace = StepTimings()
    for seconds in [1.0] * 50 + [2.0] * 50:
        pace.decoded(seconds)
    assert pace.step_seconds == pytest.approx(2.0, rel=0.01)


def test_a_worker_that_has_measured_nothing_says_so_and_plans_with_a_guess() -> None:
    pace = StepTimings()
    assert (pace.seconds_per_token, pace.step_seconds) == (0.0, 0.0)
    assert pace.costs().prefill_seconds_per_token > 0


def test_loads_are_reckoned_by_the_bandwidth_that_was_measured() -> None:
    pace = StepTimings()
    guess = pace.costs().load_seconds_per_byte
    assert (pace.load_seconds_per_byte, guess) == (0.0, FIRST_GUESS.load_seconds_per_byte)
    for seconds in [1.0] * 50 + [4.0] * 50:
        pace.loaded(LoadReport(1000, seconds))
        pace.loaded(NOTHING_LOADED)
    assert pace.load_seconds_per_byte == pytest.approx(0.004, rel=0.01)
    assert pace.costs().load_seconds_per_byte == pace.load_seconds_per_byte


def test_the_newest_hand_offs_count_most() -> None:
    tail_seconds = DecayingMean()
    assert tail_seconds.value == 0.0
    for seconds in [1.0] * 50 + [2.0] * 50:
        tail_seconds.add(seconds)
    assert tail_seconds.value == pytest.approx(2.0, rel=0.01)


def test_a_small_load_hardly_changes_the_seconds_per_byte() -> None:
    pace = StepTimings()
    pace.loaded(LoadReport(10_000_000, 0.01))
    pace.loaded(LoadReport(100, 0.0001))
    assert pace.load_seconds_per_byte == pytest.approx(1e-9, rel=0.05)
