"""The snapshots of a plan, its smaller alternatives, and its figures on loads and shortfalls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.cache.test_resume import ALL, Device, keys_for, planner, unit

from ferryman.cache.manifest import Kind
from ferryman.cache.placement import Placement
from ferryman.cache.planner import Planner
from ferryman.cache.resume import EMPTY_HOST, CopyState, HostView, LoadState, Reason, Shortfall
from ferryman.cache.window_budget import WindowPool, WindowUse, fitting_chunk, window_demand
from ferryman.errors import ConfigError

HYBRID = (Kind.FULL, Kind.RECURRENT)


def coarse(*kinds: Kind, grid: int, window_len: int = 0) -> Planner:
    return replace(planner(*kinds, window_len=window_len), placement=Placement(grid))


def nothing(prompt_len: int) -> Device:
    return Device(keys_for(prompt_len), 0, frozenset(), frozenset())


def test_the_grid_is_counted_from_position_zero_and_lies_beyond_the_resume_position() -> None:
    subject = coarse(*HYBRID, grid=8)
    cold = subject.plan(keys_for(30), 30, nothing(30), EMPTY_HOST)
    assert cold.snapshots == (8, 16, 24, 28)
    warm = Device(keys_for(30), 3, frozenset(), frozenset({2}))
    resumed = subject.plan(keys_for(30), 30, warm, EMPTY_HOST)
    assert (resumed.position, resumed.snapshots) == (12, (16, 24, 28))
    assert resumed.demand[Kind.RECURRENT] == 1 + 3


def test_a_prompt_that_ends_with_a_page_has_one_end_for_its_repeat_and_one_for_its_turn() -> None:
    subject, keys = coarse(*HYBRID, grid=0), keys_for(32)
    assert subject.plan(keys, 32, nothing(32), EMPTY_HOST).snapshots == (28, 32)
    assert subject.plan(keys[:1], 4, nothing(4), EMPTY_HOST).snapshots == (4,)
    repeat = subject.plan(keys, 32, Device(keys, 8, frozenset(), frozenset({6, 7})), EMPTY_HOST)
    assert (repeat.position, repeat.snapshots) == (28, ())
    lost = subject.plan(keys, 32, Device(keys, 8, frozenset(), frozenset({6})), EMPTY_HOST)
    assert (lost.position, lost.snapshots) == (28, (32,))


def test_where_snapshots_are_few_the_end_that_serves_both_stays() -> None:
    subject = coarse(*HYBRID, grid=8)
    plans = subject.plans(keys_for(32), 32, nothing(32), EMPTY_HOST)
    assert [plan.snapshots for plan in plans] == [
        (8, 16, 24, 28, 32),
        (8, 16, 24, 28),
        (16, 28),
        (28,),
    ]
    bounded = replace(subject, placement=Placement(8, most=1))
    assert bounded.plan(keys_for(32), 32, nothing(32), EMPTY_HOST).snapshots == (28,)


def test_a_likely_fork_that_saves_little_is_worth_no_slot() -> None:
    """Each counts from the one before it that is kept, and from where the prompt resumes."""
    subject = replace(planner(*HYBRID), placement=Placement(gain=8))
    forks = (2, 5, 9, 14, 17, 22, 27)
    cold = subject.plan(keys_for(38), 38, nothing(38), EMPTY_HOST, forks=forks)
    assert cold.snapshots == (8, 16, 24, 36)
    warm = Device(keys_for(38), 3, frozenset(), frozenset({2}))
    resumed = subject.plan(keys_for(38), 38, warm, EMPTY_HOST, forks=forks)
    assert (resumed.position, resumed.snapshots) == (12, (20, 36))
    # A junction is no guess: two prompts have parted there.
    parted = Device(keys_for(38), 4, frozenset(), frozenset({2}))
    assert subject.plan(keys_for(38), 38, parted, EMPTY_HOST).snapshots == (16, 36)


def test_a_grid_off_the_pages_is_refused() -> None:
    for grid in (-4, 6):
        with pytest.raises(ConfigError, match="multiple of the page size"):
            coarse(*HYBRID, grid=grid)


def test_a_model_without_recurrent_state_has_no_grid() -> None:
    subject = coarse(Kind.FULL, grid=8)
    assert subject.plan(keys_for(30), 30, nothing(30), EMPTY_HOST).snapshots == ()


def test_plans_give_up_the_grid_by_halves_and_then_the_junction() -> None:
    known = Device(keys_for(38), 3, frozenset(), frozenset())
    subject = coarse(*HYBRID, grid=8)
    plans = list(subject.plans(keys_for(38), 38, known, EMPTY_HOST))
    assert [plan.snapshots for plan in plans] == [
        (8, 12, 16, 24, 32, 36),
        (12, 16, 32, 36),
        (12, 32, 36),
        (12, 36),
        (36,),
    ]
    assert [plan.demand[Kind.RECURRENT] for plan in plans] == [7, 5, 4, 3, 2]
    assert {plan.demand[Kind.FULL] for plan in plans} == {10}


def test_forks_get_a_snapshot_at_the_page_end_before_them_and_the_first_stays_longest() -> None:
    subject = coarse(*HYBRID, grid=0)
    plans = list(subject.plans(keys_for(38), 38, nothing(38), EMPTY_HOST, forks=(21, 11, 2, 99)))
    assert [plan.snapshots for plan in plans] == [(8, 20, 36), (8, 36), (36,)]
    warm = Device(keys_for(38), 3, frozenset(), frozenset({2}))
    resumed = subject.plan(keys_for(38), 38, warm, EMPTY_HOST, forks=(11, 21))
    assert (resumed.position, resumed.snapshots) == (12, (20, 36)), "one fork is behind it"


def test_a_fork_on_a_junction_is_one_snapshot() -> None:
    known = Device(keys_for(38), 3, frozenset(), frozenset())
    plan = coarse(*HYBRID, grid=0).plan(keys_for(38), 38, known, EMPTY_HOST, forks=(13,))
    assert plan.snapshots == (12, 36)


def test_fewer_snapshots_ask_for_fewer_windows() -> None:
    subject = coarse(*ALL, grid=8, window_len=6)
    windows = [
        plan.demand[Kind.WINDOW]
        for plan in subject.plans(keys_for(60), 60, nothing(60), EMPTY_HOST)
    ]
    assert windows == sorted(windows, reverse=True)
    assert windows[-1] < windows[0]


@pytest.mark.parametrize("num_slots", range(3, 12))
def test_a_plan_leaves_room_for_the_window_pages_it_reuses(num_slots: int) -> None:
    """Reused pages are already taken: chunks are as long as the rest of the pool allows."""
    keys = keys_for(40)
    device = Device(keys, 6, frozenset(range(6)), frozenset({5}))
    roomy = planner(*ALL, window_len=9)
    tight = replace(roomy, step_tokens=24, windows=WindowPool(num_slots, 0))
    plan = next(tight.plans(keys, 40, device, EMPTY_HOST, num_decoded=5))
    assert (plan.position, plan.window_pages) == (24, (4, 5))
    room, use = num_slots - 2, WindowUse(24, 40, 45, plan.snapshots, plan.window_pages, 0)
    assert plan.chunk_len == fitting_chunk(tight.manifest, use, 24, room)
    fits = window_demand(tight.manifest, use, 4).most <= room
    assert (plan.demand[Kind.WINDOW] <= room) == fits


def test_a_declined_load_is_followed_by_a_plan_without_loads_that_says_why() -> None:
    """Pages 0 to 3 are on the host; one of them and its snapshot are on the device too."""
    host = HostView({(k, p): unit(k, p) for k in HYBRID for p in range(4)})
    warm = Device(keys_for(22), 1, frozenset(), frozenset({0}))
    *loading, last = planner(*HYBRID).plans(keys_for(22), 22, warm, host)
    assert all(plan.loads and plan.position == 16 for plan in loading)
    assert (last.position, last.loads) == (4, ())
    assert [(span.reason, span.end_page) for span in last.uncached] == [
        (Reason.NO_ROOM, 4),
        (Reason.NEVER_SEEN, 6),
    ]


@pytest.mark.parametrize(
    "lacking", [Kind.RECURRENT, Kind.WINDOW, Kind.FULL], ids=["snapshot", "window", "pages"]
)
def test_a_load_brings_the_one_kind_that_the_device_lacks(lacking: Kind) -> None:
    held = frozenset(range(4))
    device = Device(
        keys_for(18),
        0 if lacking is Kind.FULL else 4,
        frozenset() if lacking is Kind.WINDOW else held,
        frozenset() if lacking is Kind.RECURRENT else held,
    )
    host = HostView({(kind, page): unit(kind, page) for kind in ALL for page in range(4)})
    plan = planner(*ALL, window_len=6).plan(keys_for(18), 18, device, host)
    assert plan.position == 16
    loaded = {unit.kind for unit in plan.loads}
    assert loaded == (set(ALL) if lacking is Kind.FULL else {lacking})
    loads_state = isinstance(plan.initialiser, LoadState)
    assert loads_state == (lacking is not Kind.WINDOW)
    assert isinstance(plan.initialiser, LoadState | CopyState)
    bare = planner(*ALL, window_len=6).plan(keys_for(18), 18, device, EMPTY_HOST)
    loaded_windows = sum(unit.kind is Kind.WINDOW for unit in plan.loads)
    assert plan.demand[Kind.WINDOW] >= loaded_windows + 1, "loads count against their pool"
    assert plan.demand[Kind.FULL] <= bare.demand[Kind.FULL]


def test_a_model_of_windows_alone_loads_its_window() -> None:
    host = HostView({(Kind.WINDOW, page): unit(Kind.WINDOW, page) for page in range(4)})
    device = nothing(18)
    plan = planner(Kind.WINDOW, window_len=6).plan(keys_for(18), 18, device, host)
    assert plan.position == 16
    assert {unit.page_index for unit in plan.loads} == {2, 3}


def test_the_plan_says_what_its_loads_cost_and_what_they_replace() -> None:
    """Loading 9 units of 64 bytes instead of computing 12 tokens: 4 are on the device."""
    host = HostView({(k, p): unit(k, p) for k in HYBRID for p in range(4)})
    warm = Device(keys_for(18), 1, frozenset(), frozenset({0}))
    plan = planner(*HYBRID, load_cost=0.01).plan(keys_for(18), 18, warm, host)
    assert plan.load_bytes == sum(unit.num_bytes for unit in plan.loads) == 4 * 64
    assert plan.load_seconds == pytest.approx(2.56)
    assert plan.compute_seconds == pytest.approx(2.0)
    assert plan.recompute_seconds == pytest.approx(12.0)
    assert plan.seconds == pytest.approx(plan.load_seconds + plan.compute_seconds)
    cold = planner(*HYBRID).plan(keys_for(18), 18, nothing(18), EMPTY_HOST)
    assert (cold.load_bytes, cold.recompute_seconds, cold.compute_seconds) == (0, 0.0, 18.0)


@pytest.mark.parametrize(
    ("end_page", "spans"),
    [
        (6, [(Reason.HOST_FULL, 2, 6), (Reason.NEVER_SEEN, 6, 8)]),
        (3, [(Reason.HOST_FULL, 2, 3), (Reason.NO_SNAPSHOT, 3, 5), (Reason.NEVER_SEEN, 5, 8)]),
        (1, [(Reason.NO_SNAPSHOT, 2, 5), (Reason.NEVER_SEEN, 5, 8)]),
    ],
)
def test_pages_that_a_slower_tier_kept_back_say_why(
    end_page: int, spans: list[tuple[Reason, int, int]]
) -> None:
    device = Device(keys_for(30), 5, frozenset(), frozenset({1}))
    host = HostView(shortfall=Shortfall(end_page, Reason.HOST_FULL))
    plan = planner(*HYBRID).plan(keys_for(30), 30, device, host)
    merged: dict[Reason, tuple[int, int]] = {}
    for reason, first, end in plan.uncached:
        merged[reason] = (merged.get(reason, (first, end))[0], end)
    assert [(reason, *span) for reason, span in merged.items()] == spans


@pytest.mark.parametrize(
    ("unlike_pages", "spans"),
    [
        (0, [(Reason.HOST_FULL, 0, 2), (Reason.NEVER_SEEN, 2, 5)]),
        (1, [(Reason.HOST_FULL, 0, 2), (Reason.NEVER_SEEN, 2, 5)]),
        (4, [(Reason.HOST_FULL, 0, 2), (Reason.OTHER_ARITHMETIC, 2, 4), (Reason.NEVER_SEEN, 4, 5)]),
        (9, [(Reason.HOST_FULL, 0, 2), (Reason.OTHER_ARITHMETIC, 2, 5)]),
    ],
)
def test_pages_that_were_seen_in_another_arithmetic_alone_say_so(
    unlike_pages: int, spans: list[tuple[Reason, int, int]]
) -> None:
    host = HostView(shortfall=Shortfall(2, Reason.HOST_FULL), unlike_pages=unlike_pages)
    plan = planner(*HYBRID).plan(keys_for(18), 18, nothing(18), host)
    assert list(plan.uncached) == spans


def test_an_arithmetic_is_not_blamed_for_what_this_one_has_seen() -> None:
    """The pages are here; their snapshot is not."""
    device = Device(keys_for(30), 5, frozenset(), frozenset({1}))
    plan = planner(*HYBRID).plan(keys_for(30), 30, device, HostView(unlike_pages=7))
    assert list(plan.uncached) == [
        (Reason.NO_SNAPSHOT, 2, 5),
        (Reason.OTHER_ARITHMETIC, 5, 7),
        (Reason.NEVER_SEEN, 7, 8),
    ]


def test_declined_loads_keep_the_other_arithmetic() -> None:
    units = {(k, p): unit(k, p) for k in HYBRID for p in (0, 1)}
    host = HostView(units, unlike_pages=4)
    plans = list(planner(*HYBRID).plans(keys_for(18), 18, nothing(18), host))
    assert plans[0].loads
    assert not plans[-1].loads
    assert Reason.OTHER_ARITHMETIC in {span.reason for span in plans[-1].uncached}


def test_recomputing_by_choice_is_not_blamed_on_a_slower_tier() -> None:
    host = HostView(
        {(k, p): unit(k, p) for k in HYBRID for p in (0, 1)}, Shortfall(2, Reason.RATE_LIMITED)
    )
    plan = planner(*HYBRID, load_cost=10.0).plan(keys_for(9), 9, nothing(9), host)
    assert plan.uncached[0].reason is Reason.CHEAPER_TO_RECOMPUTE
