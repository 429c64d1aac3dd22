"""Decisions of the storage tier, one case at a time; the state machine tries orders of events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import LeaseLost, QueueFull
from ferryman.tiers.extents import ExtentTable, RemoveExtent, aligned
from ferryman.tiers.storage import StorageStore
from ferryman.tiers.storage_values import (
    ExtentPlan,
    Flaw,
    FoundExtent,
    StorageLimits,
    StoreTruncated,
    UnitCorrupt,
)
from ferryman.tiers.values import StoredUnit, UnitForgotten, UnitName

HYBRID = manifest_of(Kind.FULL, Kind.RECURRENT)
PAGE = 4096  # what a small unit takes on disk, and a small header


def make(num_blocks: int, max_leases: int = 10) -> StorageStore:
    limits = StorageLimits(num_blocks * PAGE, 5.0, max_leases)
    return StorageStore(HYBRID, limits, ExtentTable())


def named(num_pages: int, snapshots: Sequence[int] = ()) -> dict[UnitName, bytes]:
    pages: list[UnitName] = [(Kind.FULL, page) for page in range(num_pages)]
    return dict.fromkeys([*pages, *((Kind.RECURRENT, page) for page in snapshots)], b"d" * 16)


def planned(
    store: StorageStore, keys: Sequence[PageKey], names: dict[UnitName, bytes]
) -> ExtentPlan:
    plan = store.plan(keys, names, 0.0)
    assert plan is not None
    return plan


def stored(
    store: StorageStore, keys: Sequence[PageKey], names: dict[UnitName, bytes]
) -> ExtentPlan:
    plan = planned(store, keys, names)
    assert store.commit(plan.generation, 0.0) == len(plan.units)
    return plan


def found(plan: ExtentPlan, units: Sequence[StoredUnit]) -> FoundExtent:
    header = plan.file_bytes - sum(aligned(unit.num_bytes) for unit in plan.units)
    size = header + sum(aligned(unit.num_bytes) for unit in units)
    digest = HYBRID.digest
    return FoundExtent(
        plan.generation, digest, plan.keys, tuple(units), header, size, plan.file_bytes
    )


def test_what_is_leased_stays_although_there_is_no_room_for_anything_else() -> None:
    store, keys = make(num_blocks=4), chain(1, 2)
    stored(store, keys, named(2, snapshots=[1]))
    units = store.lease("reader", keys, [(Kind.RECURRENT, 1)], 0.0)
    assert len(units) == 1
    assert store.plan(chain(3), named(1), 0.0) is None
    assert store.lookup(keys).usable_pages == 2, "the path of what is leased went"
    assert StoreTruncated(1, 0) in store.drain_effects()
    store.release("reader")
    stored(store, chain(3), named(1))
    assert store.lookup(keys).usable_pages == 0


def test_a_lease_ends_with_its_time_unless_it_is_renewed() -> None:
    store, keys = make(num_blocks=4), chain(1, 2)
    stored(store, keys, named(2, snapshots=[1]))
    store.lease("reader", keys, named(2), 0.0)
    assert store.renew(["reader", "nobody"], 4.0) == ("nobody",)
    store.expire(8.0)
    assert store.statistics().num_leases == 1
    store.expire(9.0)
    assert store.statistics().num_leases == 0
    assert store.renew(["reader"], 9.0) == ("reader",)


def test_a_lease_has_one_name_and_there_are_so_many() -> None:
    store, keys = make(num_blocks=4, max_leases=1), chain(1, 2)
    stored(store, keys, named(2))
    store.lease("reader", keys, named(2), 0.0)
    with pytest.raises(LeaseLost):
        store.lease("reader", keys, named(2), 0.0)
    with pytest.raises(QueueFull):
        store.lease("another", keys, named(2), 0.0)


def test_the_pages_below_a_group_stay_while_it_is_written() -> None:
    store, keys = make(num_blocks=6), chain(1, 2, 3)
    stored(store, keys[:2], named(2))
    plan = planned(store, keys, named(3))
    assert store.plan(chain(7, 8, 9), named(3), 0.0) is None
    assert store.commit(plan.generation, 0.0) == 1
    assert len(store.lookup(keys).pages[Kind.FULL]) == 3


def test_a_group_whose_pages_below_proved_corrupt_is_not_kept() -> None:
    store, keys = make(num_blocks=9), chain(1, 2, 3)
    below = stored(store, keys[:2], named(2))
    plan = planned(store, keys, named(3, snapshots=[2]))
    assert store.drop_corrupt(below.units[0], Flaw.DIGEST) == 2
    assert store.commit(plan.generation, 0.0) == 0
    gone = {each.generation for each in store.drain_work() if isinstance(each, RemoveExtent)}
    assert gone == {below.generation, plan.generation}
    assert store.statistics().used_bytes == 0


def test_of_a_dropped_chain_nothing_stays_and_what_is_being_written_comes_to_nothing() -> None:
    store, keys, other = make(num_blocks=30), chain(1, 2, 3), chain(7, 8)
    stored(store, keys[:2], named(2, snapshots=[1]))
    stored(store, other, named(2, snapshots=[1]))
    store.lease("reader", keys, named(2), 0.0)
    plan, fork = planned(store, keys, named(3)), planned(store, chain(1, 9), named(2))
    beside = planned(store, chain(7, 9), named(2))
    assert store.drop_chain(keys[0]) == 3
    assert store.drop_chain(keys[0]) == 0
    assert store.commit(plan.generation, 0.0) == store.commit(fork.generation, 0.0) == 0
    assert store.commit(beside.generation, 0.0) > 0
    stored(store, keys, named(3))
    assert store.lookup(other).usable_pages == 2


def test_a_chain_is_dropped_before_its_first_group_is_on_disk() -> None:
    store, keys = make(num_blocks=9), chain(1, 2)
    plan = planned(store, keys, named(2, snapshots=[1]))
    assert store.drop_chain(keys[0]) == 0
    assert store.commit(plan.generation, 0.0) == 0
    assert store.statistics().used_bytes == 0


def test_with_a_corrupt_page_goes_what_stands_on_it() -> None:
    store, keys = make(num_blocks=9), chain(1, 2, 3)
    plan = stored(store, keys, named(3, snapshots=[1, 2]))
    store.drain_effects()
    assert store.drop_corrupt(plan.units[1], Flaw.SEAL) == 4
    effects = store.drain_effects()
    assert effects[-1] == UnitCorrupt(Kind.FULL, keys[1], Flaw.SEAL, 4)
    assert len([e for e in effects if isinstance(e, UnitForgotten)]) == 4
    assert store.lookup(keys).pages[Kind.FULL] == (0,)


def test_a_page_takes_its_place_below_one_that_was_written_before_it() -> None:
    """Two stores of one prompt, planned at once and ended in the other order, then a new start."""
    store, keys = make(num_blocks=9), chain(1, 2)
    longer, shorter = planned(store, keys, named(2)), planned(store, keys[:1], named(1))
    assert longer.generation < shorter.generation
    assert store.commit(shorter.generation, 0.0) == 1
    assert store.commit(longer.generation, 0.0) == 1
    again = make(num_blocks=9)
    again.restore([found(longer, longer.units[1:]), found(shorter, shorter.units)], 0.0)
    assert again.lookup(keys).pages[Kind.FULL] == (0, 1)


def test_a_chain_that_is_none_is_a_miss() -> None:
    store, keys = make(num_blocks=9), chain(1, 2, 3)
    stored(store, keys, named(3))
    assert store.lease("reader", keys[::-1], [(Kind.FULL, 0), (Kind.FULL, 2)], 0.0) == ()


def test_a_store_that_was_given_up_takes_no_room() -> None:
    store, keys = make(num_blocks=4), chain(1, 2, 3)
    plan = planned(store, keys, named(3))
    assert store.statistics().used_bytes == plan.file_bytes
    store.abort(plan.generation)
    assert store.statistics().used_bytes == 0
    stored(store, keys, named(3))


WITH_WINDOWS = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)


@pytest.mark.parametrize(
    ("num_pages", "windows", "snapshots", "gives_way"),
    [
        pytest.param(8, (), (1, 3, 5, 7), Kind.RECURRENT, id="snapshots have more than a half"),
        pytest.param(12, (), (0,), Kind.FULL, id="pages have more than a half"),
        # 2 KiB of pages are 5 for their four tenths; 1 KiB of windows are 10 for their tenth.
        pytest.param(8, range(8), (0,), Kind.WINDOW, id="windows have more than their tenth"),
    ],
)
def test_the_kind_that_has_most_of_its_share_gives_way(
    num_pages: int, windows: Sequence[int], snapshots: Sequence[int], gives_way: Kind
) -> None:
    keys = chain(*range(1, num_pages + 1))
    names = named(num_pages, snapshots) | dict.fromkeys(
        [(Kind.WINDOW, page) for page in windows], b"d" * 16
    )
    room = len(names) + 1  # each unit has a block, and so has the header
    store = StorageStore(WITH_WINDOWS, StorageLimits(room * PAGE, 5.0, 10), ExtentTable())
    stored(store, keys, names)
    before = store.statistics()
    assert before.used_bytes == room * PAGE, "no room is left"
    stored(store, chain(99), named(1))
    after = store.statistics()
    evicted = {kind: after.kinds[kind].num_evicted for kind in WITH_WINDOWS.kinds}
    assert {kind for kind, number in evicted.items() if number} == {gives_way}
    assert 1 <= evicted[gives_way] <= 3


def test_a_large_shortage_is_met_by_each_kind_above_its_share_in_turn() -> None:
    """After each part the kind that has most of its share is looked for anew."""
    store = make(num_blocks=12 + 6 + 1)
    stored(store, chain(*range(1, 13)), named(12, snapshots=range(6)))
    stored(store, chain(*range(101, 109)), named(8))  # nine blocks with its header
    kinds = store.statistics().kinds
    assert (kinds[Kind.RECURRENT].num_evicted, kinds[Kind.FULL].num_evicted) == (4, 5)
