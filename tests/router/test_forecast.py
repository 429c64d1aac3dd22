"""The router foresees waits from what it has measured: numbers in, numbers out."""

from __future__ import annotations

import pytest

from ferryman_router.routing.forecast import (
    Forecast,
    LatencyTracker,
    Need,
    ServedRequest,
    ServiceRate,
    retry_seconds,
)


def taught(first: float = 1.0, decode: float = 4.5, num_tokens: int = 10) -> Forecast:
    """Half a second a token, ten tokens an answer; ten tokens of cost leave the queue a second."""
    forecast = Forecast()
    for _ in range(5):
        forecast.served(ServedRequest(first, decode, num_tokens, is_whole=True))
    forecast.rate.looked(0.0, is_waiting=True)
    for step in range(1, 6):
        forecast.rate.taken(10, float(step))
    return forecast


def test_nothing_measured_is_nothing_foreseen() -> None:
    forecast = Forecast()
    assert forecast.service_seconds(Need(3.0, 100)) == 0.0
    assert forecast.seconds_too_late(Need(3.0, 100), 1e9, 0.1, 5.0) <= 0
    assert not forecast.is_hopeless(Need(3.0, 100), 0.1)
    assert (forecast.output_tokens(50), forecast.output_tokens(5000)) == (50, 128)


def test_a_service_is_its_first_token_and_then_the_others() -> None:
    forecast = taught()
    assert forecast.service_seconds(Need(0.0, 10)) == pytest.approx(1.0 + 10 * 0.5)
    assert forecast.service_seconds(Need(7.0, 10)) == pytest.approx(7.0 + 10 * 0.5)


def test_a_long_prompt_and_a_long_answer_need_more_time() -> None:
    forecast = taught()
    assert not forecast.is_hopeless(Need(0.0, 10), 9.1)
    assert forecast.is_hopeless(Need(0.0, 10), 8.9), "half as long again is the caution"
    assert forecast.is_hopeless(Need(0.0, 20), 9.1)


def test_answers_are_as_long_as_the_last_ones_were_but_not_those_that_were_cut() -> None:
    forecast = taught(num_tokens=10)
    assert forecast.output_tokens(5000) == 10
    forecast.served(ServedRequest(1.0, 0.5, 2, is_whole=False))
    assert forecast.output_tokens(5000) == 10
    for _ in range(200):
        forecast.served(ServedRequest(1.0, 4.5, 40, is_whole=True))
    assert forecast.output_tokens(5000) == 40
    assert forecast.output_tokens(7) == 7


def test_a_wait_may_take_half_of_the_time_and_the_whole_no_more_than_all() -> None:
    forecast, need = taught(first=0.1, decode=0.0, num_tokens=1), Need(0.0, 1)
    late = forecast.seconds_too_late
    assert late(need, 50, 10.1, 5.0) <= 0, "50 tokens take 5 s"
    assert late(need, 50, 9.0, 5.0) == pytest.approx(0.5)
    slow = Need(8.0, 1)
    assert late(slow, 50, 17.1, 5.0) <= 0
    assert late(slow, 50, 15.0, 5.0) == pytest.approx(2.0), "5 s and half as long again as 8"


def test_only_time_in_which_requests_wait_is_measured() -> None:
    rate = ServiceRate()
    rate.taken(10, 1.0)
    assert rate.seconds_for(100, 1.0) == 0.0, "it did not wait"
    rate.looked(1.0, is_waiting=True)
    rate.taken(10, 2.0)
    rate.looked(2.0, is_waiting=False)
    rate.taken(10, 500.0)
    assert rate.seconds_for(100, 500.0) == pytest.approx(10.0), "an idle cluster is not slow"


def test_a_cluster_that_stands_still_looks_slower_and_slower_and_quick_when_it_goes_on() -> None:
    forecast = taught()
    assert forecast.rate.seconds_for(10, 5.0) == pytest.approx(1.0)
    assert forecast.rate.seconds_for(10, 35.0) == pytest.approx(30.0)
    for step in range(1, 60):
        forecast.rate.taken(10, 35.0 + step / 10)
    assert forecast.rate.seconds_for(10, 41.0) < 0.5


def test_a_time_to_come_back_is_worth_telling() -> None:
    assert [retry_seconds(s) for s in (-3.0, 0.2, 7.5, 1e6)] == [1.0, 1.0, 7.5, 60.0]


def test_gaps_are_shared_among_tokens_that_came_together() -> None:
    pace = LatencyTracker(10.0)
    assert pace.tokens(1, 10.5) == 0.5
    assert pace.tokens(2, 10.7) == pytest.approx(0.1)
    assert pace.tokens(1, 11.7) == pytest.approx(1.0)
    assert pace.first_seconds == 0.5
    assert pace.gap_quantile(0.5) == pytest.approx(0.1)
    assert pace.gap_quantile(0.99) == pytest.approx(1.0)
