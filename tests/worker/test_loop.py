"""The step loop shares the event loop; its heartbeats show whether an engine is stuck or idle."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

from tests.harness.pair import fake_engine, request

from ferryman.engine.stream import ForwardStream
from ferryman.schedule.batch import StepOutcome, StepPlan
from ferryman.schedule.events import Event, Finished
from ferryman.schedule.sequence import Goal
from ferryman.worker.loop import StepLoop


class LoopPrompt(ForwardStream):
    """Every step has run by the time its future is seen."""

    def submit(self, plan: StepPlan) -> Future[StepOutcome]:
        future = super().submit(plan)
        future.exception()
        return future


async def test_steps_that_are_done_at_once_do_not_starve_the_event_loop() -> None:
    turns = 0
    seen: list[int] = []

    def on_events(events: list[Event]) -> None:
        if any(isinstance(event, Finished) for event in events):
            seen.append(turns)

    async def count_turns() -> None:
        nonlocal turns
        while not seen:
            turns += 1
            await asyncio.sleep(0)

    with fake_engine(stream_type=LoopPrompt) as engine:
        scheduler, submit = engine.scheduler, engine.stream.submit
        loop = StepLoop(scheduler, submit, asyncio.Event(), on_events, time.monotonic)
        engine.scheduler.submit(request("r1", [1] * 6, max_tokens=40), Goal.DECODE)
        running = asyncio.create_task(loop.run())
        await count_turns()
        running.cancel()
        await asyncio.wait([running])
    assert seen[0] >= 20, "others had a turn between the steps"
