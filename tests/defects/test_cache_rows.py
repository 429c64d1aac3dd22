"""Known ways to get pools and the tree wrong: the catalogue's rows 5, 6, 7, 46, 48 and 49."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.manifests import small_manifest
from tests.harness.schedule import (
    ALL_KINDS,
    HYBRID,
    MANIFESTS,
    RandomDrafts,
    ScheduledWorker,
    WatchedWorker,
    books,
    host_of,
    request,
    worker_for,
)

from ferryman.cache.capacity import CapacityPlan, Concurrency, plan_capacity, tracking_slots
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.planner import Planner
from ferryman.cache.resume import ResumeCosts
from ferryman.cache.slots import TREE, Holder, Role, SlotHandle
from ferryman.cache.tree import PrefixTree
from ferryman.errors import ConfigError
from ferryman.schedule.batch import DecodeStep
from ferryman.schedule.drafting import NO_DRAFTS, Drafting
from ferryman.schedule.limits import SchedulerLimits
from ferryman.schedule.rows import RowTable
from ferryman.schedule.slot_allocator import SlotAllocator

SIZED = small_manifest(Kind.FULL, Kind.WINDOW, Kind.RECURRENT, window_len=6)


def least_plan(concurrency: Concurrency, recurrent_slots: int = 0) -> CapacityPlan:
    """The plan of the smallest budget that is not refused."""
    low, high = 0, 1 << 22
    while low < high:
        middle = (low + high) // 2
        try:
            plan_capacity(SIZED, middle, concurrency, 8, recurrent_slots)
            high = middle
        except ConfigError:
            low = middle + 1
    return plan_capacity(SIZED, low, concurrency, 8, recurrent_slots)


# Rows 5 and 6: one sizing function, read by admission too; a cap is a cap.


@pytest.mark.parametrize("drafts", [0, 3], ids=["plain", "drafts"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step"])
@pytest.mark.parametrize("max_running", [1, 2, 4])
def test_row_5_the_least_pools_hold_every_row_with_its_tracks(
    max_running: int, overlap: bool, drafts: int
) -> None:
    """Decode fills all rows, reserved ones included, and never lacks a recurrent slot."""
    drafting: Drafting = RandomDrafts(drafts) if drafts else NO_DRAFTS
    tracking = tracking_slots(prefix_cache=True, overlap=overlap)
    concurrency = Concurrency(max_running, 4, tracking, drafts)
    plan = least_plan(concurrency)
    sizes = {Kind.FULL: 60, Kind.RECURRENT: plan.slots[Kind.RECURRENT]}
    worker = ScheduledWorker(
        HYBRID, sizes, overlap=overlap, max_running=max_running, drafting=drafting
    )
    assert worker.scheduler.limits.concurrency == concurrency
    for index in range(max_running):
        worker.submit(request(HYBRID, f"r{index}", [index] * 3, 16))
    for _ in range(24):
        worker.plan()
        worker.run_oldest()
    for index in range(4):
        asked = request(HYBRID, f"res{index}", [9, index, 1], 4)
        worker.scheduler.reservations.reserve(f"res{index}", asked, worker.now)
    assert worker.scheduler.statistics().reserved == 4


@pytest.mark.parametrize("recurrent_slots", [0, 1, 17, 100])
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("tracking", [0, 1, 2])
@pytest.mark.parametrize(("max_running", "max_prealloc"), [(1, 0), (2, 0), (8, 4), (3, 9)])
def test_rows_5_and_6_slots_suffice_and_bytes_stay_within_the_cap(
    max_running: int, max_prealloc: int, tracking: int, drafts: int, recurrent_slots: int
) -> None:
    concurrency = Concurrency(max_running, max_prealloc, tracking, drafts)
    least = least_plan(concurrency, recurrent_slots)
    for memory_bytes in (least.num_bytes, least.num_bytes * 3 + 17):
        plan = plan_capacity(SIZED, memory_bytes, concurrency, 8, recurrent_slots)
        needed = max_running * (1 + tracking + drafts) + max_prealloc
        assert plan.slots[Kind.RECURRENT] >= needed
        taken = sum(SIZED.layout(kind).slot_bytes * n for kind, n in plan.slots.items())
        assert taken == plan.num_bytes <= memory_bytes
    with pytest.raises(ConfigError, match="too little"):
        plan_capacity(SIZED, least.num_bytes - 1, concurrency, 8, recurrent_slots)


# Row 7: what is indexed by row has as many entries as there are rows.


def test_row_7_the_last_row_works_however_small_the_state_pool_is() -> None:
    rows = RowTable(8, 16, HYBRID.kinds)
    limits = SchedulerLimits(Concurrency(8, 0, 0), 8, 32, 1, 1, prefix_cache=False)
    allocator = SlotAllocator(HYBRID, {Kind.FULL: 8, Kind.RECURRENT: 1}, limits)
    for table in (rows, allocator.rows):
        taken = [table.take() for _ in range(8)]
        assert sorted(taken) == list(range(8))
        table.states[max(taken), 0] = 0
        table.positions[max(taken)] = 31
        table.set_page(Kind.FULL, max(taken), 7, 3)
        assert table.page_tables(np.array([7]), 8)[Kind.FULL][0, 7] == 3


def test_row_7_every_row_decodes_with_fewer_state_slots_than_the_inequality_asks_for() -> None:
    """Eight rows on eight state slots: none is left for a track, and nothing is out of range."""
    worker = WatchedWorker(HYBRID, {Kind.FULL: 60, Kind.RECURRENT: 8}, max_running=8)
    rows = worker.scheduler.limits.concurrency.rows
    for index in range(8):
        worker.submit(request(HYBRID, f"r{index}", [index] * 3, 6))
    seen: set[int] = set()
    while worker.plan() or worker.queued:
        for step in worker.queued:
            seen |= set(step.rows.tolist()) if isinstance(step, DecodeStep) else set()
        worker.run_oldest()
    assert rows == 12
    assert len(seen) == 8
    for request_id in worker.requests:
        assert worker.tokens[request_id] == worker.expected(request_id)


# Row 46: numbers are wide enough.


@given(st.integers(1, 1 << 40), st.integers(1, 200_000))
def test_row_46_sizes_and_offsets_do_not_wrap(memory_bytes: int, max_len: int) -> None:
    """Python's integers in the plan, 64 bits in the tables; kernels are tested on big slabs."""
    try:
        plan = plan_capacity(SIZED, memory_bytes, Concurrency(1, 0, 0), 8)
    except ConfigError:
        return
    offsets = {kind: SIZED.layout(kind).slot_bytes * n for kind, n in plan.slots.items()}
    assert 0 < sum(offsets.values()) <= memory_bytes
    rows = RowTable(1, 4, SIZED.kinds)
    tables = [
        rows.positions,
        rows.adapters,
        rows.states,
        *rows.page_tables(np.zeros(1, int), 4).values(),
    ]
    assert {table.dtype for table in tables} == {np.dtype(np.int64)}


