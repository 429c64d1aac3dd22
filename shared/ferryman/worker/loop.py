"""The step loop: plan → run → commit on the event loop's side, woken by whatever makes work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from ferryman.cache.branch import CacheChange
from ferryman.engine.assembly import Engine
from ferryman.engine.pipeline import Pipeline
from ferryman.schedule.batch import PrefillStep, StepOutcome, StepPlan
from ferryman.schedule.events import Event
from ferryman.worker.pace import Pace

OnEvents = Callable[[list[Event]], None]
OnChanges = Callable[[tuple[CacheChange, ...]], None]
Clock = Callable[[], float]


class StepLoop:
    """Drives one engine. `on_events` is called on the loop after every change, in order, and then
    `on_changes` with what came into the cache and went out of it.

    Whoever changes what can be scheduled (submits, frees, adopts, cancels, flushes) sets `bell`.
    """

    def __init__(
        self,
        engine: Engine,
        bell: asyncio.Event,
        on_events: OnEvents,
        clock: Clock,
        *,
        on_changes: OnChanges = lambda _: None,
    ) -> None:
        self._scheduler = engine.scheduler
        self._stream = engine.stream
        self._pipeline = Pipeline(engine.scheduler, self._submit)
        self._on_events, self._on_changes = on_events, on_changes
        self._clock = clock
        self._bell = bell
        self._loop = asyncio.get_running_loop()
        self.pace = Pace()

    async def run(self) -> None:
        """For ever. Raises what a step raised: then the device's state is unknown."""
        while True:
            self._bell.clear()
            self._commit_finished()
            self._pipeline.fill(self._clock())
            self._report()
            oldest = self._pipeline.oldest
            if oldest is None or not oldest.outcome.done():
                await self._bell.wait()
            else:
                await asyncio.sleep(0)  # however fast steps are, the servers get their turn

    def _commit_finished(self) -> None:
        while (flight := self._pipeline.oldest) is not None and flight.outcome.done():
            outcome = self._pipeline.commit_oldest(self._clock())
            self._note_pace(flight.plan, outcome)
            self._report()

    def _report(self) -> None:
        if events := self._scheduler.take_events():
            self._on_events(events)
        if changes := self._scheduler.take_cache_changes():
            self._on_changes(changes)

    def _note_pace(self, plan: StepPlan, outcome: StepOutcome) -> None:
        if isinstance(plan, PrefillStep):
            num_tokens = sum(chunk.end - chunk.start for chunk in plan.chunks)
            self.pace.prefilled(num_tokens, outcome.forward_seconds)
            self.pace.loaded(outcome.loaded)
            self._scheduler.set_costs(self.pace.costs())
        else:
            self.pace.decoded(outcome.forward_seconds)

    def _submit(self, plan: StepPlan) -> Future[StepOutcome]:
        future = self._stream.submit(plan)
        future.add_done_callback(self._ring_from_stream)
        return future

    def _ring_from_stream(self, _done: Future[StepOutcome]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._bell.set)
