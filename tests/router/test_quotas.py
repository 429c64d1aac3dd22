"""The limits of tenants: nobody gets more than a minute allows, and everybody gets that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.errors import RateLimited
from ferryman_router.routing.queue import Ticket, WaitQueue
from ferryman_router.routing.quotas import Quotas, TenantLimits

PER_MINUTE = 600
STEPS = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 900), st.integers(0, 300)), max_size=60)


def quotas_of(**limits: int) -> Quotas:
    return Quotas({"shop": TenantLimits(**limits)})


@given(steps=STEPS)
def test_a_tenant_gets_what_its_minutes_allow_and_a_refused_one_is_told_when(
    steps: list[tuple[float, int, int]],
) -> None:
    quotas, now, used = quotas_of(tokens_per_minute=PER_MINUTE), 0.0, 0
    for pause, prompt, answer in steps:
        now += pause
        try:
            quotas.admit("shop", prompt, now)
        except RateLimited as refused:
            now += refused.retry_after_seconds + 1e-6
            quotas.admit("shop", prompt, now)
        # A prompt longer than a minute's tokens is taken by a full bucket, which is in debt then.
        assert used + min(prompt, PER_MINUTE) <= PER_MINUTE * (1 + now / 60) + 1e-3
        quotas.ended("shop", answer, now)
        used += prompt + answer


def test_requests_are_counted_by_the_minute() -> None:
    quotas = quotas_of(requests_per_minute=2)
    for _ in range(2):
        quotas.admit("shop", 10_000, 5.0)
    with pytest.raises(RateLimited, match="2 requests a minute") as refused:
        quotas.admit("shop", 1, 5.0)
    assert refused.value.retry_after_seconds == pytest.approx(30)
    quotas.admit("shop", 1, 35.0)


def test_a_refused_request_costs_nothing() -> None:
    quotas = quotas_of(tokens_per_minute=60, requests_per_minute=1)
    quotas.admit("shop", 60, 0.0)
    for _ in range(50):
        with pytest.raises(RateLimited):
            quotas.admit("shop", 60, 30.0)
    quotas.admit("shop", 60, 60.0)


def test_those_under_way_are_bounded_and_leave_room_when_they_end() -> None:
    quotas = quotas_of(max_in_flight=2)
    quotas.admit("shop", 1, 0.0)
    quotas.admit("shop", 1, 0.0)
    with pytest.raises(RateLimited, match="2 requests of shop are under way"):
        quotas.admit("shop", 1, 0.0)
    quotas.ended("shop", 3, 0.0)
    quotas.admit("shop", 1, 0.0)


def test_new_limits_hold_for_requests_under_way_too() -> None:
    quotas = quotas_of(max_in_flight=5)
    for _ in range(3):
        quotas.admit("shop", 1, 0.0)
    quotas.limits = {"shop": TenantLimits(max_in_flight=3)}
    with pytest.raises(RateLimited):
        quotas.admit("shop", 1, 0.0)
    quotas.limits = {}
    quotas.admit("shop", 1, 0.0)


def test_tenants_do_not_use_each_others_limits() -> None:
    limits = TenantLimits(requests_per_minute=1)
    quotas = Quotas({"shop": limits, "lab": limits})
    quotas.admit("shop", 1, 0.0)
    quotas.admit("lab", 1, 0.0)
    for _ in range(9):
        quotas.admit("public", 1, 0.0)


def served(shares: dict[str, float], num_taken: int) -> list[str]:
    """The tenants of the first requests served, where each has many of equal cost."""
    queue = WaitQueue(1000, 1000)
    for tenant, share in shares.items():
        for number in range(40):
            queue.join(Ticket(f"{tenant}-{number}", tenant, 99.0, cost=100, share=share))
    taken = []
    for _ in range(num_taken):
        head = next(iter(queue.heads()))
        queue.take(head)
        taken.append(head.tenant)
    return taken


def test_a_share_of_three_is_served_three_times_as_often() -> None:
    taken = served({"large": 3.0, "small": 1.0}, 40)
    assert taken.count("large") == 30
    assert all("small" in taken[at : at + 5] for at in range(0, 40, 5)), "nobody is starved"


def test_the_cost_before_a_request_counts_shares() -> None:
    """A newcomer hears of all that is then served before it."""
    queue = WaitQueue(1000, 1000)
    for number in range(6):
        queue.join(Ticket(f"s-{number}", "small", 99.0, cost=100, share=0.5))
        queue.join(Ticket(f"l-{number}", "large", 99.0, cost=100, share=2.0))
    told = queue.cost_before("small")
    queue.join(Ticket("last", "small", 99.0, cost=100, share=0.5))
    before = 0
    while (head := next(iter(queue.heads()))).request_id != "last":
        queue.take(head)
        before += head.cost
    assert told == before
