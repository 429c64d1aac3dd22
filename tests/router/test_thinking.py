"""The router's other thinking rooms as values: queue, policy, budget, usage, pace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.cache.manifest import Kind
from ferryman.errors import QueueFull
from ferryman.handoff.usage import CachedTokens
from ferryman.wire.beats import Beat, ServedState
from ferryman.wire.index import Holding, NodeLife
from ferryman.wire.values import UncachedPages, Usage
from ferryman_router.budget import RetryBudget, Tries
from ferryman_router.chains import Chains
from ferryman_router.fleet import Fleet, WorkerName
from ferryman_router.holdings import Snapshot
from ferryman_router.pace import Pace
from ferryman_router.policy import Asking, Costs, choose, longest_request
from ferryman_router.queue import Ticket, WaitQueue
from ferryman_router.usage import settled_usage, uncached_tokens

STATE = ServedState("f", 4, "d", (Kind.FULL, Kind.RECURRENT))
TOKENS = np.arange(40, dtype="<u4")


def _ticket(name: str, tenant: str = "a", deadline: float = 100.0) -> Ticket:
    return Ticket(name, tenant, 0.0, deadline)


def _served(queue: WaitQueue) -> list[str]:
    order, now = [], 0.0
    while len(queue):
        ticket = next(iter(queue.heads()))
        queue.take(ticket, now := now + 1.0)
        order.append(ticket.request_id)
    return order


def test_tenants_take_turns_and_each_is_served_in_its_order() -> None:
    queue = WaitQueue(10, 10)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c")):
        queue.join(_ticket(name, tenant))
    assert _served(queue) == ["a1", "b1", "c1", "a2", "a3"]


def test_bounds_hold_for_all_and_for_each_tenant() -> None:
    queue = WaitQueue(3, 2)
    queue.join(_ticket("a1"))
    queue.join(_ticket("a2"))
    with pytest.raises(QueueFull, match="tenant"):
        queue.join(_ticket("a3"))
    queue.join(_ticket("b1", "b"))
    with pytest.raises(QueueFull, match="3 requests wait"):
        queue.join(_ticket("c1", "c"))
    queue.rejoin(_ticket("a0"))  # it had its place before
    assert [ticket.request_id for ticket in queue.heads()] == ["a0", "b1"]


def test_deadlines_pass_in_the_queue() -> None:
    queue = WaitQueue(5, 5)
    queue.join(_ticket("a1", deadline=1.0))
    queue.join(_ticket("a2", deadline=3.0))
    assert [ticket.request_id for ticket in queue.expire(1.0)] == ["a1"]
    assert _served(queue) == ["a2"]


def test_the_guess_at_when_to_come_back_follows_the_pace() -> None:
    queue = WaitQueue(100, 100)
    for i in range(60):
        queue.join(_ticket(f"a{i}"))
    assert queue.retry_seconds() == 1.0
    for step in range(20):
        queue.take(next(iter(queue.heads())), step * 2.0)
    assert 40 < queue.retry_seconds() <= 60


@given(
    st.lists(st.tuples(st.sampled_from("jtl"), st.integers(0, 9), st.sampled_from("abc"))),
)
def test_nobody_is_lost_or_served_twice(steps: list[tuple[str, int, str]]) -> None:
    queue, waiting = WaitQueue(100, 100), set[str]()
    for i, (what, pick, tenant) in enumerate(steps):
        if what == "j":
            queue.join(_ticket(f"{tenant}{i}", tenant))
            waiting.add(f"{tenant}{i}")
        elif what == "t" and len(queue):
            ticket = list(queue.heads())[pick % len(list(queue.heads()))]
            queue.take(ticket, float(i))
            waiting.remove(ticket.request_id)
        elif what == "l" and waiting:
            name = sorted(waiting)[pick % len(waiting)]
            assert queue.leave(name, name[0])
            waiting.remove(name)
        assert len(queue) == len(waiting)
    assert set(_served(queue)) == waiting


def fleet_of(*beats: Beat) -> Fleet:
    fleet = Fleet(10.0)
    for beat in beats:
        fleet.hear_beat(beat, 0.0)
    return fleet


def beat_of(role: str, number: int, **more: object) -> Beat:
    beat = Beat(role, f"{role}-{number:08x}", 1, f"{role}:{number}", True, STATE, 100)
    return replace(beat, **more)  # type: ignore[arg-type]


ASKING = Asking(Chains(TOKENS, b""), len(TOKENS))


def _chosen(fleet: Fleet, asking: Asking = ASKING) -> tuple[str, str]:
    explanation = choose(fleet, asking, attempt=1, costs=Costs(), now=0.0)
    assert explanation is not None
    return explanation.chosen.prefill.worker_id[-1], explanation.chosen.decode.worker_id[-1]


def hold(fleet: Fleet, name: str, num_pages: int) -> None:
    keys = ASKING.chains.of(STATE)[:num_pages]
    held = {Kind.FULL: keys, Kind.RECURRENT: keys[-1:]}
    fleet.hear_snapshot(WorkerName(name, 1), Snapshot(0, held))


def test_a_prefix_that_can_be_resumed_draws_the_request() -> None:
    fleet = fleet_of(beat_of("prefill", 1), beat_of("prefill", 2), beat_of("decode", 1))
    hold(fleet, "prefill-00000002", 8)
    explanation = choose(fleet, ASKING, attempt=1, costs=Costs(), now=0.0)
    assert explanation is not None
    assert explanation.chosen.prefill.worker_id == "prefill-00000002"
    assert explanation.chosen.usable_tokens == 32
    assert explanation.others[0].prefill_seconds > explanation.chosen.prefill_seconds


def test_a_prefix_without_a_snapshot_draws_nobody() -> None:
    fleet = fleet_of(beat_of("prefill", 1), beat_of("prefill", 2), beat_of("decode", 1))
    keys = ASKING.chains.of(STATE)
    fleet.hear_snapshot(WorkerName("prefill-00000002", 1), Snapshot(0, {Kind.FULL: keys}))
    assert _chosen(fleet) == ("1", "1")


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    fleet = fleet_of(
        beat_of("prefill", 1), beat_of("prefill", 2, queue_tokens=50), beat_of("decode", 1)
    )
    hold(fleet, "prefill-00000002", 8)
    assert _chosen(fleet) == ("1", "1")


def test_what_was_sent_since_the_last_beat_counts() -> None:
    fleet = fleet_of(beat_of("prefill", 1), beat_of("prefill", 2), beat_of("decode", 1))
    fleet.sent(WorkerName("prefill-00000001", 1), 40)
    assert _chosen(fleet) == ("2", "1")


def test_a_queue_that_was_settled_since_the_last_beat_costs_nothing() -> None:
    fleet = fleet_of(
        beat_of("prefill", 1), beat_of("prefill", 2, queue_tokens=50), beat_of("decode", 1)
    )
    hold(fleet, "prefill-00000002", 8)
    fleet.settled(WorkerName("prefill-00000002", 1), 50)
    assert _chosen(fleet) == ("2", "1")


def test_pages_that_decode_holds_need_not_travel() -> None:
    fleet = fleet_of(beat_of("prefill", 1), beat_of("decode", 1), beat_of("decode", 2))
    hold(fleet, "decode-00000002", 8)
    assert _chosen(fleet) == ("1", "2")


def test_the_host_tier_counts_where_loading_is_cheaper() -> None:
    fleet = fleet_of(
        beat_of("prefill", 1, node="n1"), beat_of("prefill", 2, node="n2"), beat_of("decode", 1)
    )
    asking = replace(ASKING, holdings={"n2": Holding(NodeLife("n2", 1), 9, 9)})
    explanation = choose(fleet, asking, attempt=1, costs=Costs(), now=0.0)
    assert explanation is not None
    assert explanation.chosen.prefill.worker_id[-1] == "2"
    assert explanation.chosen.cached.host == 36
    quick = replace(Costs(), prefill_seconds_per_token=1e-9)
    recomputed = choose(fleet, asking, attempt=1, costs=quick, now=0.0)
    assert recomputed is not None
    assert recomputed.chosen.cached.total == 0


def test_workers_with_other_state_are_never_paired() -> None:
    other = replace(STATE, digest="other")
    fleet = fleet_of(beat_of("prefill", 1), beat_of("decode", 1, state=other))
    assert choose(fleet, ASKING, attempt=1, costs=Costs(), now=0.0) is None
    assert longest_request(fleet) == 0


def test_a_request_only_goes_where_it_fits() -> None:
    fleet = fleet_of(beat_of("prefill", 1, max_len=30), beat_of("prefill", 2), beat_of("decode", 1))
    assert _chosen(fleet) == ("2", "1")
    assert longest_request(fleet) == 100


def test_retries_are_a_share_of_what_is_in_flight_but_a_few_always() -> None:
    budget = RetryBudget(share=0.1, floor=2)
    assert budget.try_take("a", 1)
    assert budget.try_take("b", 1)
    assert not budget.try_take("c", 1)
    assert budget.try_take("a", 1)  # the same request counts once
    assert budget.try_take("c", 30)
    budget.give_back("a")
    assert len(budget) == 2


def test_three_failures_or_two_deaths_are_enough() -> None:
    tries = Tries()
    tries.failed(by_death=True)
    assert tries.may_go_on
    tries.failed(by_death=False)
    assert tries.may_go_on
    tries.failed(by_death=False)
    assert not tries.may_go_on
    deaths = Tries()
    deaths.failed(by_death=True)
    deaths.failed(by_death=True)
    assert deaths.is_suspect


def test_cached_tokens_never_exceed_the_prompt() -> None:
    cached = CachedTokens(device=20, host=10, storage=5, peer=15)
    prompt = Usage(50, 3, cached, (UncachedPages("never_seen", 2),))
    usage = settled_usage(prompt, Usage(9, drafted_tokens=30, accepted_tokens=9), 40, 7)
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, 7)
    assert (usage.drafted_tokens, usage.accepted_tokens) == (30, 7), "never more than were sent"
    assert usage.cached == CachedTokens(device=20, host=10, storage=5, peer=5)
    assert uncached_tokens(usage, 16) == {}


def test_the_last_partial_page_counts_as_it_is() -> None:
    pages = (UncachedPages("no_snapshot", 1), UncachedPages("never_seen", 2))
    usage = Usage(50, 0, CachedTokens(device=16), pages)
    assert uncached_tokens(usage, 16) == {"no_snapshot": 16, "never_seen": 18}


def test_gaps_are_shared_among_tokens_that_came_together() -> None:
    pace = Pace(10.0)
    assert pace.tokens(1, 10.5) == 0.5
    assert pace.tokens(2, 10.7) == pytest.approx(0.1)
    assert pace.tokens(1, 11.7) == pytest.approx(1.0)
    assert pace.first_seconds == 0.5
    assert pace.gap_quantile(0.5) == pytest.approx(0.1)
    assert pace.gap_quantile(0.99) == pytest.approx(1.0)
