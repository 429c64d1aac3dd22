"""The host tier's rules, one by one; `test_store_machine.py` has them all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError, InvalidRequest, LeaseLost, QueueFull
from ferryman.tiers.layout import ArenaLayout, PoolRegion, split_arena
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import (
    AcquireGrant,
    AcquireRequest,
    EvictionRefused,
    ReserveRequest,
    StoreLimits,
    UnitName,
    UnitStored,
    WorkerLife,
)

WORKER = WorkerLife("prefill-a", 1)
HYBRID = (Kind.FULL, Kind.RECURRENT)
ALL = (Kind.FULL, Kind.WINDOW, Kind.RECURRENT)


def store_with(limits: StoreLimits | None = None, **slots: int) -> HostStore:
    """A store with the given slots of each kind: store_with(full=4, recurrent=2)."""
    manifest = manifest_of(*(Kind(name) for name in slots))
    regions, offset = {}, 0
    for name, num_slots in slots.items():
        slot_bytes = manifest.layout(Kind(name)).slot_bytes
        regions[Kind(name)] = PoolRegion(offset, slot_bytes, num_slots)
        offset += slot_bytes * num_slots
    return HostStore(manifest, ArenaLayout(regions), limits or StoreLimits())


def reserve(
    store: HostStore, name: str, keys: Sequence[PageKey], units: Mapping[Kind, Sequence[int]]
) -> set[UnitName]:
    room = store.reserve(ReserveRequest(name, WORKER, keys, units), 0.0)
    return {(unit.kind, unit.page_index) for unit in room}


def put(store: HostStore, keys: Sequence[PageKey], snapshots: Sequence[int] = ()) -> int:
    units = {Kind.FULL: range(len(keys)), Kind.RECURRENT: snapshots}
    names = reserve(store, "put", keys, units)
    return store.commit("put", dict.fromkeys(names, b"d" * 16), 0.0) if names else 0


def get(
    store: HostStore, keys: Sequence[PageKey], name: str = "get", have: int = 0
) -> AcquireGrant:
    return store.acquire(AcquireRequest(name, WORKER, keys, have, 0, len(keys)), 0.0)


def test_a_group_becomes_visible_with_its_commit_and_not_before() -> None:
    store, keys = store_with(full=4, recurrent=2), chain(1, 2, 3)
    names = reserve(store, "one", keys, {Kind.FULL: range(3), Kind.RECURRENT: [2]})
    assert store.lookup(keys).usable_pages == 0
    assert store.drain_effects() == ()
    assert store.commit("one", dict.fromkeys(names, b"d" * 16), 1.0) == 4
    assert store.lookup(keys).usable_pages == 3
    stored = [effect for effect in store.drain_effects() if isinstance(effect, UnitStored)]
    assert len(stored) == 4
    assert {effect.root for effect in stored} == {keys[0]}


def test_a_reader_awaits_a_deeper_resume_point_that_another_worker_writes() -> None:
    """Its page decides, or its snapshot: pages alone are no place to resume a hybrid at."""
    other, keys = WorkerLife("decode-b", 1), chain(1, 2, 3, 4)
    full, hybrid = store_with(full=8), store_with(full=8, recurrent=4)

    def awaits(store: HostStore, most: int, least: int = 0, *busy: WorkerLife) -> bool:
        ask = AcquireRequest("get", other, chain(1, 2, 3, 9), 0, least, most)
        return store.is_awaited(ask, (other, *busy))

    for store in (full, hybrid):
        assert not awaits(store, 4), "nothing is written"
    reserve(full, "one", keys, {Kind.FULL: range(4)})
    reserve(hybrid, "one", keys, {Kind.FULL: range(4), Kind.RECURRENT: [1, 3]})
    for store in (full, hybrid):
        assert awaits(store, 4)
        assert not awaits(store, 4, 0, WORKER), "that writer is not waited for"
    assert awaits(full, 4, 2), "the third page"
    assert not awaits(full, 4, 3), "where the chains part"
    assert not awaits(hybrid, 4, 2), "the last snapshot is of another chain"
    assert not awaits(hybrid, 1), "deeper than the reader may resume"
    hybrid.release("one")
    assert not awaits(hybrid, 4), "the writer gave up"
    reserve(hybrid, "two", keys, {Kind.FULL: range(4), Kind.RECURRENT: [1]})
    hybrid.drop_chain(keys[0])
    assert not awaits(hybrid, 4), "it will not be visible"


def test_of_a_dropped_chain_nothing_stays_and_nothing_under_way_becomes_visible() -> None:
    store, keys, other = store_with(full=12, recurrent=4), chain(1, 2, 3), chain(7, 8)
    put(store, keys[:2], snapshots=[1])
    put(store, other, snapshots=[1])
    leased = get(store, keys[:2])
    names = reserve(store, "writer", keys, {Kind.FULL: range(3), Kind.RECURRENT: [2]})
    fork = reserve(store, "fork", chain(1, 9), {Kind.FULL: range(2), Kind.RECURRENT: [1]})
    assert store.drop_chain(keys[0]) == len(leased.units)
    assert store.drop_chain(keys[0]) == 0
    assert store.lookup(keys).usable_pages == 0
    for name, units in (("writer", names), ("fork", fork)):
        with pytest.raises(LeaseLost):
            store.commit(name, dict.fromkeys(units, b"d" * 16), 0.0)
    store.release("get")
    assert store.statistics().num_corrupt == 1
    assert put(store, keys, snapshots=[2]) == 4
    assert store.lookup(other).usable_pages == 2
    store.check_integrity()


@pytest.mark.parametrize("with_pages", [True, False], ids=["hybrid", "recurrent only"])
def test_a_chain_is_dropped_before_its_first_group_is_written(with_pages: bool) -> None:
    store = store_with(full=6, recurrent=6) if with_pages else store_with(recurrent=6)
    keys, units = chain(1, 2), {kind: [0, 1] for kind in store.manifest.kinds}
    room = reserve(store, "writer", keys, units)
    assert room
    assert store.drop_chain(keys[0]) == 0
    with pytest.raises(LeaseLost):
        store.commit("writer", dict.fromkeys(room, b"d" * 16), 0.0)
    room = reserve(store, "again", keys, units)
    assert store.commit("again", dict.fromkeys(room, b"d" * 16), 0.0) == len(room)
    assert store.drop_chain(keys[0]) == len(room)


def test_short_of_pages_the_largest_smaller_resume_point_gets_room() -> None:
    store = store_with(full=3, recurrent=2)
    room = reserve(store, "one", chain(1, 2, 3, 4), {Kind.FULL: range(4), Kind.RECURRENT: [1, 3]})
    assert room == {(Kind.FULL, 0), (Kind.FULL, 1), (Kind.RECURRENT, 1)}


def test_short_of_snapshots_the_deepest_one_is_kept() -> None:
    store = store_with(full=4, recurrent=1)
    room = reserve(store, "one", chain(1, 2, 3), {Kind.FULL: range(3), Kind.RECURRENT: [0, 2]})
    assert room == {(Kind.FULL, 0), (Kind.FULL, 1), (Kind.FULL, 2), (Kind.RECURRENT, 2)}


def test_short_of_window_pages_only_the_last_window_is_kept() -> None:
    store = store_with(full=4, window=2, recurrent=1)
    units = {Kind.FULL: range(4), Kind.WINDOW: range(4), Kind.RECURRENT: [3]}
    room = reserve(store, "one", chain(1, 2, 3, 4), units)
    assert {page for kind, page in room if kind is Kind.WINDOW} == {2, 3}
    assert (Kind.RECURRENT, 3) in room


def test_pages_behind_a_hole_have_no_place() -> None:
    store = store_with(full=4, recurrent=2)
    assert reserve(store, "one", chain(1, 2, 3), {Kind.FULL: [1, 2], Kind.RECURRENT: [2]}) == set()


def test_what_never_fits_evicts_nothing_in_vain() -> None:
    store = store_with(full=3, recurrent=3)
    put(store, chain(1, 1), snapshots=[1])
    assert reserve(store, "big", chain(*range(9)), {Kind.FULL: range(9)}) == set()
    assert get(store, chain(1, 1)).usable_pages == 2


def test_eviction_refuses_what_is_leased_and_says_so() -> None:
    store = store_with(full=2, recurrent=1)
    put(store, chain(1, 1), snapshots=[1])
    get(store, chain(1, 1))
    store.drain_effects()
    assert put(store, chain(2), snapshots=[0]) == 0
    assert EvictionRefused(Kind.FULL, 1) in store.drain_effects()
    store.release("get")
    assert put(store, chain(2), snapshots=[0]) == 2


def test_a_lease_on_a_state_alone_keeps_its_page() -> None:
    """Its holder has the pages on the device and loads only the state."""
    store = store_with(full=2, recurrent=2)
    put(store, chain(1, 1), snapshots=[1])
    grant = get(store, chain(1, 1), have=2)
    assert [unit.kind for unit in grant.units] == [Kind.RECURRENT]
    assert put(store, chain(2), snapshots=[0]) == 0
    assert store.lookup(chain(1, 1)).usable_pages == 2


def test_at_most_two_states_are_granted_the_deepest_ones() -> None:
    store, keys = store_with(full=5, recurrent=5), chain(1, 2, 3, 4, 5)
    put(store, keys, snapshots=[0, 1, 3, 4])
    states = [unit.page_index for unit in get(store, keys).units if unit.kind is Kind.RECURRENT]
    assert states == [3, 4]


def test_time_alone_never_frees_what_a_living_writer_may_write_to() -> None:
    store = store_with(full=2, recurrent=1)
    names = reserve(store, "slow", chain(1, 2), {Kind.FULL: range(2), Kind.RECURRENT: [1]})
    store.expire(1000.0)
    assert store.statistics().num_quarantined == 3
    assert put(store, chain(3)) == 0, "the room is not anybody else's yet"
    with pytest.raises(LeaseLost):
        store.commit("slow", dict.fromkeys(names, b"d" * 16), 1000.0)
    assert put(store, chain(3)) == 1, "a commit is the writer's word, even one too late"


def test_the_lease_of_a_reader_ends_with_its_time_and_no_later() -> None:
    store, keys = store_with(full=2, recurrent=1), chain(1, 2)
    put(store, keys, [1])
    assert get(store, keys, "reader").units
    store.expire(4.9)
    assert store.statistics().num_leases == 1
    store.expire(5.0)
    assert store.statistics().num_leases == 0
    assert put(store, chain(3), [0]) == 2, "what it kept makes room"


def test_a_lease_that_is_over_counts_for_nothing_before_the_sweep_finds_it() -> None:
    store, keys = store_with(full=4, recurrent=2), chain(1, 2)
    put(store, keys, [1])
    assert get(store, keys, "reader").units
    names = reserve(store, "writer", chain(3, 4), {Kind.FULL: range(2), Kind.RECURRENT: [1]})
    digests, end = dict.fromkeys(names, b"d" * 16), store.limits.lease_seconds
    assert store.renew(["reader", "writer"], end) == ("reader", "writer")
    with pytest.raises(LeaseLost):
        store.commit_arrived("writer", digests, end)
    with pytest.raises(LeaseLost):
        store.commit("writer", digests, end)
    assert store.lookup(chain(3, 4)).usable_pages == 0
    store.check_integrity()


def test_a_release_that_overtakes_its_reserve_wins() -> None:
    store = store_with(full=2)
    store.release("late")
    with pytest.raises(LeaseLost, match="released before"):
        reserve(store, "late", chain(1), {Kind.FULL: [0]})


def test_a_commit_names_just_what_was_reserved() -> None:
    store = store_with(full=2)
    reserve(store, "one", chain(1, 2), {Kind.FULL: [0, 1]})
    with pytest.raises(InvalidRequest):
        store.commit("one", {(Kind.FULL, 0): b"d" * 16}, 0.0)


def test_the_slower_of_two_writers_gives_its_room_back() -> None:
    store, keys = store_with(full=4), chain(1, 2)
    first = reserve(store, "first", keys, {Kind.FULL: [0, 1]})
    second = reserve(store, "second", keys, {Kind.FULL: [0, 1]})
    assert first == second
    assert store.commit("second", dict.fromkeys(second, b"2" * 16), 0.0) == 2
    assert store.commit("first", dict.fromkeys(first, b"1" * 16), 0.0) == 0
    assert {unit.digest for unit in get(store, keys).units} == {b"2" * 16}
    assert store.statistics().kinds[Kind.FULL].free == 2


def test_a_corrupt_page_takes_all_that_stands_on_it() -> None:
    store, keys = store_with(full=6, recurrent=3), chain(1, 2, 3)
    put(store, keys, snapshots=[0, 2])
    put(store, chain(1, 9))
    assert store.drop_corrupt(Kind.FULL, keys[1]) == 3
    assert store.lookup(keys).usable_pages == 1
    assert store.lookup(chain(1, 9)).pages[Kind.FULL] == (0, 1)
    store.check_integrity()


def test_a_group_whose_base_was_dropped_does_not_become_visible() -> None:
    store, keys = store_with(full=4), chain(1, 2)
    put(store, keys[:1])
    names = reserve(store, "one", keys, {Kind.FULL: [1]})
    store.drop_corrupt(Kind.FULL, keys[0])
    with pytest.raises(LeaseLost):
        store.commit("one", dict.fromkeys(names, b"d" * 16), 0.0)
    assert store.statistics().kinds[Kind.FULL].free == 4


def test_the_deepest_chain_of_many_units_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was walked for each of them: 3.8 s of the event loop for 8,192 pages."""
    store, keys = store_with(full=40, recurrent=2), chain(*range(1, 33))
    put(store, keys, snapshots=[15])
    put(store, chain(1, 2, 99))
    walked: list[PageKey] = []
    walk = store._tree.chain

    def counted(key: PageKey) -> tuple[PageKey, ...]:
        walked.append(key)
        return walk(key)

    monkeypatch.setattr(store._tree, "chain", counted)
    assert store.deepest_chain([(Kind.FULL, key) for key in keys]) == keys
    assert store.deepest_chain([(Kind.RECURRENT, keys[15]), (Kind.FULL, keys[3])]) == keys[:16]
    assert walked == [keys[31], keys[15]]
    assert store.deepest_chain([(Kind.RECURRENT, keys[0]), (Kind.FULL, chain(7)[0])]) == ()


def test_leases_are_bounded() -> None:
    store = store_with(StoreLimits(max_leases=1, max_reservations=1), full=4)
    put(store, chain(1))
    get(store, chain(1), "first")
    with pytest.raises(QueueFull):
        get(store, chain(1), "second")
    reserve(store, "first", chain(2), {Kind.FULL: [0]})
    with pytest.raises(QueueFull):
        reserve(store, "second", chain(3), {Kind.FULL: [0]})


def test_an_arena_is_split_without_overlap_and_too_small_a_one_is_refused() -> None:
    manifest = manifest_of(*ALL)
    layout = split_arena(manifest, 1 << 16, 0.5)
    ends = [r.offset + r.slot_bytes * r.num_slots for r in layout.regions.values()]
    begins = [region.offset for region in layout.regions.values()]
    assert all(end <= begin for end, begin in zip(ends, [*begins[1:], 1 << 16], strict=True))
    assert all(region.num_slots for region in layout.regions.values())
    with pytest.raises(ConfigError, match="no room for one full unit of"):
        split_arena(manifest, 4096, 0.5)
