"""The result of a run: nothing is lost, and the decisions are those of the services' own code."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulate.runs import HYBRID, PAGE, asked, named, run_pair, setup_of

from ferryman.cache.manifest import Kind, KindLayout, StateManifest
from ferryman.tiers.layout import split_arena
from ferryman.tiers.prefetch_values import PrefetchOptions, PrefetchPolicy
from ferryman_simulator.modelled_time import CostModel
from ferryman_simulator.setup import Setup
from ferryman_simulator.simulation import simulate
from ferryman_simulator.trace import MeasuredPace, Trace, TracedRequest, own


def test_every_prompt_token_comes_from_one_tier() -> None:
    trace = asked(*[(named(1, 2, 3 + i % 3), 150 + i) for i in range(20)])
    pair, result = run_pair(setup_of(host_bytes=1 << 20, concurrency=3), trace)
    assert result.num_requests == 20
    assert result.prompt_tokens == sum(request.prompt_len for request in trace.requests)
    assert sum(result.tokens.values()) == result.prompt_tokens
    assert sum(result.reasons.values()) == result.tokens["computed"]
    assert result.output_tokens == 20 * 5
    for worker in (pair.prefill, pair.decode):
        worker.scheduler.check_integrity()
        assert all(set(one.by_role) <= {"tree"} for one in worker.scheduler.ledgers().values())
    assert pair.node is not None
    pair.node.store.check_integrity()
    statistics = pair.node.store.statistics()
    assert (statistics.num_leases, statistics.num_reservations) == (0, 0)


def test_the_same_run_twice_is_the_same() -> None:
    trace = asked(*[(named(1, i % 5), 100) for i in range(30)])
    assert simulate(setup_of(states=40), trace) == simulate(setup_of(states=40), trace)


def test_a_prompt_seen_before_is_read_from_the_device_up_to_its_last_full_page() -> None:
    result = simulate(setup_of(), asked((named(1, 2), 100), (named(1, 2), 100)))
    assert result.tokens["device"] == 100 // PAGE * PAGE
    assert result.reasons["never_seen"] == 100


def test_what_the_device_gave_up_comes_from_the_host() -> None:
    contents = [(named(10 + i, 20 + i, 30 + i), 130) for i in range(6)]
    trace = asked(*contents, *contents)
    small = setup_of(pages=40, states=24)
    without = simulate(small, trace)
    with_host = simulate(setup_of(pages=40, states=24, host_bytes=1 << 20), trace)
    assert without.hit_rate < with_host.hit_rate
    assert with_host.tokens["host"] > 0
    assert without.evicted["prefill"]["full"] > 0


def test_a_next_turn_finds_the_answer_that_decode_computed() -> None:
    first = TracedRequest("a", 0.0, named(1).then(own(1, 48)), 64)
    turn = first.content.then(own(2, 30))
    second = TracedRequest("b", 5.0, turn.then(own(3, 5)), turn.num_tokens)
    result = simulate(setup_of(host_bytes=1 << 20, concurrency=0), Trace([first, second]))
    assert result.tokens["host"] > 0, "prefill never had these pages on its device"
    assert result.tokens["device"] + result.tokens["host"] >= 96


def test_a_request_that_never_fits_is_refused_and_the_others_run() -> None:
    trace = asked((named(1), 64), (named(*range(1, 30)), 29 * 64), (named(2), 64))
    result = simulate(setup_of(pages=40, states=24), trace)
    assert (result.num_requests, result.num_refused) == (3, 1)
    assert result.prompt_tokens == 128


def test_decode_that_runs_out_of_pages_retracts_and_all_end() -> None:
    requests = [
        TracedRequest(f"r{i}", 0.0, named(100 + i, length=60).then(own(i, 100)), 60)
        for i in range(4)
    ]
    result = simulate(setup_of(pages=26, states=36, concurrency=4), Trace(requests))
    assert result.num_retracted > 0
    assert result.output_tokens == 400


def test_arrivals_go_by_the_trace_unless_concurrency_is_given() -> None:
    trace = asked(*[(named(i), 64) for i in range(5)])
    assert simulate(setup_of(concurrency=0), trace).seconds > 4.0
    assert simulate(setup_of(concurrency=1), trace).seconds < 4.0


def test_slower_prefill_makes_the_first_token_later_and_changes_no_hit() -> None:
    trace = asked(*[(named(1, i), 128) for i in range(8)])
    fast, slow = setup_of(), replace(setup_of(), costs=CostModel(prefill_seconds_per_token=1e-2))
    quick, late = simulate(fast, trace), simulate(slow, trace)
    assert quick.tokens == late.tokens
    assert quick.ttft_seconds["p50"] < late.ttft_seconds["p50"]


def test_loading_that_costs_more_than_computing_is_declined() -> None:
    contents = [(named(10 + i, 20 + i, 30 + i), 130) for i in range(6)]
    setup = setup_of(pages=40, states=24, host_bytes=1 << 20)
    dear = replace(setup, costs=CostModel(load_seconds_per_byte=1.0))
    result = simulate(dear, asked(*contents, *contents))
    assert result.tokens["host"] == 0
    assert result.reasons["cheaper_to_recompute"] > 0


def test_what_a_trace_says_of_time_goes_before_guesses() -> None:
    told = CostModel().told_by(MeasuredPace(prefill_seconds_per_token=0.5))
    assert told.prefill_seconds_per_token == 0.5
    assert told.decode_step_seconds == CostModel().decode_step_seconds


@pytest.mark.parametrize("states", [24, 60])
def test_snapshots_kept_are_what_the_ledgers_say(states: int) -> None:
    pair, result = run_pair(setup_of(states=states), asked(*[(named(i), 64) for i in range(40)]))
    ledger = pair.prefill.scheduler.ledgers()[Kind.RECURRENT]
    assert result.snapshots["prefill"] == ledger.by_role["tree"] <= states


def shared_prompt(num_users: int) -> Trace:
    """Users whose prompts begin alike and then part."""
    return asked(*[(named(1, 2, 3, 100 + i), 250) for i in range(num_users)])


def test_junctions_are_what_a_shared_prompt_is_reused_by() -> None:
    trace = shared_prompt(12)
    there = simulate(setup_of(), trace)
    without = simulate(replace(setup_of(), has_junctions=False), trace)
    assert there.tokens["device"] >= 10 * 192, "the third user finds what the second left"
    assert without.tokens["device"] == 0
    assert without.reasons["no_snapshot"] > there.reasons["no_snapshot"]


def test_with_forks_already_the_second_user_finds_what_is_shared() -> None:
    trace = shared_prompt(12)
    told = [replace(request, fork_points=(192,)) for request in trace.requests]
    forked = Trace(told)
    assert simulate(setup_of(), forked).tokens["device"] >= 11 * 192
    without = simulate(replace(setup_of(), has_forks=False), forked)
    assert without.tokens["device"] == simulate(setup_of(), trace).tokens["device"] < 11 * 192


def test_a_coarse_grid_helps_where_junctions_are_off() -> None:
    setup = replace(setup_of(states=100), has_junctions=False)
    limits = replace(setup.prefill.limits, snapshot_grid=64)
    gridded = replace(setup, prefill=replace(setup.prefill, limits=limits))
    trace = shared_prompt(12)
    assert simulate(gridded, trace).tokens["device"] > simulate(setup, trace).tokens["device"]


def test_what_device_and_host_gave_up_comes_from_storage() -> None:
    contents = [(named(10 + i, 20 + i, 30 + i), 130) for i in range(12)]
    trace = asked(*contents, *contents)
    small = setup_of(pages=40, states=24, host_bytes=160 << 10, concurrency=0)
    without = simulate(small, trace)
    wish = PrefetchOptions(threshold_tokens=16)
    pair, stored = run_pair(replace(small, storage_bytes=8 << 20, wish=wish), trace)
    assert stored.tokens["storage"] > 0
    assert stored.hit_rate > without.hit_rate
    assert pair.node is not None
    pair.node.storage.check_integrity()
    assert pair.node.storage.statistics().num_leases == 0


def test_a_slow_disk_runs_into_the_prefetchs_time_and_the_plan_says_so() -> None:
    contents = [(named(10 + i, 20 + i, 30 + i), 130) for i in range(12)]
    setup = replace(
        setup_of(pages=40, states=24, host_bytes=160 << 10, concurrency=0),
        storage_bytes=8 << 20,
        wish=PrefetchOptions(PrefetchPolicy.BEST_EFFORT, 16),
    )
    result = simulate(setup, asked(*contents, *contents))
    assert result.tokens["storage"] == 0
    assert result.reasons["storage_timeout"] > 0


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_other_write_policies_run_and_write_less(policy: str) -> None:
    contents = [(named(10 + i, 20 + i, 30 + i), 130) for i in range(6)]
    trace = asked(*contents)
    setup = setup_of(host_bytes=4 << 20)
    pair, _ = run_pair(setup, trace)
    lazy, _ = run_pair(replace(setup, write_policy=policy), trace)
    assert pair.node is not None
    assert lazy.node is not None
    assert lazy.node.store.statistics().num_stored < pair.node.store.statistics().num_stored


def test_a_model_with_windows_alone_and_one_of_all_kinds_run() -> None:
    window = KindLayout(Kind.WINDOW, (), 4096)
    full, state = HYBRID.layouts
    trace = asked(*[(named(1, 2, 10 + i % 4), 170) for i in range(12)])
    for layouts in ((full,), (full, window), (full, window, state), (state,)):
        kinds = [layout.kind for layout in layouts]
        manifest = StateManifest("x", PAGE, PAGE, 40 if Kind.WINDOW in kinds else 0, layouts)
        base = setup_of()
        worker = replace(base.prefill, slots=dict.fromkeys(kinds, 200))
        arena = split_arena(manifest, 1 << 20, 0.5)
        setup = Setup(manifest, worker, worker, arena, concurrency=2)
        result = simulate(setup, trace)
        assert sum(result.tokens.values()) == result.prompt_tokens == 12 * 170
        assert result.tokens["device"] > 0, kinds
