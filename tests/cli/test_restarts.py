"""When a process that died is started again, and when there is no hope for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ferryman_launcher.restarts import RestartLimits, Restarts

PATIENCE = RestartLimits(
    max_deaths=5, within_seconds=30, first_seconds=0.1, max_seconds=0.5, most_seconds=3.0
)


def test_pauses_double_up_to_a_bound() -> None:
    restarts = Restarts(PATIENCE)
    assert [restarts.died(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.1, 0.2, 0.4, 0.5]
    assert not restarts.is_hopeless


def test_the_fifth_death_in_thirty_seconds_leaves_no_hope_but_a_longer_pause() -> None:
    restarts = Restarts(PATIENCE)
    hopes = []
    for now in (0.0, 5.0, 10.0, 15.0, 29.0):
        pause = restarts.died(now)
        hopes.append(restarts.is_hopeless)
    assert hopes == [False] * 4 + [True]
    assert pause == 0.5
    assert [restarts.died(now) for now in (40.0, 60.0, 90.0, 200.0)] == [1.0, 2.0, 3.0, 3.0]


def test_deaths_long_ago_do_not_count() -> None:
    restarts = Restarts(PATIENCE)
    assert [restarts.died(now) for now in (0.0, 31.0, 62.0, 93.0, 124.0)] == [0.1] * 5
    assert not restarts.is_hopeless


def test_starts_that_fail_slowly_leave_no_hope_either() -> None:
    restarts = Restarts(PATIENCE)
    for now in (0.0, 100.0, 200.0):
        restarts.failed_to_start()
        assert not restarts.is_hopeless
        restarts.died(now)
    assert restarts.is_hopeless


def test_a_refusal_to_start_leaves_no_hope_at_once() -> None:
    restarts = Restarts(PATIENCE)
    restarts.died(0.0)
    restarts.refused_to_start()
    restarts.died(1.0)
    assert restarts.is_hopeless


def test_a_start_that_went_well_is_a_new_beginning() -> None:
    restarts = Restarts(PATIENCE)
    for now in (0.0, 100.0, 200.0, 300.0):
        restarts.died(now)
        restarts.failed_to_start()
        restarts.was_ready(now + 1)
    restarts.died(400.0)
    assert not restarts.is_hopeless


def test_hope_comes_back_with_a_life_of_thirty_seconds_and_not_before() -> None:
    restarts = Restarts(PATIENCE)
    for now in range(5):
        restarts.died(float(now))
    restarts.was_ready(10.0)
    assert restarts.died(39.0) == 1.0
    assert restarts.is_hopeless
    restarts.was_ready(50.0)
    assert restarts.died(80.0) == 0.1
    assert not restarts.is_hopeless


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["ready", "failed", "refused"]))))
def test_there_is_always_a_next_start(lives: list[tuple[float, str]]) -> None:
    restarts, now = Restarts(PATIENCE), 0.0
    for seconds, how in lives:
        now += seconds
        match how:
            case "ready":
                restarts.was_ready(now)
            case "failed":
                restarts.failed_to_start()
            case _:
                restarts.refused_to_start()
        assert 0 < restarts.died(now) <= PATIENCE.most_seconds