# Row 48: eviction continues until all remaining units are held.


def evictable(worker: ScheduledWorker, kind: Kind) -> int:
    pool = worker.scheduler.allocator.pools[kind]
    return sum(pool.holders(h) == (TREE,) for h in books(worker) if h.kind is kind)


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_row_48_without_a_host_tier_all_that_is_cached_can_be_evicted(name: str) -> None:
    worker = worker_for(MANIFESTS[name])
    for index in range(4):
        worker.submit(request(worker.manifest, f"r{index}", [index % 2] * 9 + [index] * 5, 3))
        worker.drain()
    for kind in worker.manifest.kinds:
        pool = worker.scheduler.allocator.pools[kind]
        while left := evictable(worker, kind):
            worker.scheduler.allocator.make_room({kind: pool.num_free + 1})
            assert evictable(worker, kind) < left, "eviction stands still"
    assert books(worker) == {}


@given(st.sets(st.integers(0, 3)))
def test_row_48_leaves_that_are_being_copied_out_do_not_keep_the_others(held: set[int]) -> None:
    """Each of four leaves may have a copy under way; then the copy ends, as a failed one does."""
    worker, holder = worker_for(HYBRID), Holder(Role.STORE, "copy")
    for index in range(4):
        worker.submit(request(HYBRID, f"r{index}", [index] * 5, 1))
        worker.drain()
    leased = [
        worker.scheduler.allocator.tree.slot(Kind.FULL, worker.requests[f"r{index}"].keys[0])
        for index in sorted(held)
    ]
    worker.scheduler.lease(leased, holder)
    worker.scheduler.flush()
    assert worker.scheduler.allocator.pools[Kind.FULL].num_free == 40 - len(held)
    worker.scheduler.release(leased, holder)
    worker.scheduler.flush()
    assert worker.scheduler.allocator.pools[Kind.FULL].num_free == 40


# Row 49: matching and planning change nothing, not even the order of eviction.


def order_of_eviction(tree: PrefixTree) -> list[SlotHandle]:
    def alone(_handle: SlotHandle) -> bool:
        return True

    order = []
    for kind in (Kind.RECURRENT, Kind.WINDOW, Kind.FULL):
        while dropped := tree.evict(kind, 1, alone):
            order += dropped
    return order


def plan_cold_hit(planner: Planner, tree: PrefixTree, keys: tuple[PageKey, ...]) -> None:
    planner.plan(keys, 4 * len(keys) + 1, tree, host_of("all kinds").view(keys, "no"))


def plan_host_hit(planner: Planner, tree: PrefixTree, keys: tuple[PageKey, ...]) -> None:
    planner.plan(keys, 4 * len(keys) + 1, tree, host_of("all kinds").view(keys, "host"))


def plan_receive(planner: Planner, tree: PrefixTree, keys: tuple[PageKey, ...]) -> None:
    planner.plan_receive(keys, 4 * len(keys) + 1, tree)


@pytest.mark.parametrize("ask", [plan_cold_hit, plan_host_hit, plan_receive])
def test_row_49_a_plan_that_is_not_carried_out_leaves_no_trace(
    ask: Callable[[Planner, PrefixTree, tuple[PageKey, ...]], None],
) -> None:
    worker = worker_for(ALL_KINDS)
    for index in range(3):
        worker.submit(request(ALL_KINDS, f"r{index}", [1] * 9 + [index] * 8, 3))
        worker.drain()
    tree, before = worker.scheduler.allocator.tree, books(worker)
    tree.drain_changes()
    untouched = deepcopy(tree)
    for index in (2, 0, 0, 1):
        ask(Planner(ALL_KINDS, ResumeCosts(1.0, 0.0), 8), tree, worker.requests[f"r{index}"].keys)
    assert books(worker) == before
    assert tree.drain_changes() == ()
    assert [node.holds for node in tree._nodes.values()] == [0] * len(tree)
    assert order_of_eviction(tree) == order_of_eviction(untouched)
