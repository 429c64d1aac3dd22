"""The router foresees waits from what it has measured: numbers in, numbers out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman_router.routing.forecast import (
    PACE_SECONDS,
    DecodePace,
    Forecast,
    LatencyTracker,
    Need,
    ServiceRate,
    retry_seconds,
)


def taught(first: float = 1.0, step: float = 0.5, num_tokens: int = 10) -> Forecast:
    """At second 5: so many seconds to a first token and between two, and ten tokens of cost leave
    the queue a second."""
    forecast = Forecast()
    for _ in range(5):
        forecast.first_token(first)
        forecast.answered(num_tokens)
    decodes(forecast, 0.0, 5.0, step)
    forecast.rate.looked(0.0, is_waiting=True)
    for second in range(1, 6):
        forecast.rate.taken(10, float(second))
    return forecast


def decodes(forecast: Forecast, start: float, end: float, step: float, rows: int = 1) -> None:
    """So many rows, each with a token every `step` seconds."""
    made = [forecast.row() for _ in range(rows)]
    for row in made:
        row.drawn(1, start)
    for number in range(1, round((end - start) / step) + 1):
        for row in made:
            row.drawn(1, start + number * step)
    for row in made:
        row.leave(end)


def test_nothing_measured_is_nothing_foreseen() -> None:
    forecast = Forecast()
    assert forecast.service_seconds(Need(3.0, 100), 5.0) == 0.0
    assert forecast.seconds_too_late(Need(3.0, 100), 1e9, 0.1, 5.0) <= 0
    assert not forecast.is_hopeless(Need(3.0, 100), 0.1, 5.0)
    assert (forecast.output_tokens(50), forecast.output_tokens(5000)) == (50, 128)


def test_a_service_is_its_first_token_and_then_the_others() -> None:
    forecast = taught()
    near = pytest.approx
    assert forecast.service_seconds(Need(0.0, 10), 5.0) == near(1.0 + 10 * 0.5, rel=0.15)
    assert forecast.service_seconds(Need(7.0, 10), 5.0) == near(7.0 + 10 * 0.5, rel=0.15)


def test_a_long_prompt_and_a_long_answer_need_more_time() -> None:
    forecast = taught(step=0.01)
    assert not forecast.is_hopeless(Need(0.0, 500), 9.1, 5.0)
    assert forecast.is_hopeless(Need(0.0, 500), 8.9, 5.0), "half as long again is the caution"
    assert forecast.is_hopeless(Need(0.0, 1000), 9.1, 5.0)


def test_answers_are_as_long_as_the_last_ones_were_but_not_those_that_were_cut() -> None:
    forecast = taught(num_tokens=10)
    assert forecast.output_tokens(5000) == 10
    decodes(forecast, 5.0, 6.0, 0.5)
    assert forecast.output_tokens(5000) == 10
    for _ in range(200):
        forecast.answered(40)
    assert forecast.output_tokens(5000) == 40
    assert forecast.output_tokens(7) == 7


def test_a_wait_may_take_half_of_the_time_and_the_whole_no_more_than_all() -> None:
    forecast, need = taught(first=0.1, step=0.01, num_tokens=1), Need(0.0, 1)
    late = forecast.seconds_too_late
    assert late(need, 50, 10.1, 5.0) <= 0, "50 tokens take 5 s"
    assert late(need, 50, 9.0, 5.0) == pytest.approx(0.5)
    slow = Need(8.0, 1)
    assert late(slow, 50, 17.1, 5.0) <= 0
    assert late(slow, 50, 15.0, 5.0) == pytest.approx(2.0, abs=0.05), (
        "5 s and half as long again as 8"
    )


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


@pytest.mark.parametrize("rows", [1, 4, 12])
@pytest.mark.parametrize("times", [3.0, 1 / 3])
def test_a_machine_that_others_use_is_as_slow_as_it_is_now_and_not_as_it_was(
    rows: int, times: float
) -> None:
    """Its answers take longer than that, so none of them has ended when the pace is known."""
    forecast, before, after = taught(step=0.03), 0.03, 0.03 * times
    decodes(forecast, 5.0, 20.0, before, rows)
    assert forecast.pace.seconds_per_token(20.0) == pytest.approx(before, rel=0.05)
    end = 20.0 + 2 * PACE_SECONDS
    decodes(forecast, 20.0, end, after, rows)
    assert forecast.pace.seconds_per_token(end) == pytest.approx(after, rel=0.45)
    assert forecast.output_tokens(5000) == 10, "no answer has ended meanwhile"


def test_rows_that_get_no_token_look_slower_and_slower() -> None:
    forecast, need = taught(step=0.01), Need(0.0, 100)
    row = forecast.row()
    row.drawn(1, 5.0)
    seconds = [forecast.service_seconds(need, 5.0 + later) for later in (0.0, 1.0, 3.0, 9.0)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 3 * seconds[0]
    row.leave(14.0)
    assert not forecast.pace.num_rows
    at_the_end = forecast.service_seconds(need, 14.0)
    assert forecast.service_seconds(need, 1e6) == at_the_end, "an idle cluster is no slow one"


@given(
    st.lists(st.tuples(st.floats(0.001, 5.0), st.integers(1, 9)), min_size=1, max_size=40),
    st.integers(1, 12),
)
def test_a_pace_lies_between_the_quickest_and_the_slowest_that_was_seen(
    steps: list[tuple[float, int]], rows: int
) -> None:
    """Little's law holds for each stretch between two tokens, so it does for their sum."""
    pace, now = DecodePace(), 0.0
    for _ in range(rows):
        pace.begin(now)
    for seconds, num_tokens in steps:
        now += seconds
        pace.drawn(num_tokens * rows, now)
    each = [seconds / num_tokens for seconds, num_tokens in steps]
    assert min(each) * 0.999 <= pace.seconds_per_token(now) <= max(each) * 1.001


def test_after_a_standstill_a_token_does_not_show_how_slow_the_next_ones_are() -> None:
    """Ten seconds without a token make the next hundred look slow, and not as slow as the first."""
    forecast, pace = taught(step=0.01), 0.01
    rows = [forecast.row() for _ in range(12)]
    for row in rows:
        row.drawn(1, 5.0)
    for number in range(1, 300):
        for row in rows:
            row.drawn(1, 5.0 + number * pace)
    for row in rows:
        row.drawn(1, 18.0)
    assert 100 * forecast.pace.seconds_per_token(18.0) < 10.0
    for number in range(1, 500):
        for row in rows:
            row.drawn(1, 18.0 + number * pace)
    assert forecast.pace.seconds_per_token(18.0 + 500 * pace) < 2 * pace


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
