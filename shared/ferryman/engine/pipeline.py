"""plan → run → commit, with as many steps in flight as the scheduler allows.

With overlap, step k + 1 is planned and submitted while k runs; results of k are applied after that.
The offline engine waits for a step by blocking, a worker by awaiting: the rest is the same.
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
    """A step that was submitted, and where its outcome will be."""

    plan: StepPlan
    outcome: Future[StepOutcome]


class Pipeline:
    """Feeds a forward stream from a scheduler. Touched from one thread only."""

    def __init__(self, scheduler: Scheduler, submit: Submit) -> None:
        self._scheduler = scheduler
        self._submit = submit
        self._flights: deque[Flight] = deque()

    def fill(self, now: float) -> None:
        """Submits steps until the scheduler has no more to give now."""
        while (plan := self._scheduler.plan(now)) is not None:
            self._flights.append(Flight(plan, self._submit(plan)))

    @property
    def oldest(self) -> Flight | None:
        """The step to wait for; None when the device has nothing to do."""
        return self._flights[0] if self._flights else None

    def commit_oldest(self, now: float) -> StepOutcome:
        """Applies the oldest step, whose outcome is there. Raises what the step raised."""
        flight = self._flights.popleft()
        outcome = flight.outcome.result()
        self._scheduler.commit(flight.plan, outcome, now)
        return outcome
