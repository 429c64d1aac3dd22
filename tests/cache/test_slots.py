"""Pools: leases, generations, conservation."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import (
    TREE,
    Holder,
    LeaseError,
    Pools,
    Prepare,
    Role,
    SlotHandle,
    SlotPool,
    StaleHandle,
)

REQUEST = Holder(Role.REQUEST, "r1")
OTHER = Holder(Role.REQUEST, "r2")


def test_a_demand_over_all_pools_is_met_whole_or_not_at_all() -> None:
    pools = Pools({Kind.FULL: 4, Kind.RECURRENT: 1})
    assert pools.try_allocate({Kind.FULL: 2, Kind.RECURRENT: 2}, REQUEST) is None
    assert pools[Kind.FULL].num_free == 4
    assert pools.try_allocate({Kind.FULL: 2, Kind.RECURRENT: 1}, REQUEST) is not None
    assert pools.shortage({Kind.FULL: 3}) == {Kind.FULL: 1}


def test_a_stale_handle_is_an_error_that_names_both_generations() -> None:
    pool = SlotPool(Kind.FULL, 1)
    (old,) = pool.try_allocate(1, REQUEST) or ()
    pool.release(old, REQUEST)
    (new,) = pool.try_allocate(1, OTHER) or ()
    assert old.slot == new.slot
    with pytest.raises(StaleHandle, match=r"generation 1, the slot is at 2"):
        pool.release(old, REQUEST)


def test_a_donated_slot_is_the_trees_and_can_not_be_freed_by_its_giver() -> None:
    pool = SlotPool(Kind.RECURRENT, 1)
    (handle,) = pool.try_allocate(1, REQUEST) or ()
    pool.move(handle, REQUEST, TREE)
    with pytest.raises(LeaseError):
        pool.release(handle, REQUEST)
    assert pool.ledger().by_role == {"tree": 1}


def test_a_ledger_of_many_leased_slots_takes_as_many_calls_as_of_one() -> None:
    assert _num_calls(_pool_with(64).ledger) == _num_calls(_pool_with(1).ledger)


def _pool_with(num_leased: int) -> SlotPool:
    pool = SlotPool(Kind.FULL, 64)
    pool.try_allocate(num_leased, REQUEST)
    return pool


def _num_calls(run: Callable[[], object]) -> int:
    """Calls, and turns of generators, until `run` returns."""
    events = Counter[str]()
    sys.setprofile(lambda frame, event, arg: events.update((event,)))
    try:
        run()
    finally:
        sys.setprofile(None)
    return events.total()


def test_a_slot_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = SlotPool(Kind.FULL, 1)
    (handle,) = pool.try_allocate(1, REQUEST) or ()
    pool.lease(handle, Holder(Role.TRANSFER_IN, "writer"))
    assert pool.release(handle, REQUEST) is False
    assert pool.try_allocate(1, OTHER) is None
    assert pool.release(handle, Holder(Role.TRANSFER_IN, "writer")) is True
    with pytest.raises(LeaseError, match="is free"):
        pool.lease(handle, OTHER)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a naive multiset of (slot, holder)."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(Kind.FULL, 6)
        self.held: list[tuple[SlotHandle, Holder]] = []

    @rule(count=st.integers(0, 4), name=st.sampled_from("abc"))
    def allocate(self, count: int, name: str) -> None:
        holder = Holder(Role.REQUEST, name)
        free = 6 - len({handle for handle, _ in self.held})
        handles = self.pool.try_allocate(count, holder)
        assert (handles is None) == (count > free)
        self.held += [(handle, holder) for handle in handles or ()]

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), name=st.sampled_from("abc"))
    def lease(self, pick: int, name: str) -> None:
        handle, _ = self.held[pick % len(self.held)]
        holder = Holder(Role.TRANSFER_OUT, name)
        self.pool.lease(handle, holder)
        self.held.append((handle, holder))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), role=st.sampled_from(Role), name=st.sampled_from("abc"))
    def move(self, pick: int, role: Role, name: str) -> None:
        handle, giver = self.held.pop(pick % len(self.held))
        taker = Holder(role, name)
        self.pool.move(handle, giver, taker)
        self.held.append((handle, taker))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        handle, holder = self.held.pop(pick % len(self.held))
        freed = self.pool.release(handle, holder)
        assert freed == (handle not in {other for other, _ in self.held})

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity()
        ledger = self.pool.ledger()
        assert ledger.balances
        assert ledger.leased == len({handle for handle, _ in self.held})
        kept = {(handle, holder.role.value) for handle, holder in self.held}
        assert ledger.by_role == Counter(role for _, role in kept)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_slot_is_made_ready_before_it_is_given_for_the_first_time() -> None:
    asked: list[int] = []

    def prepare(kind: Kind, slot: int) -> int:
        asked.append(slot)
        return (slot // 3 + 1) * 3

    pool = SlotPool(Kind.FULL, 7, prepare)
    given = pool.try_allocate(5, REQUEST) or ()
    assert asked == [4]
    for handle in given:
        pool.release(handle, REQUEST)
    pool.try_allocate(7, REQUEST)
    assert asked == [4, 6]


def memory_of(num_slots: int) -> Prepare:
    """Memory for so many slots of each kind, and none for a later one."""
    return lambda kind, slot: min(slot + 1, num_slots)


def test_a_pool_ends_where_its_memory_ends() -> None:
    pool = SlotPool(Kind.FULL, 7, memory_of(5))
    assert pool.try_allocate(6, REQUEST) is None
    assert (pool.num_slots, pool.num_free) == (5, 5)
    given = pool.try_allocate(5, REQUEST) or ()
    assert [handle.slot for handle in given] == [0, 1, 2, 3, 4]
    pool.check_integrity()


def test_a_demand_takes_nothing_where_the_memory_of_one_kind_is_short() -> None:
    pools = Pools({Kind.FULL: 7, Kind.RECURRENT: 7}, memory_of(5))
    assert pools.try_allocate({Kind.FULL: 2, Kind.RECURRENT: 6}, REQUEST) is None
    assert [ledger.leased for ledger in pools.ledgers().values()] == [0, 0]
    pools.check_integrity()
