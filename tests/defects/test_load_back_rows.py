"""Rows 10, 11, 43 and 44: what load-back takes is budgeted, and nothing waits for ever."""

from __future__ import annotations

from random import Random

import pytest
from tests.harness.schedule import (
    ALL_KINDS,
    ATTENTION,
    HYBRID,
    PAGE,
    ScheduleKind,
    WatchedWorker,
    play_many,
    request,
)

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import Reason
from ferryman.cache.window_budget import most_window_pages
from ferryman.schedule.events import SequenceAdmitted

SCHEDULES, PARTS = 150, 3


def two_windows(rng: Random, manifest: StateManifest) -> WatchedWorker:
    """Slots for about two windows, and for a few prompts."""
    windows = most_window_pages(manifest, PAGE).most + rng.randint(0, 4)
    return WatchedWorker(
        manifest,
        {Kind.FULL: rng.randint(12, 24), Kind.WINDOW: windows, Kind.RECURRENT: 12},
        overlap=rng.random() < 0.5,
        snapshot_grid=rng.choice([0, 4, 8]),
    )


SCARCE_WINDOWS = ScheduleKind(
    draw_model=lambda rng: rng.choice([ALL_KINDS, ATTENTION]),
    draw_worker=two_windows,
    events={"arrive": 1, "advance": 2, "bury": 1, "offer_host": 2},
)


@pytest.mark.parametrize("part", range(PARTS))
def test_rows_10_11_43_no_admitted_prefill_runs_out_of_slots(part: int) -> None:
    """Two windows of slots, prefixes partly on the host alone: 5,000 of these passed by hand."""
    counts = play_many(SCARCE_WINDOWS, part * SCHEDULES // PARTS, SCHEDULES // PARTS)
    for what in ("admitted", "loaded window", "loaded one kind", "reused and loaded", "declined"):
        assert counts[what], f"{what}: it was meant to happen"


@pytest.mark.parametrize("windows", [5, 6, 7])
@pytest.mark.parametrize("grid", [0, 4])
def test_row_11_a_chunked_prompt_of_any_length_fits_the_window_pool_it_was_admitted_to(
    windows: int, grid: int
) -> None:
    """Chunks of a page and a half, so that each touches a page more than it has tokens for."""
    for prompt_len in range(1, 34):
        worker = WatchedWorker(
            ALL_KINDS,
            {Kind.FULL: 12, Kind.WINDOW: windows, Kind.RECURRENT: 9},
            chunk_tokens=6,
            snapshot_grid=grid,
        )
        worker.submit(request(ALL_KINDS, "r0", [1] * prompt_len, 6))
        worker.drain()
        assert worker.tokens["r0"] == worker.expected("r0")


# Row 44: long prompts with snapshots all along them do not drive out what many others share.


def test_row_44_branches_of_a_shared_stem_go_on_hitting_beside_long_prompts() -> None:
    """A long prompt leaves a snapshot on every page: as many as the pool has slots for."""
    worker = WatchedWorker(HYBRID, {Kind.FULL: 80, Kind.RECURRENT: 16}, snapshot_grid=PAGE)
    stem, positions = [7] * 20, []
    for index in range(12):
        worker.submit(request(HYBRID, f"long{index}", [index % 5, index, *[9] * 56], 1))
        worker.drain()
        name = f"branch{index}"
        worker.submit(request(HYBRID, name, [*stem, index, index, 3], 1))
        worker.drain()
        (plan,) = [e.plan for e in worker.seen(SequenceAdmitted) if e.request_id == name]
        positions.append(plan.position)
        assert worker.tokens[name] == worker.expected(name)
    assert positions[0] == 0
    assert min(positions[2:]) >= 16, "a branch computes its tail and a page at most"


def test_row_44_pages_without_a_state_are_reported_as_such() -> None:
    worker = WatchedWorker(HYBRID, {Kind.FULL: 40, Kind.RECURRENT: 12})
    for name in ("first", "again"):
        worker.submit(request(HYBRID, name, [1] * 18, 1))
        worker.drain()
        allocator = worker.scheduler.allocator
        allocator.make_room({Kind.RECURRENT: allocator.pools[Kind.RECURRENT].num_slots})
    plan = worker.seen(SequenceAdmitted)[-1].plan
    assert plan.position == 0
    assert plan.uncached[0] == (Reason.NO_SNAPSHOT, 0, 4)
