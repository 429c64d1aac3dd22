"""The prefix tree against a naive model: no slot is lost or owned twice, and held paths survive."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ferryman.cache.keys import as_token_ids, page_keys
from ferryman.cache.manifest import Kind
from ferryman.cache.node import Branch, TreeChange
from ferryman.cache.slots import SlotHandle
from ferryman.cache.tree import PrefixTree

KINDS = (Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


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


class TreeMachine(RuleBasedStateMachine):
    """Random branches, holds and evictions against a dictionary of the expected content."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(KINDS)
        self.model: dict[bytes, dict[Kind, SlotHandle]] = {}
        self.paths: dict[bytes, tuple[bytes, ...]] = {}
        self.held: list[bytes] = []
        self.now = 0.0
        self.next_slot = 0

    def fresh(self, kind: Kind) -> SlotHandle:
        self.next_slot += 1
        return SlotHandle(kind, self.next_slot, 1)

    @rule(path=PATHS, with_window=st.booleans(), with_snapshot=st.booleans())
    def insert(self, path: list[int], with_window: bool, with_snapshot: bool) -> None:
        keys = keys_of(path)
        known = sum(key in self.model for key in keys)
        own_from = min(known, len(path) - 1)
        units = {Kind.FULL: {page: self.fresh(Kind.FULL) for page in range(own_from, len(path))}}
        if with_window:
            units[Kind.WINDOW] = {len(path) - 1: self.fresh(Kind.WINDOW)}
        if with_snapshot:
            units[Kind.RECURRENT] = {len(path) - 1: self.fresh(Kind.RECURRENT)}
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
        dropped = self.tree.evict(kind, num_slots, alone)
        for handle in dropped:
            (key,) = [key for key, slots in self.model.items() if handle in slots.values()]
            del self.model[key][handle.kind]
            if handle.kind is Kind.FULL:
                assert key not in protected, "a held path lost a page"
        self.model = {key: slots for key, slots in self.model.items() if slots}
        freed = sum(handle.kind is kind for handle in dropped)
        left = sum(kind in slots for key, slots in self.model.items() if key not in protected)
        assert freed == num_slots or left == 0 or kind is not Kind.FULL
        assert freed == num_slots or not any(kind in s for s in self.model.values()) or left == 0

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
