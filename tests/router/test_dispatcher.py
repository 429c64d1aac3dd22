"""Admission by predicted wait, late binding and fairness: the dispatcher in virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.harness.router import PROMPT, QueueCaller, QueueCluster
from tests.skipped_time import skipped_time

from ferryman.runtime.life import alongside
from ferryman_router.routing.dispatcher import IDLE_SECONDS, TICK_SECONDS
from ferryman_router.routing.queue import QueuePosition, Ticket
from ferryman_router.routing.routing_policy import RoutingRequest

REQUESTS = 120  # of a phase at capacity, at least: enough for chance to even out


def phase_of(cluster: QueueCluster) -> float:
    return max(REQUESTS / cluster.capacity, 3 * cluster.deadline)


def during(cluster: QueueCluster, phase: int) -> list[QueueCaller]:
    start = phase * phase_of(cluster)
    end = start + phase_of(cluster)
    return [one for one in cluster.callers if start <= one.arrived < end]


async def overloaded(cluster: QueueCluster, factor: float) -> None:
    """As much as there is capacity, then `factor` times that, then half."""
    seconds = phase_of(cluster)
    for phase, times in enumerate((1.0, factor, 0.5)):
        cluster.arrivals(cluster.capacity * times, phase * seconds, (phase + 1) * seconds)
    await cluster.drain()


@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    rows=st.sampled_from([2, 4, 8]),
    times_service=st.sampled_from([3.0, 5.0, 8.0]),
    factor=st.sampled_from([3.0, 5.0]),
    seed=st.integers(0, 5),
)
def test_overload_costs_little_of_what_could_be_answered_and_is_over_when_it_ends(
    rows: int, times_service: float, factor: float, seed: int
) -> None:
    cluster = QueueCluster(rows, service=2.0, deadline=2.0 * times_service, seed=seed)
    asyncio.run(overloaded(cluster, factor))
    goodput = [sum(one.is_good for one in during(cluster, phase)) for phase in range(3)]
    assert goodput[1] >= 0.85 * goodput[0], goodput
    refused = [one for one in cluster.callers if one.kind == "refused"]
    assert refused, "there was an overload"
    recovered = 2 * phase_of(cluster) + cluster.deadline
    after = [one for one in cluster.callers if one.arrived > recovered]
    assert sum(one.kind == "refused" for one in after) <= len(after) / 10, "nothing of it is left"


def swings(seed: int, until: float, hold: tuple[float, float]) -> list[tuple[float, float]]:
    """Full speed and a third of it in turn, each for some seconds."""
    rng, at, speeds = random.Random(seed), 0.0, list[tuple[float, float]]()
    while at < until:
        speeds.append((at, 1.0 if len(speeds) % 2 == 0 else 1 / 3))
        at += rng.uniform(*hold)
    return speeds


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    rows=st.sampled_from([4, 12]),
    share=st.sampled_from([0.1, 0.15, 0.2]),
    hold=st.sampled_from([(0.5, 4.0), (3.0, 10.0)]),
    factor=st.sampled_from([2.0, 5.0]),
    seed=st.integers(0, 9),
)
def test_a_machine_whose_speed_swings_by_three_does_four_fifths_of_what_it_can(
    rows: int, share: float, hold: tuple[float, float], factor: float, seed: int
) -> None:
    """A service is a share of the deadline at full speed, and three times that at a third."""
    seconds = 40.0
    cluster = QueueCluster(rows, service=6.0 * share, deadline=6.0, seed=seed)
    cluster.swing(swings(seed, seconds, hold))
    cluster.arrivals(cluster.capacity * factor * 2 / 3, 0.0, seconds)

    async def overloaded() -> float:
        await cluster.run(6.0)
        before = cluster.possible
        await cluster.run(seconds)
        possible = cluster.possible - before
        await cluster.drain()
        return possible

    possible = asyncio.run(overloaded())
    good = sum(one.is_good and 6.0 <= one.ended < seconds for one in cluster.callers)
    assert good >= 0.8 * possible, (good, possible)


def test_most_refusals_come_at_once_and_few_are_computed_in_vain() -> None:
    cluster = QueueCluster(8, service=2.0, deadline=12.0)
    asyncio.run(overloaded(cluster, 5.0))
    arrived = during(cluster, 1)
    refused = [one for one in arrived if one.kind == "refused"]
    assert len(refused) > len(arrived) / 2
    assert sum(one.ended == one.arrived for one in refused) > 0.9 * len(refused)
    assert all(1.0 <= one.retry_seconds <= 60.0 for one in refused)
    served = [one for one in arrived if one.placed_after >= 0]
    assert sum(one.is_good for one in served) > 0.95 * len(served)


def test_who_found_a_full_queue_comes_back_to_room_and_before_workers_stand_idle() -> None:
    async def burst() -> None:
        cluster = QueueCluster(4, service=1.0, deadline=1e4, max_waiting=80)
        cluster.arrivals(6.0, 0.0, 15.0)  # it learns its pace
        await cluster.drain()
        begun = cluster.now
        for _ in range(84 + 16):
            cluster.arrive()
        await cluster.run(begun)
        refused = [one for one in cluster.callers if one.kind == "refused"]
        assert len(refused) == 16
        hint = refused[0].retry_seconds
        await cluster.run(begun + hint)
        assert len(cluster.dispatcher) <= 80 - len(refused), "there is room for all of them"
        assert len(cluster.dispatcher) >= 40, "and others still wait"
        await cluster.drain()

    asyncio.run(burst())


def test_a_cluster_that_has_served_nothing_yet_refuses_nobody() -> None:
    async def burst() -> QueueCluster:
        cluster = QueueCluster(4, service=2.0, deadline=60.0)
        for _ in range(60):
            cluster.arrive()
        await cluster.run(1.0)
        assert {one.kind for one in cluster.callers} == {"waits"}
        await cluster.drain()
        return cluster

    cluster = asyncio.run(burst())
    assert all(one.is_good for one in cluster.callers)


def test_an_idle_cluster_refuses_nobody_whatever_it_has_seen() -> None:
    async def idle() -> None:
        cluster = QueueCluster(2, service=8.0, deadline=30.0)
        cluster.arrivals(1.0, 0.0, 60.0)
        await cluster.drain()
        assert any(one.kind == "refused" for one in cluster.callers)
        cluster.deadline = 4.0  # less than a service took, and twice what it takes now
        cluster.service = 2.0
        cluster.at(cluster.now + 1.0, cluster.arrive)
        cluster.at(cluster.now + 1.0, cluster.arrive)
        await cluster.drain()
        assert [one.kind for one in cluster.callers[-2:]] == ["whole", "whole"]

    asyncio.run(idle())


def test_one_that_is_too_late_in_any_case_takes_no_part_of_a_machine_that_others_use() -> None:
    async def busy() -> None:
        cluster = QueueCluster(4, service=4.0, deadline=60.0)
        for _ in range(8):
            cluster.arrive()
        await cluster.drain()  # it learns its pace
        cluster.arrive()
        await cluster.run(cluster.now + 0.5)
        cluster.deadline = 0.5
        cluster.arrive()
        await cluster.run(cluster.now + 0.1)
        assert cluster.callers[-1].placed_after < 0, "three rows are free"
        await cluster.drain()
        assert [one.kind for one in cluster.callers[-2:]] == ["whole", "deadline in the queue"]
        cluster.arrive()
        await cluster.drain()
        assert cluster.callers[-1].placed_after >= 0, "nobody runs: the forecast may be wrong"

    asyncio.run(busy())


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_lone_request_waits_for_one_request_of_a_tenant_with_three_hundred(rows: int) -> None:
    async def crowd() -> None:
        cluster = QueueCluster(rows, service=1.0, deadline=1e4)
        for _ in range(300):
            cluster.arrive("heavy")
        await cluster.run(10.0)
        before = cluster.num_placed
        cluster.arrive("light")
        await cluster.drain()
        light = cluster.callers[300]
        assert light.placed_after <= before + 1
        assert all(one.is_good for one in cluster.callers)

    asyncio.run(crowd())


def test_no_row_stands_empty_while_requests_wait() -> None:
    async def crowd() -> QueueCluster:
        cluster = QueueCluster(8, service=1.0, deadline=1e4)
        for _ in range(200):
            cluster.arrive()
        await cluster.drain()
        return cluster

    cluster = asyncio.run(crowd())
    ideal = 200 / cluster.capacity
    assert max(one.ended for one in cluster.callers) < 1.1 * ideal


def test_what_waited_too_long_is_refused_before_anything_is_computed_for_it() -> None:
    async def burst() -> QueueCluster:
        """Nothing was measured when they came, so all were let in."""
        cluster = QueueCluster(4, service=2.0, deadline=12.0)
        for _ in range(60):
            cluster.arrive()
        await cluster.drain()
        return cluster

    callers = asyncio.run(burst()).callers
    assert {one.kind for one in callers} == {"whole", "refused"}
    assert sum(one.is_good for one in callers) > 15
    assert all(one.ended > one.arrived for one in callers)


def test_one_that_leaves_as_it_is_placed_takes_no_room_with_it() -> None:
    async def leaving() -> None:
        cluster = QueueCluster(1, service=1.0, deadline=100.0)
        place, asking = cluster.dispatcher.place, RoutingRequest(PROMPT)
        tickets = [Ticket(name, "a", 100.0) for name in ("first", "second", "third")]
        first = await place(tickets[0], asking, QueuePosition.NEW)
        waiting = [
            asyncio.create_task(place(ticket, asking, QueuePosition.NEW)) for ticket in tickets[1:]
        ]
        await asyncio.sleep(0)
        assert len(cluster.dispatcher) == 2
        cluster.dispatcher.leave("first", first)
        cluster.dispatcher.serve()
        assert len(cluster.dispatcher) == 1, "the second one is placed, and has not heard of it"
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        assert not any("second.1" in worker.claims for worker in cluster.fleet)
        cluster.dispatcher.serve()
        cluster.dispatcher.leave("third", await waiting[1])
        assert not any(worker.claims for worker in cluster.fleet)

    asyncio.run(leaving())


def test_one_that_was_turned_away_has_its_place_and_no_other_is_before_it_twice() -> None:
    async def turned_away() -> list[str]:
        cluster = QueueCluster(1, service=1.0, deadline=100.0)
        asking, order = RoutingRequest(PROMPT), list[str]()

        async def place(name: str, tenant: str, standing: QueuePosition) -> None:
            ticket = Ticket(name, tenant, 100.0)
            placed = await cluster.dispatcher.place(ticket, asking, standing)
            order.append(name)
            cluster.dispatcher.leave(name, placed)
            cluster.dispatcher.serve()

        row = await cluster.dispatcher.place(Ticket("row", "a", 100.0), asking, QueuePosition.NEW)
        asks = [
            ("a1", "a", QueuePosition.NEW),
            ("b1", "b", QueuePosition.NEW),
            ("b2", "b", QueuePosition.NEW),
        ]
        asks += [("a0", "a", QueuePosition.TURNED_AWAY), ("moved", "b", QueuePosition.UNDER_WAY)]
        tasks = []
        for ask in asks:
            tasks.append(asyncio.create_task(place(*ask)))
            await asyncio.sleep(0)
        cluster.dispatcher.leave("row", row)
        cluster.dispatcher.serve()
        await asyncio.gather(*tasks)
        return order

    order = asyncio.run(turned_away())
    assert order[:2] == ["moved", "a0"]
    assert order.index("b1") < order.index("b2")


async def test_an_idle_router_looks_once_a_second_and_often_when_a_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, time = QueueCluster(1, service=1.0, deadline=100.0), skipped_time(monkeypatch)
    place, looks, under_way = cluster.dispatcher.place, list[float](), list[str]()

    async def looks_in(seconds: float) -> int:
        looks.clear()
        for _ in range(round(seconds / TICK_SECONDS)):
            await time.skip(TICK_SECONDS)
        return len(looks)

    looking = cluster.dispatcher.run(looks.append, lambda: bool(under_way))
    asking = RoutingRequest(PROMPT)
    first, second = (Ticket(name, "tenant", 100.0) for name in ("first", "second"))
    async with alongside(looking):
        assert await looks_in(10.0) <= 10
        explanation = await place(first, asking, QueuePosition.NEW)
        under_way.append("first")
        await time.skip(IDLE_SECONDS)
        assert await looks_in(1.0) >= 15, "one that runs may be stalled"
        under_way.clear()
        await time.skip(TICK_SECONDS)
        assert await looks_in(10.0) <= 10
        waiting = asyncio.create_task(place(second, asking, QueuePosition.NEW))
        assert await looks_in(1.0) >= 15, "from the moment in which it came"
        cluster.dispatcher.leave("first", explanation)
        await time.skip(TICK_SECONDS)
        cluster.dispatcher.leave("second", await waiting)
