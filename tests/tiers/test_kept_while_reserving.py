"""Units that a group continues are not evicted to make room for it: pages, window and snapshot."""

from __future__ import annotations

import pytest
from tests.tiers.all_or_nothing import AllOrNothing
from tests.tiers.state_shapes import chain, manifest_of
from tests.tiers.test_store import WORKER, store_with

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.extents import ExtentTable, lay_out_extent
from ferryman.tiers.prefetch import (
    PrefetchPlanner,
    PrefetchSource,
    RoomPolicyOf,
    Truncate,
)
from ferryman.tiers.prefetch_values import PrefetchRequest, PrefetchShortfall
from ferryman.tiers.storage import StorageStore
from ferryman.tiers.storage_values import StorageLimits
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import ReserveRequest, UnitName

KEYS, OTHER = chain(1, 2, 3, 4, 5, 6), chain(9)
MISSING: dict[Kind, list[int]] = {Kind.WINDOW: [5], Kind.RECURRENT: [5]}


def put(store: HostStore, keys: tuple[bytes, ...], now: float, units: list[UnitName]) -> None:
    pages: dict[Kind, list[int]] = {}
    for kind, page in units:
        pages.setdefault(kind, []).append(page)
    assert store.reserve(ReserveRequest("put", WORKER, keys, pages), now)
    store.commit("put", dict.fromkeys(units, b"d" * 16), now)


def store_short_of_windows(num_windows: int) -> HostStore:
    """All pages are here and the first half of the window at their end; the second half and the
    snapshot are not. Another prompt's window is younger."""
    store = store_with(full=8, window=num_windows, recurrent=2)
    put(store, KEYS, 0.0, [*((Kind.FULL, page) for page in range(6)), (Kind.WINDOW, 4)])
    put(store, OTHER, 1.0, [(Kind.FULL, 0), (Kind.WINDOW, 0), (Kind.RECURRENT, 0)])
    return store


@pytest.mark.parametrize("policy", [Truncate, AllOrNothing])
def test_a_prefetch_does_not_evict_the_part_of_its_resume_set_that_is_here(
    policy: RoomPolicyOf,
) -> None:
    store = store_short_of_windows(2)
    grant = PrefetchPlanner(WORKER, policy, 1.0).reserve(
        store,
        PrefetchRequest(KEYS, 0, 6, 1),
        [PrefetchSource(Tier.STORAGE, "", MISSING)],
        lease_id="p",
        bytes_under_way=0,
        now=2.0,
    )
    assert (grant.granted, len(grant.room)) == (6, 2)
    assert store.lookup(KEYS).pages[Kind.WINDOW] == (4,)
    store.commit_arrived("p", dict.fromkeys(grant.names, b"d" * 16), 2.0)
    store.release("p")
    assert store.usable_pages(KEYS) == 6
    store.check_integrity()


def test_a_writer_does_not_evict_it_either_and_nobody_does_until_it_has_committed() -> None:
    store = store_short_of_windows(3)
    room = store.reserve(ReserveRequest("w", WORKER, KEYS, MISSING), 2.0)
    assert {(unit.kind, unit.page_index) for unit in room} == {
        (Kind.WINDOW, 5),
        (Kind.RECURRENT, 5),
    }
    thief = ReserveRequest("thief", WORKER, chain(7, 8), {Kind.FULL: [0, 1], Kind.WINDOW: [0, 1]})
    store.reserve(thief, 3.0)
    assert store.lookup(KEYS).pages[Kind.WINDOW] == (4,)
    store.commit("w", dict.fromkeys([(u.kind, u.page_index) for u in room], b"d" * 16), 3.0)
    store.release("thief")
    assert store.usable_pages(KEYS) == 6
    store.flush()
    for counts in store.statistics().kinds.values():
        assert counts.free == counts.total, "something is kept that nobody needs"


def test_where_both_cannot_be_there_at_once_nothing_is_evicted_for_it() -> None:
    store = store_with(full=8, window=1, recurrent=2)
    put(store, KEYS, 0.0, [*((Kind.FULL, page) for page in range(6)), (Kind.WINDOW, 4)])
    grant = PrefetchPlanner(WORKER, Truncate, 1.0).reserve(
        store,
        PrefetchRequest(KEYS, 0, 6, 1),
        [PrefetchSource(Tier.STORAGE, "", MISSING)],
        lease_id="p",
        bytes_under_way=0,
        now=2.0,
    )
    assert (grant.asked, grant.granted, grant.lack) == (6, 0, PrefetchShortfall.HOST_FULL)
    assert grant.room == ()
    assert store.lookup(KEYS).pages[Kind.WINDOW] == (4,)


def test_a_group_on_its_way_to_storage_does_not_evict_what_it_reuses_there() -> None:
    units = [*((Kind.FULL, page) for page in range(6)), (Kind.WINDOW, 4)]
    later = [(Kind.WINDOW, 5), (Kind.RECURRENT, 5)]
    manifest = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
    first = lay_out_extent(6, [manifest.layout(kind).slot_bytes for kind, _ in units])
    second = lay_out_extent(6, [manifest.layout(kind).slot_bytes for kind, _ in later])
    for missing, is_stored in ((0, True), (1, False)):
        capacity = first.file_bytes + second.file_bytes - missing
        store = StorageStore(manifest, StorageLimits(capacity), ExtentTable())
        plan = store.plan(KEYS, dict.fromkeys(units, b"d" * 16), 0.0)
        assert plan is not None
        store.commit(plan.generation, 0.0)
        plan = store.plan(KEYS, dict.fromkeys(later, b"d" * 16), 1.0)
        assert (plan is not None) == is_stored
        assert store.lookup(KEYS).pages[Kind.WINDOW] == (4,)
