"""Rows 21, 24 and 39 of the catalogue: what was taken is given back, all of it and once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.doubles.stamps import fake_tokens
from tests.harness.schedule import (
    ALL_KINDS,
    ATTENTION,
    HYBRID,
    MANIFESTS,
    VOCAB,
    ScheduledWorker,
    WatchedWorker,
    books,
    check_books,
    is_all_cached,
    request,
    worker_for,
)

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.slots import Holder, Role
from ferryman.errors import OutOfSlots
from ferryman.schedule.events import Finished
from ferryman.schedule.request import FinishReason
from ferryman.schedule.sequence import Goal

# Row 21: a rejection and an abort give back what was taken, and nothing else.


def cached_worker(manifest: StateManifest) -> WatchedWorker:
    """A worker that holds a prefix of [1] * 17."""
    worker = worker_for(manifest)
    worker.submit(request(manifest, "r0", [1] * 17, 2))
    worker.drain()
    return worker


def fill_up(worker: ScheduledWorker) -> None:
    """Takes every slot that the tree does not hold; it is not given back."""
    holder = Holder(Role.TRANSFER_IN, "filler")
    for handle in worker.scheduler.allocator.tree.handles():
        worker.scheduler.lease((handle,), holder)
    for pool in worker.scheduler.allocator.pools.by_kind.values():
        pool.try_allocate(pool.num_free, holder)


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_row_21_a_request_that_is_not_admitted_holds_nothing(name: str) -> None:
    worker = cached_worker(MANIFESTS[name])
    fill_up(worker)
    before = books(worker)
    worker.scheduler.submit(request(worker.manifest, "r1", [1] * 17 + [2] * 9, 3), Goal.DECODE)
    for now in range(3):
        assert worker.scheduler.plan(float(now)) is None
        assert books(worker) == before
    with pytest.raises(OutOfSlots):
        worker.scheduler.reservations.reserve(
            "res", request(worker.manifest, "r2", [1] * 30, 3), 9.0
        )
    assert books(worker) == before
    assert worker.scheduler.cancel("r1", 10.0)
    assert books(worker) == before


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("in_flight", [True, False], ids=["in flight", "committed"])
@pytest.mark.parametrize("goal", list(Goal))
def test_row_21_an_abort_at_any_point_leaves_only_what_is_cached(
    goal: Goal, in_flight: bool, steps: int
) -> None:
    worker = cached_worker(ALL_KINDS)
    worker.submit(request(ALL_KINDS, "r1", [1] * 17 + [2] * 9, 20), goal)
    for _ in range(steps):
        worker.plan()
        worker.run_oldest()
    if in_flight:
        worker.plan()
    assert worker.scheduler.cancel("r1", worker.now)
    worker.collect()
    worker.drain()
    assert is_all_cached(worker)
    assert len([event for event in worker.seen(Finished) if event.request_id == "r1"]) == 1


# Row 24: a window page is freed once, by the last of slide, swap and eviction.


@pytest.mark.parametrize("manifest", [ALL_KINDS, ATTENTION], ids=["all kinds", "attention"])
def test_row_24_a_window_page_that_slides_out_while_it_is_cached_is_freed_once(
    manifest: StateManifest,
) -> None:
    """Both prompts compute the same windows side by side, donate them, and slide past them."""
    worker = worker_for(manifest)
    for index in range(2):
        worker.submit(request(manifest, f"r{index}", [1] * 17, 20))
    worker.drain()
    assert is_all_cached(worker)
    worker.scheduler.flush()
    pool = worker.pools[Kind.WINDOW]
    assert set(pool.freed.values()) == {1}
    assert pool.num_free == pool.num_slots


# Row 39: what ends, ends once.


@pytest.mark.parametrize("steps", range(1, 12))
def test_row_39_cancelling_what_has_ended_changes_nothing(steps: int) -> None:
    worker = worker_for(HYBRID)
    worker.submit(request(HYBRID, "r0", [1] * 6, 4))
    for _ in range(steps):
        worker.plan()
        if steps % 2:
            worker.run_oldest()
    is_first = worker.scheduler.cancel("r0", worker.now)
    before = books(worker)
    assert not worker.scheduler.cancel("r0", worker.now)
    assert books(worker) == before
    worker.drain()
    finished = worker.seen(Finished)
    assert [event.request_id for event in finished] == ["r0"]
    assert is_first == (finished[0].reason is FinishReason.CANCELLED)
    assert is_all_cached(worker)


@pytest.mark.parametrize("last", range(6))
def test_row_39_a_stop_that_is_found_while_the_next_step_runs_ends_once(last: int) -> None:
    """The extra token is on its way; it is dropped, and its slots stay until it has come."""
    worker = worker_for(HYBRID)
    asked = request(HYBRID, "r0", [1] * 6, 7)
    tokens = fake_tokens(asked.token_ids, 7, VOCAB)
    stop = tokens.index(tokens[last])
    worker.submit(replace(asked, stop_token_ids=frozenset({tokens[last]})))
    worker.drain()
    assert worker.tokens["r0"] == tokens[: stop + 1]
    assert [event.reason for event in worker.seen(Finished)] == [FinishReason.STOP]
    assert is_all_cached(worker)


def test_row_39_a_request_that_ends_while_it_is_being_pushed_back_leaves_once() -> None:
    """Its last token is in flight when another request needs its pages; then it is cancelled."""
    for max_tokens in range(2, 16):
        for cancels in (False, True):
            worker = WatchedWorker(HYBRID, {Kind.FULL: 6, Kind.RECURRENT: 12})
            worker.submit(request(HYBRID, "r0", [1] * 7, 14))
            worker.submit(request(HYBRID, "r1", [2] * 7, max_tokens))
            while worker.plan() or worker.run_oldest():
                if cancels and not worker.scheduler.sequences.decoding:
                    worker.scheduler.cancel("r1", worker.now)
            worker.drain()
            ended = sorted(event.request_id for event in worker.seen(Finished))
            assert ended == ["r0", "r1"]
            assert is_all_cached(worker)


def test_row_39_a_reservation_is_freed_once_and_never_after_it_was_adopted() -> None:
    worker = worker_for(HYBRID)
    worker.scheduler.reservations.reserve("res", request(HYBRID, "r0", [1] * 9, 3), 1.0)
    assert worker.scheduler.reservations.free("res")
    assert not worker.scheduler.reservations.free("res")
    assert books(worker) == {}
    check_books(worker)
