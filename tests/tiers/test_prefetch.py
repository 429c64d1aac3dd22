"""The room that a prefetch asks for, the room it is granted, and the rest if it is cut short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.memory_index import usable_depth
from tests.tiers.all_or_nothing import AllOrNothing
from tests.tiers.state_shapes import PAGE_SIZE, chain
from tests.tiers.test_store import store_with

from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.slots import Demand, Holder, Pools, SlotHandle
from ferryman.cache.units import Tier
from ferryman.errors import LeaseLost
from ferryman.tiers.prefetch import (
    PrefetchGrant,
    PrefetchPlanner,
    PrefetchSource,
    RoomLimits,
    RoomPolicyOf,
    Truncate,
    in_order,
)
from ferryman.tiers.prefetch_values import PrefetchPolicy, PrefetchRequest, PrefetchShortfall
from ferryman.tiers.store import HostStore
from ferryman.tiers.unit_group import GroupChoice, Room, RoomPolicy, WriteOffer
from ferryman.tiers.values import ReserveRequest, StoreLimits, UnitName, WorkerLife

HOST = WorkerLife("node-0", 1)
ALL = (Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
KINDS = [(Kind.FULL,), (Kind.FULL, Kind.RECURRENT), (Kind.FULL, Kind.WINDOW), ALL]
NUM_PAGES = 8
KEYS = chain(*range(1, NUM_PAGES + 1))
DIGEST = b"d" * 16


def source(full: int, snapshots: Sequence[int] = (), windows: Sequence[int] = ()) -> PrefetchSource:
    pages = {Kind.FULL: range(full), Kind.RECURRENT: snapshots, Kind.WINDOW: windows}
    return PrefetchSource(Tier.STORAGE, "", pages)


def ask(have: int = 0, threshold_tokens: int = PAGE_SIZE) -> PrefetchRequest:
    return PrefetchRequest(KEYS, have, NUM_PAGES, threshold_tokens)


def reserve(
    store: HostStore,
    *sources: PrefetchSource,
    want: PrefetchRequest | None = None,
    policy: RoomPolicyOf = Truncate,
    share: float = 1.0,
) -> PrefetchGrant:
    return PrefetchPlanner(HOST, policy, share).reserve(
        store, want or ask(), sources, lease_id="p", bytes_under_way=0, now=0.0
    )


def arrive(store: HostStore, names: Iterable[UnitName]) -> tuple[UnitName, ...]:
    return store.commit_arrived("p", dict.fromkeys(names, DIGEST), 1.0)


# Granted units.


def test_all_is_granted_where_there_is_room() -> None:
    store = store_with(full=8, recurrent=2)
    grant = reserve(store, source(8, [7]))
    assert (grant.before, grant.asked, grant.granted, grant.lack) == (0, 8, 8, None)
    assert set(arrive(store, grant.names)) == set(grant.names)
    assert store.lookup(KEYS).usable_pages == 8


def test_short_of_pages_the_deepest_snapshot_that_fits_is_granted() -> None:
    grant = reserve(store_with(full=6, recurrent=2), source(8, [2, 4, 7]))
    assert (grant.asked, grant.granted, grant.lack) == (8, 5, PrefetchShortfall.HOST_FULL)
    assert {page for kind, page in grant.names if kind is Kind.FULL} == set(range(5))
    assert (Kind.RECURRENT, 4) in grant.names


def test_pages_without_any_snapshot_are_worth_nothing() -> None:
    store = store_with(full=8, recurrent=2)
    grant = reserve(store, source(8))
    assert (grant.asked, grant.room) == (0, ())


def test_only_the_snapshot_is_brought_where_only_it_is_missing() -> None:
    store = store_with(full=8, recurrent=2)
    assert store.reserve(ReserveRequest("w", HOST, KEYS, {Kind.FULL: range(8)}), 0.0)
    store.commit("w", {(Kind.FULL, page): DIGEST for page in range(8)}, 0.0)
    grant = reserve(store, source(8, [5]))
    assert grant.names == ((Kind.RECURRENT, 5),)
    assert (grant.before, grant.granted) == (0, 6)


def test_a_window_model_is_brought_the_last_windows_alone() -> None:
    grant = reserve(store_with(full=8, window=3, recurrent=2), source(8, [7], range(8)))
    assert [page for kind, page in grant.names if kind is Kind.WINDOW] == [6, 7]


def test_a_gain_below_the_threshold_is_left_alone() -> None:
    store = store_with(full=8, recurrent=2)
    grant = reserve(store, source(2, [1]), want=ask(threshold_tokens=3 * PAGE_SIZE))
    assert (grant.asked, grant.granted, grant.lack) == (2, 0, PrefetchShortfall.BELOW_THRESHOLD)
    assert grant.room == ()


def test_room_for_less_than_the_threshold_is_given_up() -> None:
    store = store_with(full=3, recurrent=2)
    grant = reserve(store, source(8, [2, 7]), want=ask(threshold_tokens=4 * PAGE_SIZE))
    assert (grant.granted, grant.lack, grant.room) == (0, PrefetchShortfall.HOST_FULL, ())


def test_what_the_device_has_already_is_no_gain() -> None:
    assert reserve(store_with(full=8, recurrent=2), source(6, [5]), want=ask(have=6)).room == ()


def test_more_than_the_share_of_the_host_is_not_under_way_at_once() -> None:
    store = store_with(full=8, recurrent=4)
    capacity = 8 * 256 + 4 * 1024
    grant = reserve(store, source(8, [1, 7]), share=0.4)
    assert grant.num_bytes <= 0.4 * capacity
    assert (grant.granted, grant.lack) == (2, PrefetchShortfall.RATE_LIMITED)


def test_all_or_nothing_gives_up_where_truncation_does_not() -> None:
    units = source(8, [4, 7])
    for policy, granted in ((AllOrNothing, 0), (Truncate, 5)):
        assert reserve(store_with(full=6, recurrent=2), units, policy=policy).granted == granted


def test_the_timeout_policy_waits_by_the_length_of_the_prompt() -> None:
    assert PrefetchPolicy.TIMEOUT.seconds(4096) == 2.0
    assert PrefetchPolicy.BEST_EFFORT.seconds(4096) == 0.0


@st.composite
def worlds(draw: st.DrawFn) -> tuple[HostStore, PrefetchSource, PrefetchSource, dict[Kind, int]]:
    """A host with something of the chain, and two sources with parts of it."""
    kinds = draw(st.sampled_from(KINDS))
    sizes = {kind: draw(st.integers(1, 9)) for kind in kinds}
    store = store_with(None, **{kind.value: size for kind, size in sizes.items()})
    there = [draw_source(draw, Tier.STORAGE), draw_source(draw, Tier.PEER)]
    mine = draw_source(draw, Tier.HOST)
    if room := store.reserve(ReserveRequest("w", HOST, KEYS, dict(mine.pages)), 0.0):
        store.commit("w", {(unit.kind, unit.page_index): DIGEST for unit in room}, 0.0)
    return store, there[0], there[1], sizes


def draw_source(draw: st.DrawFn, tier: Tier) -> PrefetchSource:
    subset = st.sets(st.integers(0, NUM_PAGES - 1)).map(sorted)
    pages = {Kind.FULL: range(draw(st.integers(0, NUM_PAGES)))}
    return PrefetchSource(
        tier, "", {**pages, Kind.WINDOW: draw(subset), Kind.RECURRENT: draw(subset)}
    )


def held(store: HostStore, names: Iterable[UnitName]) -> dict[Kind, set[int]]:
    """Pages by kind: what is resident, and these."""
    pages = {kind: set(some) for kind, some in store.lookup(KEYS).pages.items()}
    for kind, page in names:
        pages.setdefault(kind, set()).add(page)
    return pages


def depth_of(store: HostStore, pages: Mapping[Kind, set[int]]) -> int:
    return usable_depth(NUM_PAGES, ResumeShape.of(store.manifest), pages)


@settings(max_examples=150, deadline=None)
@given(worlds(), st.integers(0, NUM_PAGES), st.integers(0, 3 * PAGE_SIZE), st.data())
def test_any_part_that_arrives_is_worth_its_deepest_resume_point(
    world: tuple[HostStore, PrefetchSource, PrefetchSource, dict[Kind, int]],
    have: int,
    threshold: int,
    data: st.DataObject,
) -> None:
    store, storage, peer, sizes = world
    grant = reserve(store, storage, peer, want=ask(have, threshold))
    assert grant.before <= grant.granted <= grant.asked
    assert storage.names() | peer.names() >= set(grant.names)
    assert depth_of(store, held(store, grant.names)) == grant.granted or not grant.room
    gain = (grant.granted - max(grant.before, have)) * PAGE_SIZE
    assert not grant.room or gain >= max(1, threshold)
    arrived = data.draw(st.integers(0, len(grant.names)), "arrived")
    names = in_order(grant.names)[:arrived]
    if grant.room:
        best = depth_of(store, held(store, names))
        arrive(store, names)
        store.check_integrity()
        assert store.lookup(KEYS).usable_pages == best
        store.release("p")
    store.check_integrity()
    for kind, counts in store.statistics().kinds.items():
        assert counts.total == sizes[kind] == counts.free + counts.resident, "a slot is nobody's"


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_truncation_never_brings_less_than_all_or_nothing(
    world: tuple[HostStore, PrefetchSource, PrefetchSource, dict[Kind, int]],
) -> None:
    _, storage, peer, sizes = world
    slots = {kind.value: size for kind, size in sizes.items()}
    whole = reserve(store_with(None, **slots), storage, peer, policy=AllOrNothing)
    assert whole.granted in (0, whole.asked)
    assert reserve(store_with(None, **slots), storage, peer).granted >= whole.granted


# Every step may fail (row 12 of the catalogue), and every order may happen (row 14).


class ShortPools(Pools):
    """Pools that refuse from the k-th allocation on."""

    def __init__(self, sizes: Demand, first_refused: int) -> None:
        super().__init__(sizes)
        self.first_refused, self.num_asked = first_refused, 0

    def try_allocate(
        self, demand: Demand, holder: Holder
    ) -> dict[Kind, tuple[SlotHandle, ...]] | None:
        self.num_asked += 1
        if self.num_asked >= self.first_refused:
            return None
        return super().try_allocate(demand, holder)


@pytest.mark.parametrize("first_refused", range(1, 6))
def test_an_allocator_that_fails_at_any_step_leaves_nothing_taken(first_refused: int) -> None:
    store = store_with(full=6, recurrent=2)
    pools = ShortPools(store.layout.num_slots, first_refused)
    store._slots.pools = pools
    for turn in range(3):
        grant = reserve(store, source(8, [1, 4, 7]))
        assert grant.granted in (0, 2, 5)
        if grant.room:
            arrive(store, grant.names if turn else grant.names[:-1])
            store.release("p")
        store.check_integrity()
    assert pools.num_asked >= first_refused, "the fault was meant to hit"
    store.flush()
    for counts in store.statistics().kinds.values():
        assert counts.total == counts.free, "something is held that nobody will let go"


def test_a_table_that_is_full_refuses_before_anything_is_taken() -> None:
    store = store_with(StoreLimits(max_reservations=1), full=8, recurrent=2)
    assert store.reserve(ReserveRequest("other", HOST, chain(9), {Kind.FULL: [0]}), 0.0)
    grant = reserve(store, source(4, [3]))
    assert (grant.asked, grant.granted, grant.lack) == (4, 0, PrefetchShortfall.RATE_LIMITED)
    store.release("other")
    assert store.statistics().kinds[Kind.FULL].free == 8


ACKS: list[UnitName] = [
    (Kind.FULL, 0),
    (Kind.FULL, 1),
    (Kind.WINDOW, 1),
    (Kind.WINDOW, 0),
    (Kind.RECURRENT, 1),
]


@pytest.mark.parametrize("num_acks", range(len(ACKS) + 1))
def test_in_any_order_of_acks_nothing_is_seen_before_all_of_it_is_there(num_acks: int) -> None:
    """Terminates after `num_acks` acknowledgements, in every order. Room without acknowledgement
    may still be written: no other writer is given it before the release."""
    keys = KEYS[:2]
    for acked in permutations(ACKS, num_acks):
        store = store_with(full=2, window=2, recurrent=1)
        grant = PrefetchPlanner(HOST, Truncate, 1.0).reserve(
            store,
            PrefetchRequest(keys, 0, 2, 1),
            [source(2, [1], [0, 1])],
            lease_id="p",
            bytes_under_way=0,
            now=0.0,
        )
        assert set(grant.names) == set(ACKS)
        seen = arrive(store, acked)
        assert set(seen) in (set(), set(ACKS)), "a part of a resume set was shown"
        assert bool(seen) == (num_acks == len(ACKS))
        room = store.reserve(ReserveRequest("thief", HOST, chain(7), {Kind.FULL: [0]}), 2.0)
        assert bool(room) == bool(seen), "room was given away that a reader may still write to"
        store.release("thief")
        store.release("p")
        store.check_integrity()
        for counts in store.statistics().kinds.values():
            assert counts.total == counts.free + counts.resident


@pytest.mark.parametrize(("first", "second"), [*product(range(4), range(4))])
def test_what_arrives_later_is_committed_on_top(first: int, second: int) -> None:
    """Page by page, for a model whose every page end is a resume point."""
    store = store_with(full=8)
    grant = reserve(store, source(8))
    names = in_order(grant.names)
    arrive(store, names[:first])
    assert store.lookup(KEYS).usable_pages == first
    arrive(store, names[first : first + second])
    assert store.lookup(KEYS).usable_pages == first + second
    store.release("p")
    store.check_integrity()


def test_a_reservation_whose_time_is_over_shows_nothing_and_frees_nothing() -> None:
    store = store_with(full=8)
    grant = reserve(store, source(4))
    store.expire(100.0)
    with pytest.raises(LeaseLost):
        store.commit_arrived("p", dict.fromkeys(grant.names, DIGEST), 100.0)
    assert store.statistics().kinds[Kind.FULL].reserved == 4
    store.release("p")
    assert store.statistics().kinds[Kind.FULL].free == 8


@dataclass
class Counting:
    """A policy that counts how many groups were spelled out."""

    policy: RoomPolicy
    num_groups: int = 0

    def choices(self, offer: WriteOffer, room: Room) -> Iterator[GroupChoice]:
        for choice in self.policy.choices(offer, room):
            self.num_groups += 1
            yield choice


def test_a_long_chain_is_not_spelled_out_at_every_point_that_cannot_fit() -> None:
    """It took 6 s for 128k tokens with room for half of them, on the event loop."""
    store, keys = store_with(full=50), chain(*range(1, 201))
    policies: list[Counting] = []

    def counting(limits: RoomLimits) -> RoomPolicy:
        policies.append(Counting(Truncate(limits)))
        return policies[-1]

    units = PrefetchSource(Tier.STORAGE, "", {Kind.FULL: range(200)})
    grant = PrefetchPlanner(HOST, counting, 1.0).reserve(
        store, PrefetchRequest(keys, 0, 200, 1), [units], lease_id="p", bytes_under_way=0, now=0.0
    )
    assert grant.granted == 50
    assert sum(policy.num_groups for policy in policies) <= 2
