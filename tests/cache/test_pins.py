"""Pins: what callers asked to keep is evicted last, for a time, and holds nobody up."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.cache.test_eviction import HYBRID, Slots, grow, snapshots_in_order
from tests.cache.test_tree import KINDS, alone, keys_of

from ferryman.cache.manifest import Kind
from ferryman.cache.tree import MAX_PINNED_PATHS, PrefixTree

OWNER, OTHER = b"owner", b"other"
DAY = 86_400.0


def pin(
    tree: PrefixTree, path: list[int], seconds: float, now: float, owner: bytes = OWNER
) -> None:
    tree.pin(keys_of(path), now + seconds, owner, now)
    tree.check_integrity()


def test_a_pinned_snapshot_outlives_better_ones_until_its_time_is_over() -> None:
    tree, slots = PrefixTree(HYBRID, path_snapshots=4), Slots()
    grow(tree, slots, [1] * 2, 0.0, snapshots=[2])
    grow(tree, slots, [2] * 6, 0.0, snapshots=[6])
    assert snapshots_in_order(tree, slots)[0] == (1, 1)
    pin(tree, [1] * 2, 300, 0.0)
    assert snapshots_in_order(tree, slots) == [(2,) * 6, (1, 1)]
    grow(tree, slots, [3] * 3, 299.0, snapshots=[3])
    assert snapshots_in_order(tree, slots)[-1] == (1, 1)
    grow(tree, slots, [4] * 3, 300.0, snapshots=[3])
    assert snapshots_in_order(tree, slots)[0] == (1, 1)
    tree.check_integrity()


def test_another_use_of_the_mark_keeps_it_as_long_again() -> None:
    tree, slots = PrefixTree(HYBRID, path_snapshots=4), Slots()
    grow(tree, slots, [1] * 2, 0.0, snapshots=[2])
    pin(tree, [1] * 2, 300, 0.0)
    pin(tree, [1] * 2, 300, 200.0)
    pin(tree, [1] * 2, 5, 210.0)
    grow(tree, slots, [2] * 6, 499.0, snapshots=[6])
    assert snapshots_in_order(tree, slots)[-1] == (1, 1)
    grow(tree, slots, [3] * 6, 500.0, snapshots=[6])
    assert snapshots_in_order(tree, slots)[0] == (1, 1)


def test_the_path_to_a_pin_stays_with_it() -> None:
    """Evicting a page takes all units of its node."""
    tree, slots = PrefixTree(HYBRID, path_snapshots=4), Slots()
    grow(tree, slots, [1] * 4, 0.0, snapshots=[4])
    grow(tree, slots, [2] * 4, 9.0, snapshots=[4])
    pin(tree, [1] * 4, DAY, 9.0)
    dropped = tree.evict(Kind.FULL, 4, alone)
    assert {slots.names[handle][1][0] for handle in dropped} == {2}
    assert tree.match_depth(keys_of([1] * 4)) == 4


def test_a_pin_holds_nobody_up() -> None:
    tree, slots = PrefixTree(HYBRID, path_snapshots=4), Slots()
    for number in range(4):
        grow(tree, slots, [number] * 3, 0.0, snapshots=[3])
        pin(tree, [number] * 3, DAY, 0.0)
    gone = tree.try_evict({Kind.RECURRENT: 4, Kind.FULL: 12}, alone)
    assert gone is not None
    assert len(gone) == 16
    assert len(tree) == 0
    tree.check_integrity()


def test_a_mark_without_a_snapshot_pins_the_one_before_it() -> None:
    tree, slots = PrefixTree(HYBRID, path_snapshots=4), Slots()
    grow(tree, slots, [1] * 6, 0.0, snapshots=[2])
    grow(tree, slots, [2] * 9, 0.0, snapshots=[9])
    pin(tree, [1] * 5, DAY, 0.0)
    assert snapshots_in_order(tree, slots) == [(2,) * 9, (1, 1)]
    pin(tree, [3, 3], DAY, 0.0)  # not there: no effect
    pin(tree, [1], DAY, 0.0)


def test_the_path_s_own_bound_gives_up_what_is_not_pinned_first() -> None:
    tree, slots = PrefixTree(HYBRID, path_snapshots=2), Slots()
    grow(tree, slots, [1] * 8, 0.0, snapshots=[1, 6])
    pin(tree, [1], DAY, 0.0)
    (dropped,) = grow(tree, slots, [1] * 9, 1.0, snapshots=[9])
    assert slots.names[dropped][1] == (1,) * 6


def test_an_owner_has_so_many_pins_and_all_owners_twice_as_many() -> None:
    tree, slots = PrefixTree(HYBRID, path_snapshots=2), Slots()
    grow(tree, slots, [1] * 2, 0.0, snapshots=[2])
    for number in range(2, 7):
        grow(tree, slots, [number] * 3, 0.0, snapshots=[3])
    for path in ([1] * 2, [2] * 3, [3] * 3):
        pin(tree, path, DAY, 0.0)
    order = snapshots_in_order(tree, slots)
    assert (order[0], set(order[-2:])) == ((1, 1), {(2,) * 3, (3,) * 3}), "its oldest pin ended"
    for number, owner in ((4, OTHER), (5, OTHER), (6, b"third")):
        pin(tree, [number] * 3, DAY, 0.0, owner)
    last = snapshots_in_order(tree, slots)[-4:]
    assert set(last) == {(3,) * 3, (4,) * 3, (5,) * 3, (6,) * 3}, "the oldest of all ended"
    assert len(tree._pins) == 4, "two for an owner, four for all"


def test_pages_of_a_model_without_states_are_pinned_alike() -> None:
    tree, slots = PrefixTree((Kind.FULL,)), Slots()
    for number in range(MAX_PINNED_PATHS + 2):
        grow(tree, slots, [number] * 2, float(number))
        pin(tree, [number] * 2, DAY, float(number))
    grow(tree, slots, [99] * 2, 100.0)
    order = [slots.names[handle][1] for handle in tree.evict(Kind.FULL, 6, alone)]
    assert {path[0] for path in order} == {0, 1, 99}


PATH = st.lists(st.integers(0, 2), min_size=1, max_size=5)
ACTS = st.one_of(
    st.tuples(st.just("grow"), PATH, st.integers(0, 5)),
    st.tuples(st.just("pin"), PATH, st.sampled_from([1, 7, 60])),
    st.tuples(st.just("evict"), st.sampled_from(KINDS), st.integers(1, 3)),
    st.tuples(st.just("touch"), PATH, st.just(0)),
)


# A pin in its last second goes after all that is not pinned, like any other.
LAST_SECOND = [
    ("grow", [0, 1, 0], 2),
    ("pin", [0, 1], 7),
    ("grow", [1], 1),
    ("pin", [1], 7),
    ("evict", Kind.FULL, 1),
    *[("grow", [0], 0)] * 4,
]


@settings(max_examples=150)
@given(acts=st.lists(ACTS, max_size=40), most=st.integers(1, 3))
@example(acts=LAST_SECOND, most=2)
@pytest.mark.parametrize("kinds", [HYBRID, KINDS], ids=["hybrid", "all kinds"])
def test_at_any_time_unpinned_snapshots_go_before_pinned_ones(
    kinds: tuple[Kind, ...], acts: list[tuple[str, object, int]], most: int
) -> None:
    """And the tree stays whole, whatever is evicted, pinned again or over."""
    tree, slots, now = PrefixTree(kinds, path_snapshots=most), Slots(), 0.0
    pinned: dict[bytes, float] = {}
    for act, what, number in acts:
        now += 1.0
        if act == "grow":
            assert isinstance(what, list)
            depth = min(number, len(what))
            grow(tree, slots, what, now, snapshots=[depth] if depth else [])
        elif act == "pin":
            assert isinstance(what, list)
            tree.pin(keys_of(what), now + number, OWNER, now)
            depth = next(tree.snapshot_depths(keys_of(what), tree.match_depth(keys_of(what))), 0)
            if depth:
                key = keys_of(what)[depth - 1]
                others = {k: end for k, end in pinned.items() if end > now and k != key}
                kept = list(others.items())[max(0, len(others) - most + 1) :]
                # For one more the oldest ends, for good.
                pinned = {**dict(kept), key: max(pinned.get(key, 0.0), now + number)}
        elif act == "evict":
            assert isinstance(what, Kind)
            if what in kinds:
                tree.evict(what, number, alone)
        elif isinstance(what, list) and tree.match_depth(keys_of(what)) == len(what):
            tree.touch(keys_of(what)[-1], now)
        tree.check_integrity()
        held = {key for kind, key in tree.units() if kind is Kind.RECURRENT}
        pinned = {k: until for k, until in pinned.items() if k in held and until > now}
        order = list(tree.next_to_evict(Kind.RECURRENT, alone))
        live = [key in pinned for key in order]
        if act == "grow" and kinds == HYBRID:
            assert live == sorted(live)


def test_what_a_pin_leaves_behind_is_evicted_as_any_other() -> None:
    """A snapshot that is dropped takes its pin along: its page, and the pages of its window that
    another point needs, have their own ranks again."""
    tree, slots = PrefixTree(KINDS, window_pages=2, path_snapshots=4), Slots()
    grow(tree, slots, [1] * 4, 0.0, snapshots=[3, 4], windows=[1, 2, 3])
    grow(tree, slots, [2] * 3, 0.0, snapshots=[3], windows=[1, 2])
    for path in ([1] * 3, [2] * 3):
        pin(tree, path, DAY, 0.0)
        tree.drop(Kind.RECURRENT, keys_of(path)[-1])
        tree.check_integrity()


def test_a_window_that_is_whole_again_is_pinned_again() -> None:
    """Also the page in its middle that another point needs, and was queued for that one."""
    tree, slots = PrefixTree(KINDS, window_pages=3, path_snapshots=4), Slots()
    grow(tree, slots, [1] * 4, 0.0, snapshots=[3, 4], windows=[0, 1, 2, 3])
    pin(tree, [1] * 3, DAY, 0.0)
    tree.drop(Kind.WINDOW, keys_of([1] * 4)[0])
    tree.check_integrity()
    grow(tree, slots, [1] * 4, 1.0, windows=[0])
    tree.touch(keys_of([1] * 3)[-1], 2.0)
    tree.check_integrity()


WINDOWS = {
    "beside all": KINDS,
    "beside states": (Kind.WINDOW, Kind.RECURRENT),
    "beside pages": (Kind.FULL, Kind.WINDOW),
    "alone": (Kind.WINDOW,),
}


@settings(max_examples=150)
@given(acts=st.lists(ACTS, max_size=40))
@pytest.mark.parametrize("kinds", WINDOWS.values(), ids=WINDOWS.keys())
def test_pins_leave_no_unit_where_no_eviction_finds_it(
    kinds: tuple[Kind, ...], acts: list[tuple[str, object, int]]
) -> None:
    """A pin's window is pinned with it, so its pages change their ranks with that of the point."""
    tree, slots, now = PrefixTree(kinds, window_pages=2, path_snapshots=2), Slots(), 0.0
    for act, what, number in acts:
        now += 1.0
        if isinstance(what, Kind):
            if what in kinds:
                tree.evict(what, number, alone)
        elif isinstance(what, list) and act == "grow":
            depth = min(number, len(what))
            states, pages = [depth] if depth else [], range(max(0, depth - 2), len(what))
            grow(tree, slots, what, now, snapshots=states, windows=pages)
        elif isinstance(what, list) and act == "pin":
            tree.pin(keys_of(what), now + number, OWNER, now)
        elif isinstance(what, list) and tree.match_depth(keys_of(what)) == len(what):
            tree.touch(keys_of(what)[-1], now)
        tree.check_integrity()
    for kind in kinds:
        tree.evict(kind, 1000, alone)
    assert not list(tree.units())
    assert not len(tree)
