"""When a process that ended is started again: sooner at first, then less and less often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman_launcher.restarts import LifeEnd, Restart, RestartLimits, next_restart

LIMITS = RestartLimits(
    first_seconds=0.5, refused_seconds=3.0, most_seconds=8.0, calm_seconds=30.0, loop_deaths=4
)
AT_ONCE = LifeEnd("died")
REFUSED = LifeEnd("died", is_refusal=True)


def lived(seconds: float) -> LifeEnd:
    return LifeEnd("died", ready_seconds=seconds)


def pauses(*ends: LifeEnd) -> list[float]:
    return [restart.pause_seconds for restart in restarts(*ends)]


def restarts(*ends: LifeEnd) -> list[Restart]:
    decisions: list[Restart] = []
    for end in ends:
        before = decisions[-1].num_deaths if decisions else 0
        decisions.append(next_restart(LIMITS, before, end))
    return decisions


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        pytest.param([AT_ONCE] * 6, [0.5, 1.0, 2.0, 4.0, 8.0, 8.0], id="pauses double to a bound"),
        pytest.param([lived(29.0)] * 3, [0.5, 1.0, 2.0], id="a short life is in the row"),
        pytest.param([lived(30.0)] * 3, [0.5, 0.5, 0.5], id="a calm life begins a new row"),
        pytest.param(
            [AT_ONCE, AT_ONCE, lived(31.0), AT_ONCE], [0.5, 1.0, 0.5, 1.0], id="rows are separate"
        ),
        pytest.param([REFUSED] * 5, [3.0, 3.0, 3.0, 4.0, 8.0], id="a refusal waits longer"),
        pytest.param([REFUSED, AT_ONCE], [3.0, 1.0], id="what refuses no longer is tried sooner"),
    ],
)
def test_the_pause_follows_from_the_deaths_in_a_row(
    ends: list[LifeEnd], expected: list[float]
) -> None:
    assert pauses(*ends) == expected


def test_a_crash_loop_begins_with_the_fourth_death_and_ends_with_a_calm_life() -> None:
    ends = (*([AT_ONCE] * 5), lived(60.0))
    assert [one.is_crash_loop for one in restarts(*ends)] == [False] * 3 + [True] * 2 + [False]


LIVES = st.builds(
    LifeEnd, st.just("died"), st.just(0.0) | st.floats(0.0, 100.0), is_refusal=st.booleans()
)


@given(st.lists(LIVES, max_size=60), LIVES)
def test_there_is_always_a_next_start_within_the_bound(ends: list[LifeEnd], last: LifeEnd) -> None:
    *earlier, decision = restarts(*ends, last)
    assert LIMITS.first_seconds <= decision.pause_seconds <= LIMITS.most_seconds
    before = earlier[-1].num_deaths if earlier else 0
    was_calm = last.ready_seconds >= LIMITS.calm_seconds
    assert decision.num_deaths == (1 if was_calm else before + 1)
    if earlier and not was_calm and not ends[-1].is_refusal:
        assert decision.pause_seconds >= earlier[-1].pause_seconds, "a row only slows down"


def test_a_process_that_dies_all_year_is_started_all_year() -> None:
    for num_deaths in (1_000, 1_000_000, 10**12):
        assert next_restart(LIMITS, num_deaths, AT_ONCE).pause_seconds == LIMITS.most_seconds


def test_the_default_back_off_ends_at_thirty_seconds() -> None:
    limits = RestartLimits()
    every = [next_restart(limits, number, AT_ONCE).pause_seconds for number in range(12)]
    assert every[0] == 0.1
    assert every[-1] == 30.0
