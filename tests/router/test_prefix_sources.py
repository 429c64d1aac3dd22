"""Where a prefix would come from, and when computing it is cheaper: as values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.test_routing_policy import ASKING, STATE, TOKENS, hold
from tests.router.test_routing_policy import beat_of as beat
from tests.router.test_routing_policy import fleet_of as fleet

from ferryman.handoff.usage import CachedTokens
from ferryman.wire.nats.heartbeat import Heartbeat
from ferryman.wire.redis.index import NodeLife, NodePrefix
from ferryman_router.request.request_history import routed_facts
from ferryman_router.routing.fleet import Fleet
from ferryman_router.routing.prefix_sources import (
    FetchRates,
    PrefixFetch,
    PrefixReach,
    best_prefix_fetch,
)
from ferryman_router.routing.routing_policy import RouteChoice, RoutingCosts, choose

# A token has 10 bytes and takes 1 s to compute; a byte takes 1, 10 and 50 ms from tier to tier.
RATES = FetchRates(
    load=1e-3, storage=1e-2, peer=5e-2, bytes_per_token=10, snapshot_bytes=20, prefill=1
)


def test_each_tier_adds_what_those_before_it_lack() -> None:
    arrival = best_prefix_fetch(
        PrefixReach(device=8, matched=8, host=16, storage=24, peer=32), RATES
    )
    assert arrival.cached == CachedTokens(device=8, host=8, storage=8, peer=8)
    assert arrival.load_seconds == pytest.approx((24 * 10 + 20) * 1e-3)
    assert arrival.fetch_seconds == pytest.approx(8 * 10 * 1e-2 + (8 * 10 + 20) * 5e-2)
    assert arrival.recompute_seconds == 24


def test_a_slow_tier_does_not_win_against_computing() -> None:
    reach = PrefixReach(device=8, matched=8, host=16, storage=24, peer=32)
    slow_peer = best_prefix_fetch(reach, replace(RATES, peer=1.0))
    assert slow_peer.cached == CachedTokens(device=8, host=8, storage=8)
    slow_disk = best_prefix_fetch(reach, replace(RATES, storage=1.0, peer=1.0))
    assert slow_disk.cached == CachedTokens(device=8, host=8)
    assert best_prefix_fetch(reach, replace(RATES, prefill=1e-9)).cached == CachedTokens(device=8)


def test_pages_on_the_device_are_not_loaded_with_a_snapshot_from_the_host() -> None:
    arrival = best_prefix_fetch(
        PrefixReach(device=0, matched=16, host=16, storage=16, peer=16), RATES
    )
    assert arrival.cached == CachedTokens(device=16)
    assert (arrival.load_seconds, arrival.fetch_seconds) == pytest.approx((20 * 1e-3, 0))
    assert arrival.recompute_seconds == 16


ascending = st.lists(st.integers(0, 100), min_size=4, max_size=4).map(sorted)
paces = st.floats(0, 1)


@given(ascending, st.integers(0, 100), st.tuples(*[paces] * 5), st.integers(0, 100))
def test_no_reach_is_cheaper_than_the_best_and_none_counts_twice(
    marks: list[int], matched: int, rates: tuple[float, ...], snapshot_bytes: int
) -> None:
    load, storage, peer, size, prefill = rates
    paces = FetchRates(load, storage, peer, size, snapshot_bytes, prefill)
    reach = PrefixReach(marks[0], matched, *marks[1:])
    best = best_prefix_fetch(reach, paces)
    assert reach.device <= best.cached.total <= reach.peer

    def seconds(arrival: PrefixFetch) -> float:
        return arrival.fetch_seconds + arrival.load_seconds - arrival.recompute_seconds

    assert seconds(best) <= 0, "what is on the device costs nothing"
    shorter = replace(reach, peer=reach.storage)
    assert seconds(best) <= seconds(best_prefix_fetch(shorter, paces))


# The policy reads the reach off the index, and the rates off the beats.

HOST = Heartbeat("hostcache", "hostcache-00000001", 1, "h:1", True, STATE, 0, node="n1")
NODE_1, NODE_2 = NodeLife("n1", 1, "h:1"), NodeLife("n2", 1, "h:2")
HOLDINGS = {"n1": NodePrefix(NODE_1, 6, 3), "n2": NodePrefix(NODE_2, 8, 8)}


def chosen(fleet: Fleet) -> RouteChoice:
    asking = replace(ASKING, cache_index={STATE: HOLDINGS})
    explanation = choose(fleet, asking, costs=RoutingCosts(), now=0.0)
    assert explanation is not None
    return explanation.chosen


def measured(node: str = "n1") -> Heartbeat:
    return beat(
        "prefill",
        1,
        node=node,
        seconds_per_token=0.01,
        load_seconds_per_byte=1e-6,
        page_bytes=400,
        snapshot_bytes=100,
    )


def test_measured_costs_decide_and_guesses_only_until_then() -> None:
    host = replace(HOST, storage_seconds_per_byte=1e-5, peer_seconds_per_byte=1.0)
    slow_peer = chosen(fleet(measured(), beat("decode", 1), host)).arrival
    assert slow_peer.cached == CachedTokens(host=12, storage=12)
    assert slow_peer.fetch_seconds == pytest.approx((12 * 100 + 100) * 1e-5)
    assert slow_peer.load_seconds == pytest.approx((24 * 100 + 100) * 1e-6)
    unmeasured = chosen(fleet(measured(), beat("decode", 1), HOST)).arrival
    assert unmeasured.cached == CachedTokens(host=12, storage=12, peer=8)


@pytest.mark.parametrize(
    ("threshold", "cached"),
    [
        pytest.param(20, CachedTokens(host=12, storage=12, peer=8), id="the gain"),
        pytest.param(21, CachedTokens(host=12), id="more than the gain"),
    ],
)
def test_what_a_host_cache_would_not_bring_for_so_little_is_not_reckoned_with(
    threshold: int, cached: CachedTokens
) -> None:
    picky = replace(HOST, prefetch_threshold=threshold)
    found = chosen(fleet(measured(), beat("decode", 1), picky))
    assert found.cached == cached
    assert found.is_worth_fetching == (threshold == 20)


def test_a_worker_without_a_host_cache_has_its_device_only() -> None:
    alone = fleet(measured(node=""), beat("decode", 1), HOST)
    hold(alone, "prefill-00000001", 2)
    assert chosen(alone).cached == CachedTokens(device=8)
    assert not chosen(alone).is_worth_fetching


def test_a_node_that_cannot_be_reached_is_no_peer() -> None:
    unreachable = {"n2": NodePrefix(NodeLife("n2", 1), 8, 8)}
    asking = replace(ASKING, cache_index={STATE: unreachable})
    explanation = choose(
        fleet(measured(), beat("decode", 1), HOST), asking, costs=RoutingCosts(), now=0.0
    )
    assert explanation is not None
    assert explanation.chosen.cached == CachedTokens()


@pytest.mark.parametrize(
    ("mine", "cached"),
    [
        pytest.param(NodePrefix(NODE_1, 0, 0, 6), CachedTokens(storage=24), id="a cold node"),
        pytest.param(
            NodePrefix(NODE_1, 4, 3, 6), CachedTokens(host=12, storage=12), id="behind its own"
        ),
        pytest.param(
            NodePrefix(NODE_1, 6, 3, 4), CachedTokens(host=12, storage=12), id="less than its own"
        ),
    ],
)
def test_other_nodes_objects_count_as_storage_of_this_node(
    mine: NodePrefix, cached: CachedTokens
) -> None:
    asking = replace(ASKING, cache_index={STATE: {"n1": mine}})
    made = fleet(measured(), beat("decode", 1), HOST)
    explanation = choose(made, asking, costs=RoutingCosts(), now=0.0)
    assert explanation is not None
    assert explanation.chosen.cached == cached


def test_the_pair_uses_the_fastest_plane_that_both_have() -> None:
    both = ("grpc", "nixl")
    for planes, plane in ((both, "nixl"), (("grpc",), "grpc"), (("other",), "")):
        pair = fleet(beat("prefill", 1, planes=both), beat("decode", 1, planes=planes))
        assert chosen(pair).plane == plane


def test_a_pair_shares_memory_where_both_have_the_same_place() -> None:
    here, there = ("memory@1a", "grpc"), ("memory@2b", "grpc")
    for planes, plane in ((here, "memory"), (there, "grpc"), (("grpc",), "grpc")):
        pair = fleet(beat("prefill", 1, planes=here), beat("decode", 1, planes=planes))
        assert chosen(pair).plane == plane


def test_the_explanation_has_the_tokens_by_tier_and_the_seconds_of_each_part() -> None:
    made = fleet(measured(), beat("decode", 1), HOST)
    asking = replace(ASKING, cache_index={STATE: HOLDINGS})
    explanation = choose(made, asking, costs=RoutingCosts(), now=0.0)
    assert explanation is not None
    candidate, facts = explanation.chosen, routed_facts(explanation)
    assert facts["usable_tokens"] == {"device": 0, "host": 12, "storage": 12, "peer": 8}
    assert facts["recompute_ms"] == pytest.approx(320)
    assert candidate.prefill_seconds == pytest.approx((len(TOKENS) - 32) * 0.01)
    parts = ("queue_ms", "fetch_ms", "load_ms", "prefill_ms", "handoff_ms", "row_ms")
    total = sum(float(str(facts[part])) for part in parts)
    assert total == pytest.approx(facts["total_ms"], abs=0.01)
