"""When a process that died is started again."""

from __future__ import annotations

from ferryman_cli.restarts import Patience, Restarts

PATIENCE = Patience(max_deaths=5, within_seconds=30, first_seconds=0.1, max_seconds=0.5)


def test_pauses_double_up_to_a_bound() -> None:
    restarts = Restarts(PATIENCE)
    assert [restarts.died(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.1, 0.2, 0.4, 0.5]


def test_the_fifth_death_in_thirty_seconds_is_the_last() -> None:
    restarts = Restarts(PATIENCE)
    assert [restarts.died(now) is None for now in (0.0, 5.0, 10.0, 15.0, 29.0)] == [False] * 4 + [
        True
    ]


def test_deaths_long_ago_do_not_count() -> None:
    restarts = Restarts(PATIENCE)
    assert [restarts.died(now) for now in (0.0, 31.0, 62.0, 93.0, 124.0)] == [0.1] * 5


def test_starts_that_fail_slowly_are_given_up_too() -> None:
    restarts = Restarts(PATIENCE)
    for now in (0.0, 100.0):
        assert restarts.died(now) is not None
        restarts.failed_to_start()
    restarts.failed_to_start()
    assert restarts.died(200.0) is None


def test_a_start_that_went_well_is_a_new_beginning() -> None:
    restarts = Restarts(PATIENCE)
    for now in (0.0, 100.0, 200.0, 300.0):
        assert restarts.died(now) is not None
        restarts.failed_to_start()
        restarts.was_ready()
