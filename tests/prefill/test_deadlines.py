"""Nothing is computed for a caller whose time is over: before the first chunk or behind it."""

from __future__ import annotations

import asyncio

import pytest
from tests.harness.pair import WorkerPair, pair_of_workers, request
from tests.waiting import until

from ferryman.errors import DeadlineExceeded

LONG = [1 + i % 5 for i in range(50)]
SHORT_SECONDS = 0.3


async def steps_of(pair: WorkerPair, name: str, prompt: list[int], deadline: float) -> int:
    """Prefill steps that begin for a prompt whose deadline passes while the first one is held."""
    before = pair.prefill.engine.stream.steps_done
    pair.prefill.hold()
    with pytest.raises(DeadlineExceeded):
        await pair.run_prefill(pair.order(request(name, prompt), deadline=deadline))
    pair.prefill.go_on()
    await until(lambda: not pair.prefill.engine.scheduler.num_in_flight)
    return pair.prefill.engine.stream.steps_done - before


async def test_a_deadline_that_passes_between_chunks_ends_the_prompt() -> None:
    async with pair_of_workers() as pair:
        whole = pair.prefill.engine.stream.steps_done
        await pair.run_prefill(pair.order(request("r1", LONG)))
        whole = pair.prefill.engine.stream.steps_done - whole
        pair.prefill.engine.scheduler.flush()
        begun = await steps_of(pair, "r2", list(reversed(LONG)), SHORT_SECONDS)
        in_flight = pair.prefill.engine.scheduler.limits.steps_in_flight
        assert begun <= in_flight < whole
        await until(lambda: not pair.prefill.leased() and not pair.decode.leased())


async def test_a_deadline_that_passes_in_prefills_queue_is_never_computed_for() -> None:
    async with pair_of_workers() as pair:
        pair.prefill.hold()
        first = asyncio.create_task(pair.run_prefill(pair.order(request("r1", LONG))))
        in_flight = pair.prefill.engine.scheduler.limits.steps_in_flight
        await until(lambda: pair.prefill.engine.scheduler.num_in_flight == in_flight)
        late = pair.order(request("late", list(reversed(LONG))), deadline=SHORT_SECONDS)
        with pytest.raises(DeadlineExceeded):
            await pair.run_prefill(late)
        pair.prefill.go_on()
        await first
        assert len(pair.prefill.facts("queued")) == 2
        assert len(pair.prefill.facts("admitted")) == 1


async def test_an_order_that_comes_too_late_is_not_begun() -> None:
    async with pair_of_workers() as pair:
        with pytest.raises(DeadlineExceeded):
            await pair.run_prefill(pair.order(request("late", LONG), deadline=0.0))
        assert pair.prefill.engine.stream.steps_done == 0
        assert not pair.decode.leased()
