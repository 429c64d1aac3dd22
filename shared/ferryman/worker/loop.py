"""The step loop: plan → run → commit on the side of the event loop, woken when there is new work.

The speed of the worker is measured here, by its own steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from ferryman.cache.node import TreeChange
from ferryman.cache.resume import FIRST_GUESS, ResumeCosts
from ferryman.engine.pipeline import Pipeline, Submit
from ferryman.errors import FerrymanError
from ferryman.schedule.batch import (
    NOTHING_LOADED,
    AuditStep,
    DecodeStep,
    LoadReport,
    MixedStep,
    StepOutcome,
    StepPlan,
)
from ferryman.schedule.events import ChainDropped, Event, RequestFailed
from ferryman.schedule.scheduler import Scheduler
from ferryman.worker.numeric_watch import NumericWatch

if TYPE_CHECKING:  # imports every kernel, which the simulator runs without
    from ferryman.engine.engine import Engine

log = logging.getLogger(__name__)

# The weight of the past after each step: about the last ten steps count.
KEPT = 0.9

OnEvents = Callable[[list[Event]], None]
OnChanges = Callable[[tuple[TreeChange, ...]], None]


class OnSteps(Protocol):
    """Hears how many steps that draw tokens of running requests have ended, and whether one runs
    now."""

    def __call__(self, num_ended: int, *, is_drawing: bool) -> None: ...


Clock = Callable[[], float]


async def memory_ready(engine: Engine, prompt_len: int) -> None:
    """Writes for the first time the memory that a prompt may take, while the event loop runs.

    Slots are given on the loop. A prompt of thousands of tokens in memory that no other had would
    hold up the tokens of all streams: 42 MB took 73 ms when pages come from a hypervisor.
    """
    if fresh := engine.scheduler.last_fresh(prompt_len):
        await asyncio.to_thread(engine.prepare_ahead, fresh)


class StepLoop:
    """Drives one scheduler and the stream that `submit` is of. After every change it calls
    `on_events` with the events in order, then `on_changes` with the changes of the cache, and
    `on_steps` when the next steps are submitted.

    Code that changes what can be scheduled (submits, frees, adopts, cancels, flushes) sets `wake`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        submit: Submit,
        wake: asyncio.Event,
        on_events: OnEvents,
        clock: Clock,
        *,
        on_changes: OnChanges = lambda _: None,
        on_steps: OnSteps = lambda _num_ended, *, is_drawing: None,
        pace: StepTimings | None = None,
    ) -> None:
        self._scheduler, self._stream_submit = scheduler, submit
        self._pipeline = Pipeline(scheduler, self._submit)
        self._on_events, self._on_changes, self._on_steps = on_events, on_changes, on_steps
        self._clock = clock
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self.pace = pace or StepTimings()

    async def run(self) -> None:
        """Runs for ever. Raises the error of a step: then the device's state is unknown.

        An error in the work for one request ends only that request, here as in the schedule and in
        the preparation of a step (`schedule/request_table.py`, `hear_each`).
        """
        while True:
            self._wake.clear()
            self.advance()
            if not self._is_oldest_done():
                await self._wake.wait()
            else:
                await asyncio.sleep(0)  # even if steps are fast, the servers get their turn

    def advance(self) -> None:
        """Commits the steps that are done, in order, and submits those that can follow."""
        num_ended = 0
        while self._is_oldest_done():
            flight = self._pipeline.flights.popleft()
            outcome = flight.outcome.result()
            self._scheduler.commit(flight.plan, outcome, self._clock())
            num_ended += _draws_for_streams(flight.plan)
            self._note_pace(flight.plan, outcome)
            self._report()
        self._pipeline.fill(self._clock())
        self._report()
        is_drawing = any(_draws_for_streams(flight.plan) for flight in self._pipeline.flights)
        self._on_steps(num_ended, is_drawing=is_drawing)

    def _is_oldest_done(self) -> bool:
        flights = self._pipeline.flights
        return bool(flights) and flights[0].outcome.done()

    def _report(self) -> None:
        # Handling one event may end its request, which is another event.
        while events := self._scheduler.take_events():
            self._on_events(events)
        if changes := self._scheduler.take_cache_changes():
            self._on_changes(changes)

    def _note_pace(self, plan: StepPlan, outcome: StepOutcome) -> None:
        if isinstance(plan, AuditStep):
            return  # its chunks are shorter than those of prompts, and cost more a token
        seconds = outcome.forward_seconds
        if isinstance(plan, DecodeStep):
            self.pace.decoded(seconds)
            return
        if isinstance(plan, MixedStep):  # the prompts' part is what such a step takes longer
            plan, seconds = plan.prompts, max(0.0, seconds - self.pace.step_seconds)
        num_tokens = sum(chunk.end - chunk.start for chunk in plan.chunks)
        self.pace.prefilled(num_tokens, seconds)
        self.pace.loaded(outcome.loaded)
        self._scheduler.set_costs(self.pace.costs())

    def _submit(self, plan: StepPlan) -> Future[StepOutcome]:
        future = self._stream_submit(plan)
        future.add_done_callback(self._ring_from_stream)
        return future

    def _ring_from_stream(self, _done: Future[StepOutcome]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)


