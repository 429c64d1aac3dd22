"""Rows 5 and 6 from the settings on: running × slots per request + preallocated, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cache.manifests import small_manifest

from ferryman.cache.capacity import CapacityPlan, plan_capacity
from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.settings.engine import EngineOptions
from ferryman.settings.workers import DecodeSettings

MANIFEST = small_manifest(Kind.FULL, Kind.WINDOW, Kind.RECURRENT, window_len=6)
ROWS = 32 + 8


def decode_options(folder: Path, **changed: Any) -> EngineOptions:
    """The engine of a decode worker that is told its model, and `changed`."""
    return DecodeSettings(worker=EngineOptions(model=folder, **changed)).engine


def sized(options: EngineOptions) -> CapacityPlan:
    return plan_capacity(
        MANIFEST, options.memory_bytes, options.concurrency, 8, options.recurrent_slots
    )


def test_decode_keeps_a_prefix_cache_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    assert decode_options(tmp_path).prefix_cache
    assert not decode_options(tmp_path, prefix_cache=False).prefix_cache


@pytest.mark.parametrize(
    ("prefix_cache", "overlap", "slots_per_request"),
    [(True, True, 3), (True, False, 2), (False, True, 1), (False, False, 1)],
)
@pytest.mark.parametrize("asked", [0, 1, 79, 500])
def test_row_5_decode_has_tracks_only_where_it_keeps_what_they_freeze(
    tmp_path: Path, prefix_cache: bool, overlap: bool, slots_per_request: int, asked: int
) -> None:
    options = decode_options(
        tmp_path, prefix_cache=prefix_cache, overlap=overlap, recurrent_slots=asked
    )
    needed = 32 * slots_per_request + 8
    assert options.concurrency.recurrent_slots == needed
    plan = sized(options)
    if asked:
        assert plan.slots[Kind.RECURRENT] == max(asked, needed)
    else:
        assert plan.slots[Kind.RECURRENT] >= needed
    is_raised = 0 < asked < needed
    assert [f"= {needed} recurrent slots needed, {asked} given" in w for w in plan.warnings] == [
        True
    ] * is_raised


@pytest.mark.parametrize("asked", [0, 1, 200])
def test_row_6_what_the_memory_forbids_is_refused_and_never_taken_beside_it(
    tmp_path: Path, asked: int
) -> None:
    slot_bytes = MANIFEST.layout(Kind.RECURRENT).slot_bytes
    too_little = decode_options(
        tmp_path, recurrent_slots=asked, memory_bytes=max(asked, 3 * ROWS) * slot_bytes
    )
    with pytest.raises(ConfigError, match="too little"):
        sized(too_little)
    enough = decode_options(tmp_path, recurrent_slots=asked, memory_bytes=1 << 20)
    assert sized(enough).num_bytes <= 1 << 20


def test_a_pool_of_windows_holds_one_prompt_in_whole_chunks_and_all_others_that_decode(
    tmp_path: Path,
) -> None:
    """Pages of 4, a window of 6, chunks of 8: five pages at most. As many while decoding: three,
    and two that were given to the tree with the prompt's end."""
    options = decode_options(tmp_path, recurrent_slots=1)
    low, high = 0, 1 << 20
    while low < high:
        middle = (low + high) // 2
        try:
            plan_capacity(MANIFEST, middle, options.concurrency, 8, 1)
            high = middle
        except ConfigError:
            low = middle + 1
    least = plan_capacity(MANIFEST, low, options.concurrency, 8, 1)
    assert least.slots[Kind.WINDOW] == 5 + (ROWS - 1) * 5
