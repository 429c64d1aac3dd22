"""A decode worker drains: the router has its requests go on elsewhere, with their state if it can.

Each client gets each token once and in order, though things go wrong on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.harness.router import (
    QUICK,
    Die,
    FakeDecode,
    Fault,
    FaultStage,
    Pause,
    Refuse,
    RouterCluster,
    cluster,
)
from tests.waiting import until

from ferryman.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OutOfSlots,
    Unavailable,
)
from ferryman_router.request.request_table import MAX_LEAVING

# No retry at all is paid for: a drain must not need one.
MEAN = QUICK.model_copy(update={"retry_floor": 0, "retry_share": 1e-6, "no_worker_seconds": 60.0})
NUM_TOKENS = 8
NOT_FOUND = NotFound("the fake does not find it")


@pytest.fixture
async def two(nats_url: str, folder: Path) -> AsyncIterator[RouterCluster]:
    async with cluster(nats_url, folder, num_decodes=2, limits=MEAN) as made:
        yield made


class DrainedWorker:
    """Requests that are held behind their first token at one worker, which then drains."""

    def __init__(self, made: RouterCluster, num_requests: int = 1) -> None:
        self.made, self.num_requests = made, num_requests
        self.gate = Pause(FaultStage.NEXT_TOKEN)
        self.answers: list[asyncio.Task[str]] = []

    async def begin(self) -> tuple[FakeDecode, FakeDecode]:
        """The worker that will drain, and the other one."""
        victim, other = self.made.decodes
        victim.suffers(self.gate)
        other.is_ready = False
        await until(lambda: any(not one.beat.is_ready for one in self.made.fleet))
        self.answers = [asyncio.create_task(self._ask()) for _ in range(self.num_requests)]
        await self.gate.reached(self.num_requests)
        return victim, other

    async def _ask(self) -> str:
        response = await self.made.complete(max_tokens=NUM_TOKENS)
        assert response.status_code == 200, response.text
        answer: str = response.json()["choices"][0]["text"]
        return answer

    def drain(self, victim: FakeDecode, other: FakeDecode) -> None:
        victim.is_ready, other.is_ready = False, True

    async def assert_whole(self) -> None:
        async with asyncio.timeout(120):
            wanted = [self.made.expected(NUM_TOKENS)] * self.num_requests
            assert await asyncio.gather(*self.answers) == wanted


def attempts(made: RouterCluster) -> list[int]:
    """The attempts that prefill was asked for."""
    return [order.context.attempt for order in made.prefills[0].orders]


async def test_a_request_moves_to_another_worker_and_no_prompt_is_computed(
    two: RouterCluster,
) -> None:
    drained = DrainedWorker(two)
    victim, other = await drained.begin()
    drained.drain(victim, other)
    await drained.assert_whole()
    (moved,) = victim.moved
    assert (moved.context.attempt, moved.decode.worker_id) == (2, other.worker_id)
    assert attempts(two) == [1]


async def test_few_leave_at_once_and_in_the_end_all_have(two: RouterCluster) -> None:
    num_requests = 3 * MAX_LEAVING
    drained = DrainedWorker(two, num_requests)
    victim, other = await drained.begin()
    requests = two.router.components.frontend.requests
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            leaving = [one.attempt.leaves for one in requests if one.attempt is not None]
            most = max(most, sum(name is not None for name in leaving))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    drained.drain(victim, other)
    await drained.assert_whole()
    watching.cancel()
    assert len(victim.moved) == num_requests
    assert 0 < most <= MAX_LEAVING
    assert attempts(two) == [1] * num_requests


async def test_without_another_worker_requests_end_where_they_are(two: RouterCluster) -> None:
    drained = DrainedWorker(two)
    victim, _ = await drained.begin()
    victim.is_ready = False
    await until(lambda: not two.fleet.is_served("decode"))
    drained.gate.release()
    await drained.assert_whole()
    assert (victim.moved, attempts(two)) == ([], [1])


async def drained_with(made: RouterCluster, fault: Fault) -> FakeDecode:
    """The worker that drained with this fault; its request's answer was whole."""
    drained = DrainedWorker(made)
    victim, other = await drained.begin()
    victim.suffers(fault)
    drained.drain(victim, other)
    await drained.assert_whole()
    assert fault.happened == 1
    return victim


async def test_a_worker_that_cannot_let_go_yet_is_asked_again(two: RouterCluster) -> None:
    victim = await drained_with(two, Refuse(FaultStage.DETACH, NOT_FOUND, times=1))
    assert len(victim.moved) == 1


@pytest.mark.parametrize(
    "error",
    [
        LeaseLost("too late"),
        InvalidRequest("not understood"),
        DeadlineExceeded("too slow"),
        Unavailable("not now"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_request_that_cannot_be_moved_is_computed_again(
    two: RouterCluster, error: Exception
) -> None:
    victim = await drained_with(two, Refuse(FaultStage.HAND_OFF, error, times=1))
    assert attempts(two) == [1, 3]
    (moved,) = victim.moved
    await victim.until_aborted(moved.context.request_id)
    # The attempt that was to move, so that the worker frees the state at once.
    assert victim.aborted == [(moved.context.request_id, 2, "not_moved")]
    assert not victim.kept


async def test_a_full_worker_is_tried_again_and_nothing_is_computed(two: RouterCluster) -> None:
    victim = await drained_with(
        two, Refuse(FaultStage.HAND_OFF, OutOfSlots("no room there", 0.05), times=1)
    )
    assert [order.context.attempt for order in victim.moved] == [2, 3]
    assert attempts(two) == [1]


async def test_a_worker_that_dies_while_it_hands_off_is_a_death_like_any(
    two: RouterCluster,
) -> None:
    await drained_with(two, Die(FaultStage.HAND_OFF))
    assert attempts(two) == [1, 3]


async def until_clients_left_at(two: RouterCluster, drained: DrainedWorker, pause: Pause) -> None:
    """All clients leave when a worker stands still, and the cluster has nothing to do then."""
    await pause.reached(1)
    for answer in drained.answers:
        answer.cancel()
    await two.until_free()


async def test_a_client_that_leaves_while_its_request_moves_ends_it(two: RouterCluster) -> None:
    drained = DrainedWorker(two)
    victim, other = await drained.begin()
    at_other = other.suffers(Pause(FaultStage.NEXT_TOKEN))
    drained.drain(victim, other)
    await until_clients_left_at(two, drained, at_other)
    (order,) = victim.moved
    assert await other.until_aborted(order.context.request_id) == "client_gone"


async def test_a_client_that_leaves_before_its_state_has_moved_frees_it(two: RouterCluster) -> None:
    drained = DrainedWorker(two)
    victim, other = await drained.begin()
    at_victim = victim.suffers(Pause(FaultStage.HAND_OFF))
    drained.drain(victim, other)
    await until_clients_left_at(two, drained, at_victim)
    (order,) = victim.moved
    assert await victim.until_aborted(order.context.request_id) == "client_gone"
    assert not victim.kept
