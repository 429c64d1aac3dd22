"""The router sees a worker that does both as a prefill and a decode worker at once."""

from __future__ import annotations

from dataclasses import replace

from tests.router.test_routing_policy import ASKING, TOKENS, beat_of, fleet_of, hold

from ferryman.wire.nats.heartbeat import BOTH, DECODE, PREFILL
from ferryman_router.routing.fleet import AskSnapshot, Fleet, WorkerJoined, WorkerName
from ferryman_router.routing.routing_policy import (
    Explanation,
    RoutingCosts,
    choose,
    least_prefill,
    longest_request,
)

FIRST, SECOND = WorkerName("both-00000001", 1), WorkerName("both-00000002", 1)


def chosen(fleet: Fleet) -> Explanation | None:
    return choose(fleet, ASKING, costs=RoutingCosts(), now=0.0)


def test_it_joins_with_a_cache_that_is_asked_for() -> None:
    fleet, beat = Fleet(10.0), beat_of(BOTH, 1)
    assert fleet.on_heartbeat(beat, 0.0) == (WorkerJoined(beat), AskSnapshot(FIRST))
    assert fleet.state() == beat.state
    assert [fleet.is_served(role) for role in (PREFILL, DECODE, "hostcache")] == [True, True, False]


def test_one_worker_alone_is_a_pair_and_nothing_travels() -> None:
    fleet = fleet_of(beat_of(BOTH, 1, planes=("local",)))
    explanation = chosen(fleet)
    assert explanation is not None
    pair = explanation.chosen
    assert (pair.prefill, pair.decode) == (FIRST, FIRST)
    assert (pair.handoff_seconds, pair.plane) == (0.0, "local")
    assert explanation.others == ()
    assert longest_request(fleet) == 100


def test_a_hand_off_costs_what_the_prefill_worker_has_measured_and_its_tokens() -> None:
    fleet = fleet_of(beat_of(PREFILL, 3, handoff_seconds=0.11), beat_of(DECODE, 3))
    explanation = chosen(fleet)
    assert explanation is not None
    per_token = RoutingCosts().handoff_seconds_per_token
    assert explanation.chosen.handoff_seconds == 0.11 + len(TOKENS) * per_token
    shared = replace(ASKING, shared_by=explanation.chosen.decode)
    explanation = choose(fleet, shared, costs=RoutingCosts(), now=0.0)
    assert explanation is not None
    assert explanation.chosen.handoff_seconds == 0.0


def test_a_prompt_is_decoded_where_it_is_prefilled_however_full_that_worker_is() -> None:
    busy = {"num_running": 30, "max_running": 32, "step_seconds": 9.0}
    fleet = fleet_of(beat_of(BOTH, 1, **busy), beat_of(BOTH, 2))
    hold(fleet, FIRST.worker_id, 9)
    explanation = chosen(fleet)
    assert explanation is not None
    pairs = [explanation.chosen, *explanation.others]
    assert {(pair.prefill, pair.decode) for pair in pairs} == {(FIRST, FIRST), (SECOND, SECOND)}


def test_a_prefix_draws_a_request_to_the_worker_that_holds_it() -> None:
    fleet = fleet_of(beat_of(BOTH, 1), beat_of(BOTH, 2))
    hold(fleet, SECOND.worker_id, 8)
    explanation = chosen(fleet)
    assert explanation is not None
    assert explanation.chosen.prefill == SECOND
    assert least_prefill(fleet, ASKING, costs=RoutingCosts(), now=0.0)[0] == len(TOKENS) - 32


def test_beside_workers_of_one_role_it_hands_nothing_over_and_takes_nothing_over() -> None:
    fleet = fleet_of(beat_of(BOTH, 1), beat_of(PREFILL, 2), beat_of(DECODE, 3))
    explanation = chosen(fleet)
    assert explanation is not None
    pairs = [explanation.chosen, *explanation.others]
    names = {(pair.prefill.worker_id[:4], pair.decode.worker_id[:4]) for pair in pairs}
    assert names == {("both", "both"), ("pref", "deco")}
    alone = fleet_of(beat_of(BOTH, 1, is_ready=False), beat_of(PREFILL, 2))
    assert chosen(alone) is None


def test_its_claim_is_one_and_its_row_stays_taken_when_the_prompt_is_computed() -> None:
    fleet = fleet_of(beat_of(BOTH, 1, max_running=1))
    fleet.claim(FIRST, "r1.1", 40)
    worker = fleet.get(FIRST)
    assert worker is not None
    assert (worker.num_requests, worker.queue_tokens) == (1, 40)
    fleet.computed(FIRST, "r1.1", num_left=0)
    assert (worker.num_requests, worker.queue_tokens) == (1, 0)
    assert chosen(fleet) is None, "its one row is taken"
    fleet.release(FIRST, "r1.1")
    assert worker.num_requests == 0
    assert chosen(fleet) is not None


def test_it_serves_both_roles_and_no_other() -> None:
    beat = beat_of(BOTH, 1)
    assert [beat.serves(role) for role in (PREFILL, DECODE, BOTH, "router")] == [True] * 3 + [False]
    assert not replace(beat, role=PREFILL).serves(DECODE)
