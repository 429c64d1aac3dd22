"""The requests of a log that count, and the measurements that are read off it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.handoff.lifecycle import DECODE, PREFILL, ROUTER, LifecycleEntry
from ferryman_simulator.modelled_time import GUESSES
from ferryman_simulator.what_if.observed import observed_log
from ferryman_simulator.what_if.selection import LogRange, selected

ALL = LogRange(max_requests=1000, max_seconds=3600.0)
NOW = {"p2", "d2"}


def event(role: str, name: str, request_id: str, at_ms: int = 0, **facts: object) -> LifecycleEntry:
    worker = str(facts.pop("worker", f"{role}-1"))
    return LifecycleEntry(
        role, worker, 1, request_id, 1, 1, name, facts, unix_ms=at_ms, elapsed_ms=at_ms
    )


def served(request_id: str, at_ms: int, pair: str = "2") -> list[LifecycleEntry]:
    return [
        event(ROUTER, "received", request_id, at_ms, tokens=9),
        event(ROUTER, "routed", request_id, at_ms, prefill=f"p{pair}", decode=f"d{pair}"),
        event(ROUTER, "finished", request_id, at_ms, tokens=1),
    ]


def ids(events: list[LifecycleEntry], limits: LogRange = ALL) -> set[str]:
    return {entry.request_id for entry in selected(events, limits, NOW).events}


def test_requests_of_workers_that_are_gone_are_left_out_and_counted() -> None:
    events = [*served("old", 0, "1"), *served("new", 10)]
    chosen = selected(events, ALL, NOW)
    assert ({entry.request_id for entry in chosen.events}, chosen.num_older) == ({"new"}, 1)


def test_without_heartbeats_every_worker_counts() -> None:
    chosen = selected([*served("old", 0, "1"), *served("new", 10)], ALL)
    assert ({entry.request_id for entry in chosen.events}, chosen.num_older) == ({"old", "new"}, 0)


def test_the_latest_are_those_that_came_last() -> None:
    events = [*served("b", 2000), *served("c", 3000), *served("a", 1000)]
    assert ids(events, LogRange(2, 3600.0)) == {"b", "c"}
    assert ids(events, LogRange(9, 1.0)) == {"b", "c"}, "of the second before the log's end"


@given(st.lists(st.integers(0, 10_000), max_size=20), st.integers(1, 25), st.floats(0, 20))
def test_what_is_left_is_the_end_of_the_log(
    arrivals: list[int], max_requests: int, max_seconds: float
) -> None:
    events = [entry for i, at in enumerate(arrivals) for entry in served(f"r{i}", at)]
    kept = {int(name[1:]) for name in ids(events, LogRange(max_requests, max_seconds))}
    assert len(kept) <= max_requests
    assert not arrivals or kept
    dropped = [at for i, at in enumerate(arrivals) if i not in kept]
    assert max(dropped, default=0) <= min((arrivals[i] for i in kept), default=0)


def test_measurements_replace_the_guesses() -> None:
    events = [
        event(PREFILL, "prefetching", "a", 10),
        event(PREFILL, "prefetched", "a", 30, bytes={"storage": 1000}),
        event(PREFILL, "admitted", "a", 40, load_bytes=100, load_seconds=0.5),
        event(PREFILL, "chunk", "a", 50),
        event(PREFILL, "handed_off", "a", 57),
        event(DECODE, "finished", "a", 70, tokens=5),
        event(ROUTER, "finished", "a", 70, cached={"host": 16}, ttft_ms=60.0, drafted=3),
    ]
    observed = observed_log(events)
    assert observed.outcomes["a"].cached.by_tier["host"] == 16
    assert observed.outcomes["a"].first_seconds == pytest.approx(0.06)
    assert (observed.num_drafted, observed.count(PREFILL), observed.count(DECODE)) == (3, 1, 1)
    costs = observed.costs(GUESSES)
    assert costs.load_seconds_per_byte == pytest.approx(0.005)
    assert costs.storage_seconds_per_byte == pytest.approx(2e-5)
    assert costs.call_seconds == pytest.approx(0.007)
    assert costs.step_seconds == GUESSES.step_seconds, "nothing was measured of it"


def test_values_that_are_none_are_passed_over() -> None:
    events = [
        event(PREFILL, "admitted", "a", 1, load_bytes="x", load_seconds=-1),
        event(ROUTER, "finished", "a", 2, cached=["device"], ttft_ms=None),
    ]
    observed = observed_log(events)
    assert observed.outcomes["a"].cached.total == 0
    assert observed.costs(GUESSES) == GUESSES
