"""Known ways to get scheduling wrong: rows 2, 4, 38, 42, and all at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.schedule import (
    HYBRID,
    MANIFESTS,
    PAGE,
    STEMS,
    Host,
    ScheduledWorker,
    WatchedWorker,
    host_of,
    is_all_cached,
    request,
    worker_for,
)

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import Holder, Role
from ferryman.schedule.batch import PrefillStep
from ferryman.schedule.events import Cached, Retracted

PROMPTS = st.builds(
    lambda stem, tail: [*stem, *tail],
    st.sampled_from(STEMS),
    st.lists(st.integers(0, 2), max_size=9),
)
ARRIVALS = st.tuples(
    st.just("arrive"), PROMPTS, st.integers(1, 9), st.sampled_from(["no", "host", "corrupt"])
)
STEPS = st.tuples(st.sampled_from(["plan", "run", "both", "cancel"]), st.integers(1, 12))
SCRIPTS = st.lists(st.one_of(ARRIVALS, STEPS), max_size=30)


def play(worker: ScheduledWorker, host: Host, script: list[tuple[object, ...]]) -> set[str]:
    """Runs a script, and then the worker until it is idle; returns the cancelled requests."""
    worker.engine.host_tier.attach(memoryview(bytes(host.arena)))
    cancelled: set[str] = set()
    for line in script:
        match line:
            case ("arrive", list(prompt), int(max_tokens), str(how)):
                asked = request(worker.manifest, f"r{len(worker.requests)}", prompt, max_tokens)
                worker.submit(asked, host=host.view(asked.keys, how))
            case ("cancel", int(pick)):
                request_id = f"r{pick % max(1, len(worker.requests))}"
                if worker.scheduler.cancel(request_id, worker.now):
                    cancelled.add(request_id)
                worker.collect()
            case (str(step), int(times)):
                for _ in range(times):
                    if step != "run":
                        worker.plan()
                    if step != "plan":
                        worker.run_oldest()
    worker.drain()
    return cancelled


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(MANIFESTS)),
    overlap=st.booleans(),
    full=st.integers(10, 24),
    script=SCRIPTS,
)
def test_rows_4_21_22_24_42_books_tree_and_initialisers_are_true_after_every_step(
    name: str, overlap: bool, full: int, script: list[tuple[object, ...]]
) -> None:
    """The worker checks itself after each step; here is what must hold at the end."""
    manifest = MANIFESTS[name]
    sizes = {Kind.FULL: full, Kind.WINDOW: 26, Kind.RECURRENT: 9}
    worker = WatchedWorker(manifest, sizes, overlap=overlap)
    cancelled = play(worker, host_of(name), script)
    for request_id in set(worker.requests) - cancelled:
        assert worker.tokens[request_id] == worker.expected(request_id)
    assert is_all_cached(worker)
    worker.scheduler.flush()
    for pool in worker.pools.values():
        assert pool.num_free == pool.num_slots
        assert set(pool.freed.values()) <= {0, 1}
        assert sum(pool.freed.values()) == sum(pool._generations)


# Row 2: the operations of a slot travel with the batch that uses it.


def test_row_2_a_request_admitted_without_a_chunk_keeps_its_copy_for_its_first_batch() -> None:
    """The step's budget ends between two requests: the second's copy waits, leased, for its own."""
    worker = worker_for(HYBRID)
    worker.submit(request(HYBRID, "r0", [1] * 14, 2))
    worker.drain()
    worker.submit(request(HYBRID, "r1", [2] * 6, 2))
    worker.submit(request(HYBRID, "r2", [1] * 12 + [3] * 9, 2))
    worker.plan()
    (first,) = worker.queued
    assert isinstance(first, PrefillStep)
    assert [chunk.request_id for chunk in first.chunks] == ["r1"]
    assert not first.ops.copies
    assert worker.scheduler.ledgers()[Kind.RECURRENT].by_role[Role.SLOT_OP.value] == 1
    worker.plan()
    second = worker.queued[-1]
    assert isinstance(second, PrefillStep)
    assert [(len(second.ops.copies), chunk.request_id) for chunk in second.chunks] == [(1, "r2")]
    worker.drain()
    assert worker.tokens["r2"] == worker.expected("r2")


def test_row_2_a_request_pushed_back_is_cleared_anew_in_its_replacement_slot() -> None:
    worker = WatchedWorker(HYBRID, {Kind.FULL: 9, Kind.RECURRENT: 12})
    for index in range(3):
        worker.submit(request(HYBRID, f"r{index}", [index] * 6, max_tokens=18))
    worker.drain()
    assert worker.seen(Retracted)
    for request_id in worker.requests:
        assert worker.tokens[request_id] == worker.expected(request_id)


# Row 38: whether there is room is asked each time, never remembered.


def free_by_reservation(worker: ScheduledWorker) -> Callable[[], object]:
    worker.scheduler.reservations.reserve("res", request(HYBRID, "other", [3] * 30, 2), 1.0)
    return lambda: worker.scheduler.reservations.free("res")


def free_by_transfer(worker: ScheduledWorker) -> Callable[[], object]:
    pools, holder = worker.scheduler.allocator.pools, Holder(Role.TRANSFER_OUT, "t")
    taken = pools.try_allocate({Kind.FULL: 8}, holder)
    assert taken is not None
    return lambda: worker.scheduler.release(taken[Kind.FULL], holder)


@pytest.mark.parametrize("hold", [free_by_reservation, free_by_transfer])
def test_row_38_an_idle_worker_admits_as_soon_as_somebody_else_frees_slots(
    hold: Callable[[ScheduledWorker], Callable[[], object]],
) -> None:
    worker = ScheduledWorker(HYBRID, {Kind.FULL: 9, Kind.RECURRENT: 9})
    free = hold(worker)
    worker.submit(request(HYBRID, "r0", [1] * 14, 2))
    assert not worker.plan(), "there is no room yet"
    assert worker.scheduler.statistics().waiting == 1
    free()
    assert worker.plan(), "nobody ran, so nobody could leave and say that there is room"
    worker.drain()
    assert worker.tokens["r0"] == worker.expected("r0")


def test_row_38_a_full_worker_that_is_emptied_by_cancelling_admits_at_once() -> None:
    worker = ScheduledWorker(HYBRID, {Kind.FULL: 40, Kind.RECURRENT: 24}, max_running=1)
    worker.submit(request(HYBRID, "r0", [1] * 6, 9))
    worker.submit(request(HYBRID, "r1", [2] * 6, 2))
    for _ in range(3):
        worker.plan()
        worker.run_oldest()
    while worker.run_oldest():
        pass
    assert worker.scheduler.cancel("r0", worker.now)
    worker.drain()
    assert worker.tokens["r1"] == worker.expected("r1")


# Row 42: what is cached is what its key says (see also the first test).


def test_row_42_tracks_cached_at_any_length_hold_the_state_of_that_length() -> None:
    for max_tokens in range(1, 14):
        worker = worker_for(HYBRID)
        worker.submit(request(HYBRID, "r0", [1] * 6, max_tokens))
        worker.drain()
        depth = (6 + max_tokens - 1) // PAGE
        snapshots = [
            unit.page_index
            for event in worker.seen(Cached)
            for unit in event.units
            if unit.kind is Kind.RECURRENT
        ]
        assert max(snapshots) == depth - 1, "the last full page that was consumed has its state"


@pytest.mark.parametrize("num_steps", range(2, 12))
def test_row_42_a_track_that_is_still_to_be_written_is_not_cached(num_steps: int) -> None:
    """Cancelled at a page's end, say, while the step that freezes the state there is on its way."""
    worker = worker_for(HYBRID)
    worker.submit(request(HYBRID, "r0", [1] * 6, 30))
    for _ in range(num_steps):
        worker.plan()
        worker.run_oldest()
    worker.plan()
    assert worker.queued
    assert worker.scheduler.cancel("r0", worker.now)
    worker.collect()
    worker.drain()
    assert is_all_cached(worker)