def _draws_for_streams(plan: StepPlan) -> bool:
    """Whether running requests wait for the step."""
    return isinstance(plan, DecodeStep | MixedStep)


def hear_each(
    scheduler: Scheduler,
    watch: NumericWatch,
    events: Iterable[Event],
    hear: Callable[[Event], None],
    fail: Callable[[RequestFailed], None],
) -> None:
    """Passes events to a worker in order. An error in its handler ends the event's request only.

    After such an error the worker gets one more event of that request, in the next round: its
    failure. `watch` counts failures before the worker gets them.
    """
    ended: set[str] = set()
    for event in events:
        if isinstance(event, RequestFailed):
            failure = watch.on_failure(event)
            _log_failure(failure)
            fail(failure)
            continue
        if isinstance(event, ChainDropped):
            watch.on_chain_dropped(event)
        if event.request_id not in ended:
            try:
                hear(event)
            except Exception as error:  # any error goes to the caller of the request
                scheduler.fail(event.request_id, error)
                ended.add(event.request_id)


def _log_failure(event: RequestFailed) -> None:
    """Logs the message of a FerrymanError; any other error is a bug and gets its traceback."""
    if isinstance(event.error, FerrymanError):
        log.warning("request failed id=%s: %s", event.request_id, event.error)
    else:
        log.error("request failed id=%s", event.request_id, exc_info=event.error)


class DecayingMean:
    """A mean of which the newest observations count most; 0 before the first."""

    __slots__ = ("_count", "_total")

    def __init__(self) -> None:
        self._total = self._count = 0.0

    @property
    def value(self) -> float:
        return self._total / self._count if self._count else 0.0

    def add(self, total: float, count: float = 1.0) -> None:
        """`total` over `count` observations that were made together."""
        self._total = KEPT * self._total + total
        self._count = KEPT * self._count + count


class StepTimings:
    """The speed of this worker, which plans and routers use.

    Decaying means: prefill seconds over tokens, decode seconds over steps, loads over bytes.

    A step of one token takes about as long as one of fifty, so averages are per token, not per
    step; and for the same reason per byte, not per load.
    """

    def __init__(self) -> None:
        self._prefill, self._decode, self._load = (DecayingMean() for _ in range(3))
        self._all_loads = NOTHING_LOADED

    @property
    def seconds_per_token(self) -> float:
        """0 until a prompt was computed."""
        return self._prefill.value

    @property
    def step_seconds(self) -> float:
        """0 until a step has decoded."""
        return self._decode.value

    @property
    def load_seconds_per_byte(self) -> float:
        """The time from the host tier to the device, verified; 0 until something was loaded."""
        return self._load.value

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self._prefill.add(seconds, num_tokens)

    def decoded(self, seconds: float) -> None:
        self._decode.add(seconds)

    def loaded(self, report: LoadReport) -> None:
        """Counts a step's loads: only verified bytes show the speed."""
        if report.num_bytes:
            so_far = self._all_loads
            self._all_loads = LoadReport(
                so_far.num_bytes + report.num_bytes, so_far.seconds + report.seconds
            )
            self._load.add(report.seconds, report.num_bytes)

    def statistics(self) -> LoadReport:
        """The loads from the host arena to the device since the start, verified."""
        return self._all_loads

    def costs(self) -> ResumeCosts:
        """The costs that a plan compares loading with; guesses until there is a measurement."""
        per_token = self.seconds_per_token or FIRST_GUESS.prefill_seconds_per_token
        per_byte = self.load_seconds_per_byte or FIRST_GUESS.load_seconds_per_byte
        return ResumeCosts(per_token, per_byte)
