"""Statistics over records of turns, against literal values."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from ferryman_bench.serve.turn_record import (
    LatencyLimits,
    TurnRecord,
    poisson_arrivals,
    ratio_interval,
    samples,
    totals,
)

QUICK = TurnRecord(0, 0, 1.0, 2.0, (1.25, 1.5, 2.0), 100, 3, 0, True)
LATER = TurnRecord(0, 1, 2.0, 5.0, (4.0, 4.5, 5.0), 150, 5, 100, False)
FAILED = TurnRecord(1, 0, 1.0, 1.5, error="HTTP 503")
LIMITS = LatencyLimits(first_seconds=0.5, gap_seconds=0.4)


def test_times_are_from_sending_and_failures_have_none() -> None:
    assert samples([QUICK, LATER, FAILED]) == {
        "first token": [250.0, 2000.0],
        "first token, later turns": [2000.0],
        "between tokens": [250.0, 500.0, 500.0, 500.0],
        "end to end": [1000.0, 3000.0],
    }


def test_totals_count_tokens_good_answers_and_the_cache() -> None:
    sums = totals([QUICK, LATER, FAILED], LIMITS)
    assert (sums.requests, sums.errors, sums.seconds) == (3, 1, 4.0)
    assert sums.tokens_per_second == 2.0
    assert sums.requests_per_second == 0.5
    assert sums.good_share == pytest.approx(1 / 3)
    assert sums.good_per_second == 0.25
    assert sums.cached_share == 0.4
    assert sums.right_share == 0.5


def test_a_gap_is_by_token_where_a_piece_has_several() -> None:
    assert LATER.seconds_per_token == 0.25
    assert LatencyLimits(3.0, 0.25).has(LATER)
    assert not LatencyLimits(3.0, 0.24).has(LATER)


def test_what_a_server_does_not_tell_is_unknown_and_not_zero() -> None:
    sums = totals([TurnRecord(0, 0, 0.0, 1.0, (0.5, 1.0))], LIMITS)
    assert sums.cached_share is None
    assert sums.right_share is None
    assert sums.tokens_per_second == 2.0
    assert totals([], LIMITS).tokens_per_second == 0.0


def test_an_interval_has_the_true_ratio_about_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(1), 0
    for seed in range(100):
        old, new = rng.lognormal(size=60), 1.5 * rng.lognormal(size=60)
        _, low, high = ratio_interval(old.tolist(), new.tolist(), seed)
        hits += low <= 1.5 <= high
    assert 85 <= hits <= 100


def test_arrivals_of_an_open_loop_have_the_rate_and_no_memory() -> None:
    times = poisson_arrivals(Random(3), 4.0, 4_001)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.07)
