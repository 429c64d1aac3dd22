"""The prefix tree against a naive model: no slot is lost or owned twice, and held paths survive."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ferryman.cache.keys import as_token_ids, page_keys
from ferryman.cache.manifest import Kind
from ferryman.cache.node import Branch, TreeChange
from ferryman.cache.slots import SlotHandle
from ferryman.cache.tree import PrefixTree

KINDS = (Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
INNER = st.sets(st.integers(0, 4), max_size=4)


def keys_of(path: Sequence[int]) -> tuple[bytes, ...]:
    return page_keys(b"root", as_token_ids([token for token in path for _ in range(2)]), 2)


def alone(handle: SlotHandle) -> bool:
    return True


def full_branch(path: Sequence[int], first_slot: int = 0) -> Branch:
    slots = {page: SlotHandle(Kind.FULL, first_slot + page, 1) for page in range(len(path))}
    return Branch(keys_of(path), {Kind.FULL: slots})


def test_evicting_a_window_keeps_the_node() -> None:
    tree = PrefixTree(KINDS)
    window = SlotHandle(Kind.WINDOW, 7, 1)
    branch = full_branch([0, 1])
    tree.insert(Branch(branch.keys, {**branch.units, Kind.WINDOW: {0: window}}), 1.0)
    assert tree.evict(Kind.WINDOW, 1, alone) == [window]
    assert tree.match_depth(branch.keys) == 2
    assert not tree.has(Kind.WINDOW, branch.keys[0])


def test_the_tree_keeps_its_own_slot_and_names_the_duplicate() -> None:
    tree = PrefixTree(KINDS)
    tree.insert(full_branch([0, 0]), 1.0)
    inserted = tree.insert(full_branch([0, 1], first_slot=10), 2.0)
    mine, theirs = SlotHandle(Kind.FULL, 10, 1), SlotHandle(Kind.FULL, 0, 1)
    assert inserted.duplicates == ((0, mine, theirs),)
    assert inserted.adopted == (SlotHandle(Kind.FULL, 11, 1),)


def test_the_least_recently_used_leaf_goes_first_and_its_parent_after_it() -> None:
    tree = PrefixTree(KINDS)
    tree.insert(full_branch([0, 0], 0), 1.0)
    tree.insert(full_branch([1, 1], 10), 2.0)
    tree.touch(keys_of([0, 0])[-1], 3.0)
    gone = [handle.slot for handle in tree.evict(Kind.FULL, 3, alone)]
    assert gone == [11, 10, 1]


def test_a_snapshot_that_somebody_else_holds_is_left_alone() -> None:
    tree = PrefixTree(KINDS)
    snapshot = SlotHandle(Kind.RECURRENT, 3, 1)
    branch = full_branch([0])
    tree.insert(Branch(branch.keys, {**branch.units, Kind.RECURRENT: {0: snapshot}}), 1.0)
    assert tree.evict(Kind.RECURRENT, 1, lambda handle: False) == []
    assert tree.evict(Kind.RECURRENT, 1, alone) == [snapshot]


def test_bare_leaves_of_a_model_without_full_layers_are_pruned() -> None:
    tree = PrefixTree((Kind.RECURRENT,))
    snapshot = SlotHandle(Kind.RECURRENT, 0, 1)
    tree.insert(Branch(keys_of([0, 1]), {Kind.RECURRENT: {1: snapshot}}), 1.0)
    tree.evict(Kind.RECURRENT, 1, alone)
    assert tree.match_depth(keys_of([0, 1])) <= 1
    tree.check_integrity()


def test_pages_that_come_together_are_one_change_for_each_kind() -> None:
    tree = PrefixTree(KINDS)
    branch, keys = full_branch([0, 1, 0]), keys_of([0, 1, 0])
    window = {Kind.WINDOW: {2: SlotHandle(Kind.WINDOW, 7, 1)}}
    tree.insert(Branch(branch.keys, {**branch.units, **window}), 1.0)
    assert tree.drain_changes() == (
        TreeChange(Kind.FULL, keys, True),
        TreeChange(Kind.WINDOW, keys[2:], True),
    )
    tree.evict(Kind.FULL, 1, alone)
    gone = [TreeChange(kind, keys[2:], False) for kind in (Kind.FULL, Kind.WINDOW)]
    assert list(tree.drain_changes()) == gone


def windowed(path: Sequence[int], snapshots: Sequence[int], first_slot: int) -> Branch:
    """A branch with a window on every page, and snapshots after some."""
    pages = full_branch(path, first_slot)
    units = {
        Kind.WINDOW: {n: SlotHandle(Kind.WINDOW, first_slot + n, 1) for n in range(len(path))},
        Kind.RECURRENT: {n: SlotHandle(Kind.RECURRENT, first_slot + n, 1) for n in snapshots},
    }
    return Branch(pages.keys, {**pages.units, **units})


def test_a_page_in_the_windows_of_two_snapshots_outlives_one_of_them() -> None:
    tree = PrefixTree(KINDS, window_pages=2)
    tree.insert(windowed([0, 0, 0], [1, 2], 0), 1.0)
    tree.insert(windowed([1], [0], 10), 0.5)
    tree.drop(Kind.RECURRENT, keys_of([0, 0, 0])[2])
    assert {handle.slot for handle in tree.evict(Kind.WINDOW, 2, alone)} == {2, 10}


class TreeMachine(RuleBasedStateMachine):
    """Random branches, holds and evictions against a dictionary of the expected content.

    A window has up to three pages, and any page of a branch may have one. `windows` are the pages
    that a snapshot is useless without, by its key, if all were there when it came.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(KINDS)
        self.window_pages = 0
        self.windows: dict[bytes, tuple[bytes, ...]] = {}
        self.model: dict[bytes, dict[Kind, SlotHandle]] = {}
        self.paths: dict[bytes, tuple[bytes, ...]] = {}
        self.held: list[bytes] = []
        self.now = 0.0
        self.next_slot = 0

    @initialize(window_pages=st.integers(0, 3))
    def begin(self, window_pages: int) -> None:
        self.tree, self.window_pages = PrefixTree(KINDS, window_pages=window_pages), window_pages

    def fresh(self, kind: Kind) -> SlotHandle:
        self.next_slot += 1
        return SlotHandle(kind, self.next_slot, 1)

    @rule(path=PATHS, with_windows=INNER, with_snapshots=INNER)
    def insert(self, path: list[int], with_windows: set[int], with_snapshots: set[int]) -> None:
        keys = keys_of(path)
        known = sum(key in self.model for key in keys)
        own_from = min(known, len(path) - 1)
        units = {Kind.FULL: {page: self.fresh(Kind.FULL) for page in range(own_from, len(path))}}
        for kind, inner in ((Kind.WINDOW, with_windows), (Kind.RECURRENT, with_snapshots)):
            # Counted from the end: most windows and snapshots are there.
            own = sorted(len(path) - 1 - page for page in inner if page < len(path))
            units[kind] = {page: self.fresh(kind) for page in own}
        self.now += 1
        inserted = self.tree.insert(Branch(keys, units), self.now)
        adopted, duplicates = set(inserted.adopted), {own for _, own, _ in inserted.duplicates}
        for kind, pages in units.items():
            for page, handle in pages.items():
                self.paths[keys[page]] = keys[: page + 1]
                there = self.model.setdefault(keys[page], {})
                assert (handle in adopted) == (kind not in there)
                assert (handle in duplicates) == (kind in there)
                there.setdefault(kind, handle)
        new = {page for page, handle in units[Kind.RECURRENT].items() if handle in adopted}
        for page in new | {len(path) - 1}:
            self.note_windows(keys[: page + 1])

    def note_windows(self, path: Sequence[bytes]) -> None:
        """A snapshot serves from now on if it has its window, and keeps that."""
        window = tuple(path[-self.window_pages :]) if self.window_pages else ()
        is_whole = all(Kind.WINDOW in self.model[key] for key in window)
        if Kind.RECURRENT in self.model[path[-1]] and is_whole:
            self.windows[path[-1]] = window

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 99))
    def hold(self, pick: int) -> None:
        key = sorted(self.model)[pick % len(self.model)]
        self.now += 1
        self.tree.hold(key, self.now)
        self.held.append(key)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        self.tree.release(self.held.pop(pick % len(self.held)))

    @rule(kind=st.sampled_from(KINDS), num_slots=st.integers(1, 5))
    def evict(self, kind: Kind, num_slots: int) -> None:
        protected = {key for held in self.held for key in self.paths[held]}
        useful, useless = self.useful(kind), self.useless(kind)
        dropped = self.tree.evict(kind, num_slots, alone)
        if kind is not Kind.FULL and dropped and useless:
            assert dropped[0] not in useful, "what serves no request goes first"
        for handle in dropped:
            (key,) = [key for key, slots in self.model.items() if handle in slots.values()]
            del self.model[key][handle.kind]
            if handle.kind is Kind.FULL:
                assert key not in protected, "a held path lost a page"
        self.model = {key: slots for key, slots in self.model.items() if slots}
        self.windows = {
            key: window
            for key, window in self.windows.items()
            if all(Kind.WINDOW in self.model.get(page, {}) for page in window)
            and Kind.RECURRENT in self.model.get(key, {})
        }
        freed = sum(handle.kind is kind for handle in dropped)
        left = sum(kind in slots for key, slots in self.model.items() if key not in protected)
        assert freed == num_slots or left == 0 or kind is not Kind.FULL
        assert freed == num_slots or not any(kind in s for s in self.model.values()) or left == 0

    def useful(self, kind: Kind) -> set[SlotHandle]:
        """The units that a request can resume by, as far as is certain."""
        if kind is Kind.RECURRENT:
            return {self.model[key][kind] for key in self.windows}
        return {self.model[page][kind] for window in self.windows.values() for page in window}

    def useless(self, kind: Kind) -> set[SlotHandle]:
        """The units that no request can resume by: a snapshot whose window lacks a page, and a page
        in the window of no snapshot."""
        if not self.window_pages:
            return set()
        points = {key: slots for key, slots in self.model.items() if Kind.RECURRENT in slots}
        windows = {key: self.paths[key][-self.window_pages :] for key in points}
        if kind is Kind.RECURRENT:
            return {
                slots[kind]
                for key, slots in points.items()
                if not all(Kind.WINDOW in self.model[page] for page in windows[key])
            }
        needed = {page for window in windows.values() for page in window}
        return {
            slots[kind] for key, slots in self.model.items() if kind in slots and key not in needed
        }

    @rule(path=PATHS)
    def match(self, path: list[int]) -> None:
        keys = keys_of(path)
        depth = 0
        while depth < len(keys) and keys[depth] in self.model:
            depth += 1
        assert self.tree.match_depth(keys) == depth
        snapshots = [d for d in range(depth, 0, -1) if Kind.RECURRENT in self.model[keys[d - 1]]]
        assert list(self.tree.snapshot_depths(keys, depth)) == snapshots

    @invariant()
    def agrees(self) -> None:
        self.tree.check_integrity()
        held = sorted(self.tree.handles())
        assert held == sorted(handle for slots in self.model.values() for handle in slots.values())


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
