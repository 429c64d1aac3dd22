"""Rows 23 to 27 and 43: windows, holds and what is given back of them.

A trie has one node a page, and nothing is ever split: rows 26 and 27 are shown not to happen.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.test_tree import alone, full_branch, keys_of
from tests.defects.test_giving_back import fill_up
from tests.doubles.stamps import fake_manifest
from tests.harness.schedule import (
    ALL_KINDS,
    MANIFESTS,
    PAGE,
    ScheduledWorker,
    WatchedWorker,
    books,
    is_all_cached,
    request,
    worker_for,
)

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import Holder, Role
from ferryman.cache.tree import PrefixTree
from ferryman.errors import OutOfSlots
from ferryman.schedule.events import SequenceAdmitted
from ferryman.schedule.rows import NO_SLOT

# Row 23: a rejected request frees the slots that the attempt took, not those from before it.


@pytest.mark.parametrize("name", sorted(MANIFESTS))
@pytest.mark.parametrize("has_history", [True, False], ids=["a known conversation", "a new one"])
def test_row_23_a_rejection_leaves_a_conversations_slots_alone(
    name: str, has_history: bool
) -> None:
    worker = worker_for(MANIFESTS[name])
    history = [1] * 17
    if has_history:
        worker.submit(request(worker.manifest, "turn", history, 4))
        worker.drain()
        history += worker.tokens["turn"]
    fill_up(worker)
    before = books(worker)
    asked = request(worker.manifest, "next", [*history, 5, 5], 3)
    worker.submit(asked)
    for _ in range(2):
        assert worker.scheduler.plan(worker.now) is None
        with pytest.raises(OutOfSlots):
            worker.scheduler.reservations.reserve("res", asked, worker.now)
    assert books(worker) == before
    assert worker.scheduler.cancel("next", worker.now)
    assert books(worker) == before
    tree = worker.scheduler.allocator.tree
    assert all(tree.node(key).holds == 0 for _, key in tree.units()), "a path stays locked"


# Row 24: in `tests/schedule/test_random_schedules.py` each generation of each slot is freed once.


def test_row_24_a_page_behind_the_window_that_the_tree_has_too_is_freed_once() -> None:
    """It leaves the request as it slides, and the tree when it is evicted."""
    for grid in (0, PAGE):
        sizes = {Kind.FULL: 40, Kind.WINDOW: 12, Kind.RECURRENT: 24}
        worker = WatchedWorker(ALL_KINDS, sizes, snapshot_grid=grid)
        for index in range(3):
            worker.submit(request(ALL_KINDS, f"r{index}", [1] * 9 + [index] * 12, 9))
            worker.drain()
        worker.scheduler.flush()
        freed = worker.pools[Kind.WINDOW].freed
        assert is_all_cached(worker)
        assert books(worker) == {}
        assert set(freed.values()) == {1}
        assert len(freed) > 12, "slots were meant to have several lives"


# Row 25: what goes back is settled when it is let go, not when it goes.


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(0, 8))
def test_row_25_slots_let_go_in_a_group_are_those_of_then(pages: list[int], flush: int) -> None:
    """Pages of a table are let go and pointed at other slots while a step is on its way."""
    worker = ScheduledWorker(ALL_KINDS, {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 4})
    allocator, holder = worker.scheduler.allocator, Holder(Role.REQUEST, "r")
    pool, row = allocator.pools[Kind.WINDOW], allocator.rows.take()
    table = {page: (pool.try_allocate(1, holder) or ())[0] for page in range(5)}
    allocator.submitted(1)
    let_go = []
    for nth, page in enumerate(pages):
        if nth == flush:
            allocator.committed(1)
            allocator.submitted(2)
        let_go.append(table[page])
        allocator.retire((table[each] for each in (page,)), holder)
        table[page] = (pool.try_allocate(1, holder) or ())[0]
        allocator.rows.set_page(Kind.WINDOW, row, page, table[page].slot)
    allocator.committed(2)
    assert all(pool.holders(handle) == (holder,) for handle in table.values())
    assert pool.num_free == 40 - 5
    reused = {handle.slot for handle in table.values()}
    assert not {handle.slot for handle in let_go} & reused or flush < len(pages)


# Rows 26 and 27: a hold counts on its own page; every page above is guarded through it.

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
STEPS = st.one_of(
    st.tuples(st.just("insert"), PATHS, st.just(0)),
    st.tuples(st.just("hold"), st.just([0]), st.integers(0, 99)),
    st.tuples(st.just("release"), st.just([0]), st.integers(0, 99)),
)


@given(st.lists(STEPS, max_size=40))
def test_row_26_a_release_takes_one_hold_and_nobody_elses(
    steps: list[tuple[str, list[int], int]],
) -> None:
    tree = PrefixTree([Kind.FULL])
    known: set[tuple[int, ...]] = set()
    held: Counter[tuple[int, ...]] = Counter()
    for nth, (step, path, pick) in enumerate(steps):
        if step == "insert":
            tree.insert(full_branch(path, first_slot=100 * nth), float(nth))
            known |= {tuple(path[:end]) for end in range(1, len(path) + 1)}
        elif step == "hold" and known:
            taken = sorted(known)[pick % len(known)]
            tree.hold(keys_of(taken)[-1], float(nth))
            held[taken] += 1
        elif step == "release" and held:
            released = sorted(held)[pick % len(held)]
            tree.release(keys_of(released)[-1])
            held -= Counter([released])
        tree.check_integrity()
    tree.evict(Kind.FULL, 1000, alone)
    kept = {path[:end] for path in held for end in range(1, len(path) + 1)}
    assert {key for _, key in tree.units()} == {keys_of(path)[-1] for path in kept}


@pytest.mark.parametrize("fork", range(1, 7))
def test_row_27_a_path_that_is_held_stays_whole_wherever_another_leaves_it(fork: int) -> None:
    """Held at its end, branched off at every page, let go: nothing is locked any more."""
    tree, path = PrefixTree([Kind.FULL]), [0] * 7
    tree.insert(full_branch(path), 1.0)
    tree.hold(keys_of(path)[-1], 2.0)
    branch = [*path[:fork], *[1] * 3]
    tree.insert(full_branch(branch, first_slot=50), 3.0)
    tree.evict(Kind.FULL, 100, alone)
    assert {key for _, key in tree.units()} == set(keys_of(path))
    tree.release(keys_of(path)[-1])
    assert len(tree.evict(Kind.FULL, 100, alone)) == 7
    assert len(tree) == 0


# Row 43: no request is charged more than it will use, and none waits alone (see also
# `test_load_back_rows.py`).


@pytest.mark.parametrize("kinds", [[Kind.FULL, Kind.WINDOW], list(Kind), [Kind.WINDOW]])
def test_row_43_a_short_request_is_not_charged_a_whole_window(kinds: list[Kind]) -> None:
    """26 pages are a window here, and three a prompt of 5 with 7 tokens to come."""
    manifest = fake_manifest(PAGE, kinds=kinds, window_len=100)
    sizes = {Kind.FULL: 12, Kind.WINDOW: 3, Kind.RECURRENT: 4}
    worker = WatchedWorker(manifest, sizes)
    worker.submit(request(manifest, "r0", [1] * 5, 7))
    worker.drain()
    assert worker.tokens["r0"] == worker.expected("r0")
    assert [event.plan.demand[Kind.WINDOW] for event in worker.seen(SequenceAdmitted)] == [3]


def test_row_43_a_request_that_comes_back_is_charged_what_is_left_of_it() -> None:
    """Pushed back with two tokens to go, it needs the pages of its tokens, not of all it asked."""
    manifest = fake_manifest(PAGE, kinds=[Kind.FULL, Kind.WINDOW], window_len=100)
    worker = WatchedWorker(manifest, {Kind.FULL: 12, Kind.WINDOW: 12})
    for index in range(3):
        worker.submit(request(manifest, f"r{index}", [index] * 6, max_tokens=18))
    worker.drain()
    for event in worker.seen(SequenceAdmitted):
        assert event.plan.final_len == 6 + 18 - 1
        assert event.plan.demand[Kind.WINDOW] == 6 - len(event.plan.window_pages)
    for request_id in worker.requests:
        assert worker.tokens[request_id] == worker.expected(request_id)
    assert (
        worker.scheduler.allocator.rows.page_tables(np.arange(3), 3)[Kind.WINDOW].max() == NO_SLOT
    )
