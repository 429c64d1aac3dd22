"""The pipeline of steps between a scheduler and a forward stream.

A module of its own: ranks other than the first use the stream, but no scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from ferryman.schedule.batch import StepOutcome, StepPlan
from ferryman.schedule.scheduler import Scheduler

Submit = Callable[[StepPlan], "Future[StepOutcome]"]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was submitted, and the future of its outcome."""

    plan: StepPlan
    outcome: Future[StepOutcome]


class Pipeline:
    """Feeds a forward stream from a scheduler. Used from one thread only.

    `flights` are the submitted steps, the oldest first. The owner removes each one when its outcome
    has arrived, and has the scheduler commit it.
    """

    def __init__(self, scheduler: Scheduler, submit: Submit) -> None:
        self._scheduler = scheduler
        self._submit = submit
        self.flights: deque[Flight] = deque()

    def fill(self, now: float) -> None:
        """Submits steps until the scheduler has no step to give."""
        while (plan := self._scheduler.plan(now)) is not None:
            self.flights.append(Flight(plan, self._submit(plan)))
