"""`resume_set` against a table of literal values; the plan against a brute-force search over every
position; its reasons and its demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.manifests import small_manifest

from ferryman.cache.keys import as_token_ids, page_keys
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.planner import Planner
from ferryman.cache.resume import (
    EMPTY_HOST,
    ClearState,
    CopyState,
    HostView,
    LoadState,
    Reason,
    ResumeCosts,
    ResumePlan,
    resume_set,
)
from ferryman.cache.units import HostUnit

PAGE = 4
ALL = (Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
PARTIAL = (ALL[:2], ALL[1:], (Kind.WINDOW,), (Kind.RECURRENT,))


@dataclass(frozen=True)
class Device:
    """A device view by plain sets of page indices of one chain."""

    keys: tuple[bytes, ...]
    full: int
    windows: frozenset[int]
    snapshots: frozenset[int]

    def match_depth(self, keys: Sequence[bytes]) -> int:
        return min(self.full, len(keys))

    def snapshot_depths(self, keys: Sequence[bytes], depth: int) -> Iterator[int]:
        yield from (d for d in range(depth, 0, -1) if d - 1 in self.snapshots)

    def has(self, kind: Kind, key: bytes) -> bool:
        page = self.keys.index(key)
        here = {Kind.FULL: page < self.full, Kind.WINDOW: page in self.windows}
        return page < self.full and here.get(kind, page in self.snapshots)


def keys_for(prompt_len: int) -> tuple[bytes, ...]:
    return page_keys(b"root", as_token_ids(range(prompt_len)), PAGE)


def unit(kind: Kind, page: int) -> HostUnit:
    return HostUnit(kind, page, bytes([page]), 0, 64, b"")


def planner(*kinds: Kind, window_len: int = 0, load_cost: float = 0.0) -> Planner:
    manifest = small_manifest(*kinds, window_len=window_len)
    return Planner(manifest, ResumeCosts(1.0, load_cost), step_tokens=8)


def usable(
    manifest: StateManifest, position: int, device: Device, host: HostView
) -> tuple[bool, int]:
    """Brute force: whether the whole resume set of `position` is cached, and the units to load."""
    needs, missing = resume_set(manifest, position), 0
    wanted = [(Kind.FULL, page) for page in range(needs.full.first, needs.full.end)]
    wanted += [(Kind.WINDOW, page) for page in range(needs.window.first, needs.window.end)]
    if needs.needs_snapshot:
        wanted.append((Kind.RECURRENT, position // PAGE - 1))
    for kind, page in wanted:
        if device.has(kind, device.keys[page]):
            continue
        if (kind, page) not in host.units:
            return False, 0
        missing += 1
    return True, missing


@settings(max_examples=300, deadline=None)
@given(
    prompt_len=st.integers(1, 30),
    kinds=st.sampled_from([ALL, (Kind.FULL,), (Kind.FULL, Kind.RECURRENT), *PARTIAL]),
    full=st.integers(0, 7),
    windows=st.frozensets(st.integers(0, 6)),
    snapshots=st.frozensets(st.integers(0, 6)),
    on_host=st.frozensets(st.tuples(st.sampled_from(ALL), st.integers(0, 6))),
    load_cost=st.sampled_from([0.0, 0.001, 0.05, 10.0]),
)
def test_the_plan_is_the_cheapest_position_whose_resume_set_is_resident(
    prompt_len: int,
    kinds: tuple[Kind, ...],
    full: int,
    windows: frozenset[int],
    snapshots: frozenset[int],
    on_host: frozenset[tuple[Kind, int]],
    load_cost: float,
) -> None:
    window_len = 6 if Kind.WINDOW in kinds else 0
    keys = keys_for(prompt_len)
    device = Device(keys, min(full, len(keys)), windows, snapshots)
    host = HostView({(k, p): unit(k, p) for k, p in on_host if k in kinds and p < len(keys)})
    subject = planner(*kinds, window_len=window_len, load_cost=load_cost)
    plan = subject.plan(keys, prompt_len, device, host)

    costs = {0: float(prompt_len)}
    for depth in range(1, (prompt_len - 1) // PAGE + 1):
        fits, loads = usable(subject.manifest, depth * PAGE, device, host)
        if fits:
            costs[depth * PAGE] = loads * 64 * load_cost + prompt_len - depth * PAGE
    assert plan.position in costs, "the plan resumes where something is missing"
    assert plan.seconds == pytest.approx(min(costs.values()))
    assert costs[plan.position] == pytest.approx(plan.seconds)
    check_plan(plan, subject.manifest, prompt_len, device)


def check_plan(plan: ResumePlan, manifest: StateManifest, prompt_len: int, device: Device) -> None:
    pages = -(-prompt_len // PAGE)
    explained = [page for span in plan.uncached for page in range(span.first_page, span.end_page)]
    assert explained == list(range(plan.position // PAGE, pages)), "every page has one reason"
    loaded = [unit.page_index for unit in plan.loads if unit.kind is Kind.FULL]
    if Kind.FULL in manifest.kinds:
        covered = list(range(plan.anchor_pages)) + loaded
        assert covered == list(range(plan.position // PAGE))
        assert plan.demand[Kind.FULL] == pages - plan.anchor_pages
    if Kind.RECURRENT in manifest.kinds:
        assert plan.demand[Kind.RECURRENT] == 1 + len(plan.snapshots)
        assert all(plan.position < s <= prompt_len and s % PAGE == 0 for s in plan.snapshots)
        initialiser = {ClearState: 0, CopyState: 0, LoadState: 1}[type(plan.initialiser)]
        assert sum(unit.kind is Kind.RECURRENT for unit in plan.loads) == initialiser
        assert isinstance(plan.initialiser, ClearState) == (plan.position == 0)


def test_a_path_known_deeper_than_any_snapshot_gets_one_where_it_is_left() -> None:
    keys = keys_for(30)
    device = Device(keys, 5, frozenset(), frozenset({1}))
    plan = planner(Kind.FULL, Kind.RECURRENT).plan(keys, 30, device, EMPTY_HOST)
    assert plan.position == 8
    assert plan.initialiser == CopyState(keys[1])
    assert plan.snapshots == (20, 28)
    assert [(span.reason, span.first_page, span.end_page) for span in plan.uncached] == [
        (Reason.NO_SNAPSHOT, 2, 5),
        (Reason.NEVER_SEEN, 5, 8),
    ]


def test_one_token_is_always_computed() -> None:
    keys = keys_for(16)
    device = Device(keys, 4, frozenset(), frozenset(range(4)))
    plan = planner(Kind.FULL, Kind.RECURRENT).plan(keys, 16, device, EMPTY_HOST)
    assert plan.position == 12
    assert [span.reason for span in plan.uncached] == [Reason.PAGE_ALIGNMENT]


def test_a_slow_tier_does_not_win_against_recomputation() -> None:
    keys = keys_for(9)
    host = HostView({(k, p): unit(k, p) for k in (Kind.FULL, Kind.RECURRENT) for p in (0, 1)})
    device = Device(keys, 0, frozenset(), frozenset())
    slow = planner(Kind.FULL, Kind.RECURRENT, load_cost=10.0).plan(keys, 9, device, host)
    quick = planner(Kind.FULL, Kind.RECURRENT).plan(keys, 9, device, host)
    assert (slow.position, slow.uncached[0].reason) == (0, Reason.CHEAPER_TO_RECOMPUTE)
    assert (quick.position, len(quick.loads)) == (8, 3)
    assert quick.demand[Kind.FULL] == 3, "loaded pages need slots as computed ones do"


def test_decode_wants_only_what_it_lacks_at_the_end_of_the_prompt() -> None:
    keys = keys_for(14)
    device = Device(keys, 2, frozenset({1}), frozenset({1}))
    plan = planner(*ALL, window_len=6).plan_receive(keys, 14, device)
    assert (plan.position, plan.anchor_pages) == (14, 2)
    assert plan.window_pages == ()
    assert plan.demand[Kind.FULL] == 2
    assert plan.demand[Kind.RECURRENT] == 1


def test_decode_loads_what_the_host_has_of_the_rest() -> None:
    keys = keys_for(18)  # four full pages, and two tokens of a fifth
    device = Device(keys, 1, frozenset(), frozenset())
    here = [(Kind.FULL, 0), (Kind.FULL, 1), (Kind.FULL, 3), (Kind.WINDOW, 2), (Kind.WINDOW, 3)]
    host = HostView({name: unit(*name) for name in [*here, (Kind.RECURRENT, 3)]})
    plan = planner(*ALL, window_len=6).plan_receive(keys, 18, device, host)
    loaded = [(each.kind, each.page_index) for each in plan.loads]
    assert loaded == [(Kind.FULL, 1), (Kind.FULL, 3), (Kind.WINDOW, 3)]
    assert plan.demand[Kind.FULL] == 4, "loaded pages need slots as received ones do"
    assert plan.load_bytes == sum(each.num_bytes for each in plan.loads)


def test_planning_twice_changes_nothing() -> None:
    keys = keys_for(20)
    device = Device(keys, 3, frozenset(), frozenset({2}))
    subject = planner(Kind.FULL, Kind.RECURRENT)
    assert subject.plan(keys, 20, device, EMPTY_HOST) == subject.plan(keys, 20, device, EMPTY_HOST)


# (window length, position) → full pages [0, end), window pages [first, end), with pages of four.
# Counted by hand: a query at position p reads [p - W + 1, p], and p itself is computed.
RESUME_SETS = {
    (6, 0): (0, (0, 0), False),
    (6, 1): (1, (0, 1), True),
    (6, 4): (1, (0, 1), True),
    (6, 5): (2, (0, 2), True),
    (6, 8): (2, (0, 2), True),
    (6, 9): (3, (1, 3), True),
    (6, 12): (3, (1, 3), True),
    (6, 13): (4, (2, 4), True),
    (6, 16): (4, (2, 4), True),
    (6, 17): (5, (3, 5), True),
    (5, 8): (2, (1, 2), True),
    (5, 7): (2, (0, 2), True),
    (5, 9): (3, (1, 3), True),
    (4, 6): (2, (0, 2), True),
    (4, 7): (2, (1, 2), True),
    (4, 8): (2, (1, 2), True),
    (2, 8): (2, (1, 2), True),
    (2, 9): (3, (2, 3), True),
    (1, 7): (2, (1, 2), True),
    (1, 8): (2, (2, 2), True),
    (1, 9): (3, (2, 3), True),
    (100, 8): (2, (0, 2), True),
}


@pytest.mark.parametrize(("window_len", "position"), RESUME_SETS)
def test_a_resume_set_is_what_was_counted_by_hand(window_len: int, position: int) -> None:
    full_end, window, needs_snapshot = RESUME_SETS[window_len, position]
    for kinds in (ALL, *PARTIAL, (Kind.FULL,), (Kind.FULL, Kind.RECURRENT)):
        manifest = small_manifest(*kinds, window_len=window_len if Kind.WINDOW in kinds else 0)
        found = resume_set(manifest, position)
        assert found.position == position
        assert (found.full.first, found.full.end) == (0, full_end if Kind.FULL in kinds else 0)
        pages = range(found.window.first, found.window.end)
        assert set(pages) == (set(range(*window)) if Kind.WINDOW in kinds else set())
        assert found.needs_snapshot == (needs_snapshot and Kind.RECURRENT in kinds)


# Pages of 4 tokens, a window of 6. The product has the window's formula once; this table has none.
# position: full pages, window pages, whether a snapshot is needed
TABLE = {
    0: ((0, 0), (0, 0), False),
    1: ((0, 1), (0, 1), True),
    3: ((0, 1), (0, 1), True),
    4: ((0, 1), (0, 1), True),
    5: ((0, 2), (0, 2), True),
    8: ((0, 2), (0, 2), True),
    9: ((0, 3), (1, 3), True),
    12: ((0, 3), (1, 3), True),
    13: ((0, 4), (2, 4), True),
    16: ((0, 4), (2, 4), True),
    17: ((0, 5), (3, 5), True),
    20: ((0, 5), (3, 5), True),
    400: ((0, 100), (98, 100), True),
    401: ((0, 101), (99, 101), True),
}


@pytest.mark.parametrize("position", TABLE)
def test_what_must_be_there_to_resume(position: int) -> None:
    needs = resume_set(small_manifest(*Kind, window_len=6), position)
    found = tuple(needs.full), tuple(needs.window), needs.needs_snapshot
    assert (needs.position, found) == (position, TABLE[position])


@pytest.mark.parametrize("kind", Kind)
def test_a_model_needs_only_what_it_has(kind: Kind) -> None:
    window_len = 6 if kind is Kind.WINDOW else 0
    needs = resume_set(small_manifest(kind, window_len=window_len), 9)
    assert tuple(needs.full) == ((0, 3) if kind is Kind.FULL else (0, 0))
    assert tuple(needs.window) == ((1, 3) if kind is Kind.WINDOW else (0, 0))
    assert needs.needs_snapshot == (kind is Kind.RECURRENT)
