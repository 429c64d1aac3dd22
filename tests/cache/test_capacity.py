"""Sizing: one budget, one inequality, and a clear refusal."""

from __future__ import annotations

import pytest
from tests.cache.manifests import small_manifest

from ferryman.cache.capacity import Concurrency, plan_capacity, tracking_slots
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ConfigError

MANIFEST = small_manifest(Kind.FULL, Kind.RECURRENT)
MEGABYTE = 1 << 20


def bytes_of(manifest: StateManifest, kind: Kind) -> int:
    return manifest.layout(kind).slot_bytes


@pytest.mark.parametrize(
    ("prefix_cache", "overlap", "tracking"),
    [(False, True, 0), (False, False, 0), (True, False, 1), (True, True, 2)],
)
@pytest.mark.parametrize(
    ("max_running", "max_prealloc", "drafts"), [(1, 0, 0), (8, 0, 3), (3, 5, 4)]
)
def test_every_row_has_its_working_track_and_scratch_slots(
    prefix_cache: bool,
    overlap: bool,
    tracking: int,
    max_running: int,
    max_prealloc: int,
    drafts: int,
) -> None:
    assert tracking_slots(prefix_cache=prefix_cache, overlap=overlap) == tracking
    concurrency = Concurrency(max_running, max_prealloc, tracking, drafts)
    plan = plan_capacity(MANIFEST, MEGABYTE, concurrency, step_tokens=8)
    assert plan.slots[Kind.RECURRENT] >= (max_running + max_prealloc) * (1 + tracking + drafts)
    assert plan.num_bytes <= MEGABYTE
    assert plan.num_bytes == sum(plan.slots[kind] * bytes_of(MANIFEST, kind) for kind in plan.slots)


def test_a_smaller_explicit_size_is_raised_with_the_inequality_in_the_warning() -> None:
    concurrency = Concurrency(4, 2, 2)
    plan = plan_capacity(MANIFEST, MEGABYTE, concurrency, 8, recurrent_slots=5)
    assert plan.slots[Kind.RECURRENT] == 18
    assert "(4 running + 2 preallocated) × (1 + 2 tracking) = 18" in plan.warnings[0]


def test_drafts_are_in_the_inequality() -> None:
    plan = plan_capacity(MANIFEST, MEGABYTE, Concurrency(4, 2, 1, 3), 8, recurrent_slots=5)
    assert plan.slots[Kind.RECURRENT] == 30
    assert "(4 running + 2 preallocated) × (1 + 1 tracking + 3 scratch) = 30" in plan.warnings[0]


def test_an_explicit_size_that_suffices_is_kept() -> None:
    plan = plan_capacity(MANIFEST, MEGABYTE, Concurrency(1, 0, 2), 8, recurrent_slots=7)
    assert plan.slots[Kind.RECURRENT] == 7
    assert plan.warnings == ()


def test_a_budget_that_is_too_small_is_refused_and_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"raise memory_bytes or lower max_running"):
        plan_capacity(MANIFEST, 1000, Concurrency(8, 8, 2), 8)


def test_the_budget_is_the_total_over_all_pools() -> None:
    manifest = small_manifest(Kind.FULL, Kind.WINDOW, Kind.RECURRENT, window_len=8)
    for memory in (MEGABYTE, 10 * MEGABYTE):
        assert plan_capacity(manifest, memory, Concurrency(4, 4, 2), 16).num_bytes <= memory
