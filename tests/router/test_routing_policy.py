"""The pair of workers that the policy chooses, as values: by prefix, queue, rows and room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.wire.codec.caches import CacheSnapshot
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState
from ferryman.wire.redis.index import NodeLife, NodePrefix
from ferryman_router.routing.fleet import Fleet, WorkerName
from ferryman_router.routing.generate_request import PageKeyCache
from ferryman_router.routing.routing_policy import (
    RoutingCosts,
    RoutingRequest,
    choose,
    least_prefill,
    longest_request,
)

STATE = ServedState("f", 4, "d", (Kind.FULL, Kind.RECURRENT))
TOKENS = np.arange(40, dtype="<u4")


def fleet_of(*beats: Heartbeat) -> Fleet:
    fleet = Fleet(10.0)
    for beat in beats:
        fleet.on_heartbeat(beat, 0.0)
    return fleet


def beat_of(role: str, number: int, **more: object) -> Heartbeat:
    beat = Heartbeat(role, f"{role}-{number:08x}", 1, f"{role}:{number}", True, STATE, 100)
    return replace(beat, **more)  # type: ignore[arg-type]


ASKING = RoutingRequest(PageKeyCache(TOKENS, b""))


def _chosen(fleet: Fleet, asking: RoutingRequest = ASKING) -> tuple[str, str]:
    explanation = choose(fleet, asking, costs=RoutingCosts(), now=0.0)
    assert explanation is not None
    return explanation.chosen.prefill.worker_id[-1], explanation.chosen.decode.worker_id[-1]


def hold(fleet: Fleet, name: str, num_pages: int) -> None:
    keys = ASKING.chains.of(STATE)[:num_pages]
    held = {Kind.FULL: keys, Kind.RECURRENT: keys[-1:]}
    fleet.on_cache_snapshot(WorkerName(name, 1), CacheSnapshot(name, 1, 0, held))


def test_a_prefix_that_can_be_resumed_draws_the_request() -> None:
    fleet = fleet_of(beat_of("prefill", 1), beat_of("prefill", 2), beat_of("decode", 1))
    hold(fleet, "prefill-00000002", 8)
    explanation = choose(fleet, ASKING, costs=RoutingCosts(), now=0.0)
    assert explanation is not None
    assert explanation.chosen.prefill.worker_id == "prefill-00000002"
    assert explanation.chosen.usable_tokens == 32
    assert explanation.others[0].prefill_seconds > explanation.chosen.prefill_seconds


def test_a_prefix_without_a_snapshot_draws_nobody() -> None:
    fleet = fleet_of(beat_of("prefill", 1), beat_of("prefill", 2), beat_of("decode", 1))
    keys = ASKING.chains.of(STATE)
    name = WorkerName("prefill-00000002", 1)
    fleet.on_cache_snapshot(name, CacheSnapshot(name.worker_id, 1, 0, {Kind.FULL: keys}))
    assert _chosen(fleet) == ("1", "1")


def test_a_request_goes_where_its_sibling_left_the_prompt() -> None:
    """Unless a full batch there would cost it more than the hand-off."""
    fleet = fleet_of(beat_of("prefill", 1), beat_of("decode", 1), beat_of("decode", 2))
    asking = replace(ASKING, shared_by=WorkerName("decode-00000002", 1))
    assert (_chosen(fleet), _chosen(fleet, asking)) == (("1", "1"), ("1", "2"))
    busy = {"max_running": 64, "num_running": 60}
    fleet = fleet_of(
        beat_of("prefill", 1), beat_of("decode", 1, max_running=64), beat_of("decode", 2, **busy)
    )
    assert _chosen(fleet, asking) == ("1", "1")


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    fleet = fleet_of(
        beat_of("prefill", 1), beat_of("prefill", 2, queue_tokens=50), beat_of("decode", 1)
    )
    hold(fleet, "prefill-00000002", 8)
    assert _chosen(fleet) == ("1", "1")


def test_what_was_sent_since_the_last_beat_counts() -> None:
    fleet = fleet_of(beat_of("prefill", 1), beat_of("prefill", 2), beat_of("decode", 1))
    fleet.claim(WorkerName("prefill-00000001", 1), "a.1", 40)
    assert _chosen(fleet) == ("2", "1")


def test_a_queue_that_was_settled_since_the_last_beat_costs_nothing() -> None:
    fleet = fleet_of(beat_of("prefill", 1), beat_of("prefill", 2), beat_of("decode", 1))
    hold(fleet, "prefill-00000002", 8)
    fleet.claim(WorkerName("prefill-00000002", 1), "a.1", 50)
    fleet.on_heartbeat(beat_of("prefill", 2, queue_tokens=50), 0.5)
    fleet.release(WorkerName("prefill-00000002", 1), "a.1")
    assert _chosen(fleet) == ("2", "1")


def test_a_prefill_worker_with_work_for_longer_gets_no_more() -> None:
    fleet = fleet_of(
        beat_of("decode", 1), beat_of("prefill", 1, seconds_per_token=0.01, max_running=8)
    )
    name = WorkerName("prefill-00000001", 1)
    fleet.claim(name, "a.1", 25)
    assert _chosen(fleet) == ("1", "1"), "a quarter of a second is soon"
    fleet.claim(name, "b.1", 100)
    assert choose(fleet, ASKING, costs=RoutingCosts(), now=0.0) is None
    fleet.computed(name, "b.1", 0)
    assert _chosen(fleet) == ("1", "1")


def test_a_beat_that_counts_cached_tokens_keeps_no_prompt_away() -> None:
    busy = beat_of("prefill", 1, seconds_per_token=0.01, max_running=8, queue_tokens=9000)
    fleet = fleet_of(beat_of("decode", 1), busy)
    assert _chosen(fleet) == ("1", "1")


def test_a_worker_gets_no_more_requests_than_it_has_rows_for() -> None:
    fleet = fleet_of(beat_of("prefill", 1), beat_of("decode", 1, max_running=2, max_requests=3))
    prefill, decode = WorkerName("prefill-00000001", 1), WorkerName("decode-00000001", 1)
    for name in ("a.1", "b.1", "c.1"):
        assert _chosen(fleet) == ("1", "1")
        fleet.claim(decode, name, 0)
    assert choose(fleet, ASKING, costs=RoutingCosts(), now=0.0) is None
    fleet.release(decode, "a.1")
    fleet.claim(prefill, "a.1", 0)
    assert choose(fleet, ASKING, costs=RoutingCosts(), now=0.0) is None, "prefill has one row"


def test_the_least_work_is_that_of_the_worker_with_the_longest_prefix() -> None:
    fleet = fleet_of(
        beat_of("prefill", 1, seconds_per_token=0.5), beat_of("prefill", 2, seconds_per_token=0.5)
    )
    assert least_prefill(fleet, ASKING, costs=RoutingCosts(), now=0.0) == (40, 20.0)
    hold(fleet, "prefill-00000002", 8)
    assert least_prefill(fleet, ASKING, costs=RoutingCosts(), now=0.0) == (8, 4.0)
    assert least_prefill(fleet_of(), ASKING, costs=RoutingCosts(), now=0.0) == (40, 0.0)


def test_pages_that_decode_holds_need_not_travel() -> None:
    fleet = fleet_of(beat_of("prefill", 1), beat_of("decode", 1), beat_of("decode", 2))
    hold(fleet, "decode-00000002", 8)
    assert _chosen(fleet) == ("1", "2")


def test_the_host_tier_counts_where_loading_is_cheaper() -> None:
    fleet = fleet_of(
        beat_of("prefill", 1, node="n1"), beat_of("prefill", 2, node="n2"), beat_of("decode", 1)
    )
    asking = replace(ASKING, cache_index={STATE: {"n2": NodePrefix(NodeLife("n2", 1), 9, 9)}})
    explanation = choose(fleet, asking, costs=RoutingCosts(), now=0.0)
    assert explanation is not None
    assert explanation.chosen.prefill.worker_id[-1] == "2"
    assert explanation.chosen.cached.host == 36
    quick = replace(RoutingCosts(), prefill_seconds_per_token=1e-9)
    recomputed = choose(fleet, asking, costs=quick, now=0.0)
    assert recomputed is not None
    assert recomputed.chosen.cached.total == 0


def test_workers_with_other_state_are_never_paired() -> None:
    other = replace(STATE, digest="other")
    fleet = fleet_of(beat_of("prefill", 1), beat_of("decode", 1, state=other))
    assert choose(fleet, ASKING, costs=RoutingCosts(), now=0.0) is None
    assert longest_request(fleet) == 0


def test_a_request_only_goes_where_it_fits() -> None:
    fleet = fleet_of(beat_of("prefill", 1, max_len=30), beat_of("prefill", 2), beat_of("decode", 1))
    assert _chosen(fleet) == ("2", "1")
    assert longest_request(fleet) == 100
