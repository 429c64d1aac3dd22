"""Attempts begin once and in time, though no two clocks are compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.errors import Stale
from ferryman.handoff import attempt_window
from ferryman.handoff.attempt_window import MAX_ROUTERS, AttemptWindows, RouterWindow

LIFE = 10.0


def test_an_attempt_begins_once() -> None:
    window = RouterWindow()
    window.check(1, LIFE, 0.0)
    window.begin(1, LIFE, 0.0)
    with pytest.raises(Stale, match="has been here"):
        window.check(1, LIFE, 0.1)


def test_attempts_overtake_each_other_within_their_lifetime() -> None:
    window = RouterWindow()
    window.begin(5, LIFE, 0.0)
    for serial in (4, 2, 3, 1, 9):
        window.check(serial, LIFE, LIFE)
        window.begin(serial, LIFE, LIFE)


def test_an_attempt_ordered_before_one_seen_long_ago_is_late() -> None:
    window = RouterWindow()
    window.begin(5, LIFE, 0.0)
    with pytest.raises(Stale, match="after its time"):
        window.check(4, LIFE, LIFE + 1.1)
    window.check(4, 2 * LIFE, LIFE + 1.1)
    window.check(6, LIFE, LIFE + 1.1)


def test_an_attempt_that_ended_long_ago_does_not_come_again() -> None:
    """Its number is forgotten, but then it is late."""
    window = RouterWindow()
    window.begin(5, LIFE, 0.0)
    for now in (1e3, 1e4, 1e6):
        with pytest.raises(Stale):
            window.check(5, LIFE, now)
        window.begin(int(now), LIFE, now)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0.5, 40.0), st.floats(0.0, 8.0)), max_size=60)
)
def test_none_begins_twice_and_none_in_time_is_refused(
    steps: list[tuple[int, float, float]],
) -> None:
    """Attempts are ordered one a second. Each comes within its lifetime, and again at any time."""
    window, now, begun = RouterWindow(), 0.0, dict[int, float]()
    for serial, lifetime, wait in steps:
        now += wait
        lifetime = begun.get(serial, lifetime)  # signed: it stays as it was
        ordered_at = float(serial)
        is_in_time = ordered_at <= now <= ordered_at + lifetime
        if serial in begun:
            with pytest.raises(Stale):
                window.check(serial, lifetime, now)
        elif is_in_time:
            window.check(serial, lifetime, now)
            window.begin(serial, lifetime, now)
            begun[serial] = lifetime


@pytest.mark.parametrize("bound", ["MAX_MARKS", "MAX_BEGUN"])
def test_beyond_its_bounds_it_forgets_nothing_that_could_come_again(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_window, bound, 3)
    window = RouterWindow()
    for serial in range(1, 20):
        window.begin(serial, 1e6, 2.0 * serial)
    for serial in range(1, 20):
        with pytest.raises(Stale):
            window.check(serial, 1e6, 40.0)
    window.check(20, 1e6, 40.0)


def test_the_windows_of_the_routers_that_spoke_last_are_kept() -> None:
    windows, routers = AttemptWindows(), [f"router-{n}" for n in range(MAX_ROUTERS + 2)]
    for router in routers[:-1]:
        windows.begin(router, 1, LIFE, 0.0)
    windows.begin(routers[1], 2, LIFE, 0.0)
    windows.begin(routers[-1], 1, LIFE, 0.0)
    assert list(windows._windows) == [*routers[3:-1], routers[1], routers[-1]]


def test_each_router_counts_for_itself_and_without_signatures_nothing_counts() -> None:
    windows = AttemptWindows()
    for router in ("router-1", "router-2"):
        windows.check(router, 1, LIFE, 0.0)
        windows.begin(router, 1, LIFE, 0.0)
    with pytest.raises(Stale):
        windows.check("router-1", 1, LIFE, 0.0)
    for _ in range(2):
        windows.check("router-3", 0, 0.0, 0.0)
        windows.begin("router-3", 0, 0.0, 0.0)
