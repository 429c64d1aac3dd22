"""Sizing: one budget, one inequality, and a clear refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.manifests import small_manifest

from ferryman.cache.capacity import (
    Concurrency,
    StateDemand,
    bytes_for,
    plan_capacity,
    requests_at,
    share_memory,
    tracking_slots,
)
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
def test_every_row_has_its_working_slot_and_running_ones_tracks_and_scratch(
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
    needed = max_running * (1 + tracking + drafts) + max_prealloc
    assert plan.slots[Kind.RECURRENT] >= needed
    assert plan.num_bytes <= MEGABYTE
    assert plan.num_bytes == sum(plan.slots[kind] * bytes_of(MANIFEST, kind) for kind in plan.slots)


def test_a_smaller_explicit_size_is_raised_with_the_inequality_in_the_warning() -> None:
    concurrency = Concurrency(4, 2, 2)
    plan = plan_capacity(MANIFEST, MEGABYTE, concurrency, 8, recurrent_slots=5)
    assert plan.slots[Kind.RECURRENT] == 14
    assert "4 running × (1 + 2 tracking) + 2 preallocated = 14" in plan.warnings[0]


def test_drafts_are_in_the_inequality() -> None:
    plan = plan_capacity(MANIFEST, MEGABYTE, Concurrency(4, 2, 1, 3), 8, recurrent_slots=5)
    assert plan.slots[Kind.RECURRENT] == 22
    assert "4 running × (1 + 1 tracking + 3 scratch) + 2 preallocated = 22" in plan.warnings[0]


def test_drafts_are_in_the_windows() -> None:
    """A step of 1 + 13 tokens writes three pages more than one of 1 + 1, in each of four rows."""
    windowed = small_manifest(Kind.FULL, Kind.WINDOW, window_len=8)
    few, many = (bytes_for(windowed, Concurrency(4, 0, 1, drafts), 4) for drafts in (1, 13))
    assert many - few == 4 * 3 * bytes_of(windowed, Kind.WINDOW)


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


def test_prefill_has_no_tracking_slots() -> None:
    """A worker that only prefills keeps states along prompts, which it takes from its cache."""
    assert tracking_slots(prefix_cache=True, overlap=True, decodes=False) == 0
    prefill = Concurrency(8, 8, 0, keeps_prompts=True)
    decode = Concurrency(8, 8, 2, keeps_prompts=True)
    assert prefill.recurrent_slots == 16
    assert decode.recurrent_slots == 32
    assert prefill.uncertain_len == decode.uncertain_len == 0, "windows are kept by both"


KINDS = st.sampled_from(
    [
        (Kind.FULL,),
        (Kind.FULL, Kind.RECURRENT),
        (Kind.FULL, Kind.WINDOW),
        (Kind.FULL, Kind.WINDOW, Kind.RECURRENT),
        (Kind.RECURRENT,),
    ]
)
CONCURRENCY = st.builds(
    Concurrency,
    max_running=st.integers(1, 9),
    max_prealloc=st.integers(0, 5),
    tracking=st.integers(0, 2),
    drafts=st.integers(0, 3),
    keeps_prompts=st.booleans(),
)


@given(
    kinds=KINDS,
    concurrency=CONCURRENCY,
    num_full=st.integers(0, 9),
    context=st.integers(1, 300),
    recurrent_slots=st.integers(0, 200),
)
def test_the_bytes_for_some_requests_hold_them(
    kinds: tuple[Kind, ...],
    concurrency: Concurrency,
    num_full: int,
    context: int,
    recurrent_slots: int,
) -> None:
    manifest = small_manifest(*kinds, window_len=6 if Kind.WINDOW in kinds else 0)
    num_bytes = bytes_for(
        manifest, concurrency, 8, recurrent_slots, num_full=num_full, context=context
    )
    plan = plan_capacity(manifest, num_bytes, concurrency, 8, recurrent_slots)
    assert plan.num_bytes <= num_bytes
    if Kind.FULL in kinds:
        assert plan.slots[Kind.FULL] >= num_full * -(-context // manifest.page_size)
    least = bytes_for(manifest, concurrency, 8, recurrent_slots)
    with pytest.raises(ConfigError):
        plan_capacity(manifest, least - 1, concurrency, 8, recurrent_slots)


@given(kinds=KINDS, concurrency=CONCURRENCY, spare=st.integers(0, 1 << 16))
def test_as_many_requests_are_promised_as_their_slots_add_up_to(
    kinds: tuple[Kind, ...], concurrency: Concurrency, spare: int
) -> None:
    """Against a naive count: requests are added while their slots are there."""
    manifest = small_manifest(*kinds, window_len=6 if Kind.WINDOW in kinds else 0)
    memory = bytes_for(manifest, concurrency, 8) + spare
    plan = plan_capacity(manifest, memory, concurrency, 8)
    context = 23
    free, count = dict(plan.slots), 0
    while count < concurrency.max_running:
        needs = {Kind.FULL: 6, Kind.RECURRENT: concurrency.slots_per_request}
        taken = {k: needs[k] for k in free if k in needs}
        if any(free[kind] < number for kind, number in taken.items()):
            break
        free |= {kind: free[kind] - number for kind, number in taken.items()}
        count += 1
    if Kind.WINDOW not in kinds:
        assert requests_at(context, manifest, plan.slots, concurrency, 8) == count
    else:
        assert requests_at(context, manifest, plan.slots, concurrency, 8) <= count


DEMANDS = st.lists(
    st.builds(
        lambda least, more: StateDemand(least, least + more),
        st.integers(1, 1000),
        st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=5,
)


@given(demands=DEMANDS, budget=st.integers(0, 40_000))
def test_memory_is_shared_without_a_byte_too_many(demands: list[StateDemand], budget: int) -> None:
    least = sum(demand.least for demand in demands)
    if budget < least:
        with pytest.raises(ConfigError, match=f"need {least} bytes"):
            share_memory(budget, demands)
        return
    shares = share_memory(budget, demands)
    assert sum(shares) <= budget
    for share, demand in zip(shares, demands, strict=True):
        assert demand.least <= share <= demand.useful
    useful = sum(demand.useful for demand in demands)
    assert sum(shares) > min(budget, useful) - len(demands), "little is left lying"
