"""The router's queue: bounded, fair between tenants by tokens, and nobody is lost in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.test_routing_policy import beat_of, fleet_of

from ferryman.errors import QueueFull
from ferryman_router.routing.fleet import WorkerName
from ferryman_router.routing.queue import Ticket, WaitQueue

TENANTS = "abc"


def _ticket(name: str, tenant: str = "a", deadline: float = 100.0, cost: int = 1) -> Ticket:
    return Ticket(name, tenant, deadline, cost)


def _next(queue: WaitQueue) -> Ticket:
    ticket = next(iter(queue.heads()))
    queue.take(ticket)
    return ticket


def _served(queue: WaitQueue) -> list[str]:
    return [_next(queue).request_id for _ in range(len(queue))]


def test_tenants_take_turns_and_each_is_served_in_its_order() -> None:
    queue = WaitQueue(10, 10)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c")):
        queue.join(_ticket(name, tenant))
    assert _served(queue) == ["a1", "b1", "c1", "a2", "a3"]


def test_turns_are_counted_in_tokens() -> None:
    queue = WaitQueue(20, 20)
    for i in range(3):
        queue.join(_ticket(f"long{i}", "a", cost=100))
    for i in range(6):
        queue.join(_ticket(f"short{i}", "b", cost=50))
    served = _served(queue)
    assert served[:6] == ["long0", "short0", "short1", "long1", "short2", "short3"]


def test_a_lone_request_waits_for_no_second_one_of_anybody() -> None:
    queue = WaitQueue(1000, 500)
    for i in range(300):
        queue.join(_ticket(f"a{i}", "a", cost=10 + i % 7))
    for _ in range(20):
        _next(queue)
    queue.join(_ticket("light", "b", cost=400))
    assert queue.heads().__next__().request_id == "light", "however much it costs"


def test_coming_and_going_is_no_cheaper_than_waiting() -> None:
    queue = WaitQueue(1000, 500)
    for i in range(50):
        queue.join(_ticket(f"a{i}", "a", cost=10))
    served = []
    queue.join(_ticket("b0", "b", cost=10))
    for i in range(1, 31):
        served.append(_next(queue).tenant)
        if served[-1] == "b":
            queue.join(_ticket(f"b{i}", "b", cost=10))
    assert served.count("b") == 15


def test_bounds_hold_for_all_and_for_each_tenant() -> None:
    queue = WaitQueue(3, 2)
    queue.join(_ticket("a1"))
    queue.join(_ticket("a2"))
    with pytest.raises(QueueFull, match="tenant") as caught:
        queue.check_room("a", 7.0)
    assert caught.value.retry_after_seconds == 7.0
    queue.check_room("b", 7.0)
    queue.join(_ticket("b1", "b"))
    with pytest.raises(QueueFull, match="3 requests wait"):
        queue.check_room("c", 7.0)
    queue.rejoin(_ticket("a0"))  # it had its place before
    assert [ticket.request_id for ticket in queue.heads()] == ["a0", "a1", "b1"]


def test_what_was_taken_before_is_first_and_is_not_charged_again() -> None:
    queue = WaitQueue(10, 10)
    for name in ("a1", "a2"):
        queue.join(_ticket(name, "a", cost=5))
    back = _next(queue)
    queue.join(_ticket("b1", "b", cost=5))
    queue.rejoin(back)
    assert queue.has_returned(back)
    assert _served(queue) == ["a1", "b1", "a2"]


def test_what_was_turned_away_is_where_it_was_and_its_tenant_is_not_charged_twice() -> None:
    queue = WaitQueue(10, 10)
    for name in ("a1", "a2", "a3"):
        queue.join(_ticket(name, "a", cost=5))
    back = _next(queue)
    queue.join(_ticket("b1", "b", cost=5))
    queue.put_back(back)
    assert not queue.has_returned(back)
    assert _served(queue) == ["a1", "b1", "a2", "a3"]
    queue.join(_ticket("a4", "a", cost=5))
    back = _next(queue)
    queue.put_back(back)  # its line was gone
    assert _served(queue) == ["a4"]


def test_deadlines_pass_in_the_queue() -> None:
    queue = WaitQueue(5, 5)
    queue.join(_ticket("a1", deadline=1.0))
    queue.join(_ticket("a2", deadline=3.0))
    queue.rejoin(_ticket("a0", deadline=0.5))
    assert [ticket.request_id for ticket in queue.expire(1.0)] == ["a0", "a1"]
    assert _served(queue) == ["a2"]


joins = st.tuples(st.sampled_from(TENANTS), st.integers(1, 50))


@given(st.lists(joins, max_size=30), st.sampled_from(TENANTS), st.integers(0, 12))
def test_what_is_before_a_request_is_what_is_served_before_it(
    waiting: list[tuple[str, int]], tenant: str, num_taken: int
) -> None:
    queue = WaitQueue(100, 100)
    for i, (name, cost) in enumerate(waiting):
        queue.join(_ticket(f"{name}{i}", name, cost=cost))
    for _ in range(min(num_taken, len(queue))):
        _next(queue)
    foretold = queue.cost_before(tenant)
    queue.join(_ticket("mine", tenant, cost=7))
    before = 0
    while (ticket := _next(queue)).request_id != "mine":
        before += ticket.cost
    # A request is served whole, so that of each other tenant one may lie across the mark.
    assert before - 50 * (len(TENANTS) - 1) <= foretold <= before + 50 * (len(TENANTS) - 1)


@given(st.lists(st.tuples(st.sampled_from("jtlrp"), st.integers(0, 9), joins)))
def test_nobody_is_lost_or_served_twice(
    steps: list[tuple[str, int, tuple[str, int]]],
) -> None:
    queue, waiting, taken = WaitQueue(100, 100), dict[str, Ticket](), list[Ticket]()
    for i, (what, pick, (tenant, cost)) in enumerate(steps):
        if what == "j":
            ticket = waiting[f"{tenant}{i}"] = _ticket(f"{tenant}{i}", tenant, cost=cost)
            queue.join(ticket)
        elif what == "t" and len(queue):
            heads = list(queue.heads())
            ticket = heads[pick % len(heads)]
            queue.take(ticket)
            taken.append(waiting.pop(ticket.request_id))
        elif what == "l" and waiting:
            name = sorted(waiting)[pick % len(waiting)]
            assert queue.leave(name, waiting.pop(name).tenant)
            assert not queue.leave(name, name[0])
        elif what in "rp" and taken:
            ticket = taken.pop()
            waiting[ticket.request_id] = ticket
            (queue.rejoin if what == "r" else queue.put_back)(ticket)
        assert len(queue) == len(waiting)
        assert queue.cost == sum(ticket.cost for ticket in waiting.values())
    assert set(_served(queue)) == set(waiting)


def test_a_worker_that_is_only_full_leaves_no_role_empty() -> None:
    fleet, name = fleet_of(beat_of("decode", 1)), WorkerName("decode-00000001", 1)
    fleet.avoid(name, 100.0)
    assert fleet.is_served("decode")
    fleet.suspect(name)
    assert not fleet.is_served("decode")
    fleet.trust(name)
    assert fleet.is_served("decode")
    fleet.on_heartbeat(beat_of("decode", 1, is_ready=False), 1.0)
    assert not fleet.is_served("decode")
