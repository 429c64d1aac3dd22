"""The order of eviction: value and recency in one number, and useless units before all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.test_tree import KINDS, PATHS, alone, keys_of

from ferryman.cache.manifest import Kind
from ferryman.cache.node import Branch
from ferryman.cache.slots import SlotHandle
from ferryman.cache.tree import PrefixTree

HYBRID = (Kind.FULL, Kind.RECURRENT)


class Slots:
    """Makes fresh handles, and remembers the page of each."""

    def __init__(self) -> None:
        self.names: dict[SlotHandle, tuple[Kind, tuple[int, ...]]] = {}

    def fresh(self, kind: Kind, path: Sequence[int]) -> SlotHandle:
        handle = SlotHandle(kind, len(self.names), 1)
        self.names[handle] = kind, tuple(path)
        return handle


def grow(
    tree: PrefixTree,
    slots: Slots,
    path: Sequence[int],
    now: float,
    snapshots: Sequence[int] = (),
    windows: Sequence[int] = (),
) -> tuple[SlotHandle, ...]:
    """Adds a path; `snapshots` are depths, `windows` pages. Returns the dropped snapshots."""
    units: Mapping[Kind, dict[int, SlotHandle]] = {
        Kind.FULL: {p: slots.fresh(Kind.FULL, path[: p + 1]) for p in range(len(path))},
        Kind.RECURRENT: {d - 1: slots.fresh(Kind.RECURRENT, path[:d]) for d in snapshots},
        Kind.WINDOW: {p: slots.fresh(Kind.WINDOW, path[: p + 1]) for p in windows},
    }
    branch = Branch(keys_of(path), {kind: units[kind] for kind in tree.kinds})
    return tree.insert(branch, now).dropped


def snapshots_in_order(tree: PrefixTree, slots: Slots) -> list[tuple[int, ...]]:
    named = {keys_of(path)[-1]: path for kind, path in slots.names.values()}
    return [named[key] for key in tree.next_to_evict(Kind.RECURRENT, alone)]


def test_of_two_snapshots_of_one_age_the_one_that_saves_less_goes_first() -> None:
    tree, slots = PrefixTree(HYBRID), Slots()
    grow(tree, slots, [1] * 5, 1.0, snapshots=[5])
    grow(tree, slots, [2] * 2, 1.0, snapshots=[2])
    assert snapshots_in_order(tree, slots) == [(2,) * 2, (1,) * 5]


def test_a_snapshot_saves_only_what_the_one_before_it_does_not() -> None:
    tree, slots = PrefixTree(HYBRID), Slots()
    grow(tree, slots, [1] * 6, 1.0, snapshots=[5, 6])
    grow(tree, slots, [2] * 3, 1.0, snapshots=[3])
    assert snapshots_in_order(tree, slots) == [(1,) * 6, (2,) * 3, (1,) * 5]


def test_a_valuable_snapshot_that_nobody_uses_goes_in_the_end() -> None:
    """Each eviction raises the clock, and later units start above it."""
    tree, slots = PrefixTree(HYBRID), Slots()
    grow(tree, slots, [9] * 6, 0.0, snapshots=[6])
    for index in range(20):
        grow(tree, slots, [index % 2, index], 1.0 + index, snapshots=[2])
        (gone,) = tree.evict(Kind.RECURRENT, 1, alone)
        if slots.names[gone][1] == (9,) * 6:
            break
    assert 2 <= index <= 4, "it outlived as many others as it is worth more than one"


def test_a_snapshot_where_branches_part_outlives_one_that_saves_as_much() -> None:
    tree, slots = PrefixTree(HYBRID), Slots()
    grow(tree, slots, [1, 1], 1.0, snapshots=[2])
    grow(tree, slots, [2, 2], 2.0, snapshots=[2])
    grow(tree, slots, [1, 1, 0], 1.0)
    grow(tree, slots, [1, 1, 1], 1.0)
    assert snapshots_in_order(tree, slots) == [(2, 2), (1, 1)]


def test_a_window_without_its_snapshot_goes_before_one_that_is_older() -> None:
    tree, slots = PrefixTree(KINDS, window_pages=2), Slots()
    grow(tree, slots, [1] * 4, 1.0, snapshots=[4], windows=[2, 3])
    grow(tree, slots, [2] * 6, 2.0, snapshots=[6], windows=[4, 5])
    tree.drop(Kind.RECURRENT, keys_of([2] * 6)[-1])
    gone = [slots.names[handle][1] for handle in tree.evict(Kind.WINDOW, 4, alone)]
    assert {path[0] for path in gone[:2]} == {2}
    assert {path[0] for path in gone[2:]} == {1}


def test_a_snapshot_that_lost_a_window_page_goes_first_and_so_does_the_rest_of_it() -> None:
    tree, slots = PrefixTree(KINDS, window_pages=2), Slots()
    grow(tree, slots, [1] * 2, 1.0, snapshots=[2], windows=[0, 1])
    grow(tree, slots, [2] * 6, 2.0, snapshots=[6], windows=[4, 5])
    assert snapshots_in_order(tree, slots)[0] == (1,) * 2
    tree.drop(Kind.WINDOW, keys_of([2] * 6)[4])
    assert snapshots_in_order(tree, slots)[0] == (2,) * 6
    assert next(tree.next_to_evict(Kind.WINDOW, alone)) == keys_of([2] * 6)[5]


def test_a_page_that_comes_back_is_as_young_as_its_return() -> None:
    tree, slots = PrefixTree(HYBRID), Slots()
    grow(tree, slots, [1], 1.0, snapshots=[1])
    assert len(tree.evict(Kind.FULL, 1, alone)) == 2
    grow(tree, slots, [2], 2.0, snapshots=[1])
    grow(tree, slots, [1], 3.0, snapshots=[1])
    assert list(tree.next_to_evict(Kind.FULL, alone)) == [keys_of([2])[0], keys_of([1])[0]]
    assert len(list(tree.next_to_evict(Kind.RECURRENT, alone))) == 2


def test_using_a_resume_point_keeps_its_whole_window() -> None:
    tree, slots = PrefixTree((Kind.FULL, Kind.WINDOW), window_pages=2), Slots()
    grow(tree, slots, [1] * 4, 1.0, windows=[2, 3])
    grow(tree, slots, [2] * 4, 2.0, windows=[2, 3])
    tree.touch(keys_of([1] * 4)[-1], 3.0)
    first = [slots.names[handle][1][0] for handle in tree.evict(Kind.WINDOW, 2, alone)]
    assert first == [2, 2]


def test_a_path_keeps_its_newest_snapshot_and_those_that_save_most() -> None:
    """Row 44: one conversation of many turns does not take all snapshots of the others."""
    tree, slots = PrefixTree(HYBRID, path_snapshots=4), Slots()
    dropped: list[SlotHandle] = []
    for depth in range(1, 33):
        dropped += grow(tree, slots, [1] * depth, float(depth), snapshots=[depth])
    kept = sorted(len(path) for path in snapshots_in_order(tree, slots))
    assert (len(kept), kept[-1], len(dropped)) == (4, 32, 28)
    gaps = [after - before for before, after in zip([0, *kept], kept, strict=False)]
    assert max(gaps[:-1]) <= 24, f"what is kept is spread over the path: {kept}"
    tree.check_integrity()


def test_row_44_forks_keep_their_snapshot_when_a_path_has_too_many() -> None:
    tree, slots = PrefixTree(HYBRID, path_snapshots=3), Slots()
    grow(tree, slots, [1, 1], 0.0, snapshots=[2])
    grow(tree, slots, [1, 1, 7], 0.0)
    for depth in range(3, 30):
        grow(tree, slots, [1] * depth, float(depth), snapshots=[depth])
    kept = snapshots_in_order(tree, slots)
    assert (1, 1) in kept
    assert len(kept) == 3


@pytest.mark.parametrize(
    "lacks", [{Kind.FULL: 7}, {Kind.RECURRENT: 3}, {Kind.FULL: 2, Kind.RECURRENT: 3}]
)
def test_what_cannot_be_met_in_all_pools_costs_nothing(lacks: Mapping[Kind, int]) -> None:
    tree, slots = PrefixTree(HYBRID), Slots()
    grow(tree, slots, [1] * 3, 1.0, snapshots=[3])
    grow(tree, slots, [2] * 4, 1.0, snapshots=[4])
    tree.hold(keys_of([1])[0], 2.0)
    tree.drain_changes()
    before = list(tree.units())
    assert tree.try_evict(lacks, alone) is None
    assert (list(tree.units()), tree.drain_changes()) == (before, ())
    given = tree.try_evict({Kind.FULL: 6, Kind.RECURRENT: 2}, alone)
    assert given is not None
    assert len(given) == 8, "all but the page that is held"


def test_snapshots_that_go_with_their_pages_count_as_freed() -> None:
    tree, slots = PrefixTree(HYBRID), Slots()
    grow(tree, slots, [1] * 3, 1.0, snapshots=[3])
    grow(tree, slots, [2] * 4, 2.0, snapshots=[4])
    given = tree.try_evict({Kind.FULL: 3, Kind.RECURRENT: 1}, alone)
    assert given is not None
    assert {slots.names[handle][1][0] for handle in given} == {1}


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(
        st.tuples(PATHS, st.booleans(), st.booleans(), st.sampled_from(["grow", "hold", "touch"])),
        min_size=1,
        max_size=12,
    ),
    kind=st.sampled_from(KINDS),
    leased=st.sets(st.integers(0, 30)),
    lack=st.integers(1, 9),
)
def test_the_order_read_is_the_order_in_which_units_go(
    script: list[tuple[list[int], bool, bool, str]], kind: Kind, leased: set[int], lack: int
) -> None:
    tree, slots = PrefixTree(KINDS, window_pages=1, path_snapshots=3), Slots()
    for now, (path, has_window, has_snapshot, what) in enumerate(script):
        key = keys_of(path)[-1]
        if what == "grow" or tree.match_depth(keys_of(path)) < len(path):
            windows = [len(path) - 1] if has_window else []
            grow(tree, slots, path, now, [len(path)] if has_snapshot else [], windows)
        elif what == "hold":
            tree.hold(key, now)
        else:
            tree.touch(key, now)
    tree.check_integrity()

    def is_free(handle: SlotHandle) -> bool:
        return handle.slot not in leased

    told = list(tree.next_to_evict(kind, is_free))
    assert told == list(tree.next_to_evict(kind, is_free)), "reading changes nothing"
    assert len(set(told)) == len(told)
    twin = deepcopy(tree)
    met = tree.try_evict({kind: lack}, is_free)
    assert (met is not None) == (len(told) >= lack)
    if met is not None:
        gone = [handle for handle in met if handle.kind is kind and is_free(handle)]
        assert [keys_of(slots.names[handle][1])[-1] for handle in gone] == told[:lack]
    tree.check_integrity()
    everything = twin.evict(kind, len(told) + 5, is_free)
    assert sum(h.kind is kind and is_free(h) for h in everything) >= len(told)
    twin.check_integrity()
