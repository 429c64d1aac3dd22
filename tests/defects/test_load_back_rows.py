"""Rows 10, 11, 43 and 44: what load-back takes is budgeted, and nothing waits for ever."""

from __future__ import annotations

import pytest
from tests.defects.schedules import play_many
from tests.defects.watch import ALL_KINDS, WatchedWorker
from tests.schedule.cluster import request

from ferryman.cache.manifest import Kind

SCHEDULES, PARTS = 150, 3


@pytest.mark.parametrize("part", range(PARTS))
def test_rows_10_11_43_no_admitted_prefill_runs_out_of_slots(part: int) -> None:
    """Two windows of slots, prefixes partly on the host alone: 5,000 of these passed by hand."""
    counts = play_many(part * SCHEDULES // PARTS, SCHEDULES // PARTS)
    for what in ("admitted", "loaded windows", "loaded one kind", "reused and loaded", "declined"):
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
