"""The forward stream: one thread, one bounded queue, everything in order.

The loop plans a step and submits it; the thread launches it and sets its future's result when the
values have arrived. Step k + 1 may be launched before k's values arrive: with overlap it is planned
and submitted while k runs, and results of k are applied after that. Only this module connects
asyncio and the device; no other code calls the device.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, TypeVar

from ferryman.errors import QueueFull
from ferryman.schedule.batch import StepOutcome, StepPlan

T = TypeVar("T")

# How long the thread waits for a job before it checks again whether a result has arrived.
POLL_SECONDS = 0.0001


class LaunchedStep(Protocol):
    """A step whose values are still coming back."""

    def is_ready(self) -> bool: ...

    def outcome(self) -> StepOutcome: ...


class StepEngine(Protocol):
    """Runs steps: a runner, or its fake."""

    def begin(self, plan: StepPlan) -> None:
        """Starts the work that need not wait for earlier steps: loads. Called where plans are
        made."""
        ...

    def launch(self, plan: StepPlan) -> LaunchedStep: ...


class StreamPoisoned(RuntimeError):
    """A step failed, so the state on the device is unknown and no later step may run."""


class StreamClosed(RuntimeError):
    """The stream is closed and takes no more work."""


class _Step:
    """A plan in the stream."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.future: Future[StepOutcome] = Future()
        # A submitted step always runs: cancelling its waiting caller must not skip it.
        self.future.set_running_or_notify_cancel()
        self.fail = self.future.set_exception


@dataclass(frozen=True, slots=True)
class _Call:
    """A closure in the stream."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None]


class _Close:
    """The last job, which ends the thread."""


class ForwardStream:
    """Runs plans and closures on one thread, in the order in which they were submitted.

    `context` is entered by the thread: `CudaDevice.entered()` for a card, nothing for the host. Up
    to `depth` steps and as many closures wait; more are refused with QueueFull. Each sort has its
    own limit: a planned step must run, however many closures wait.
    """

    def __init__(
        self,
        engine: StepEngine,
        *,
        context: AbstractContextManager[object] | None = None,
        depth: int = 64,
    ) -> None:
        self._engine = engine
        self._context = context if context is not None else nullcontext()
        # A Queue: SimpleQueue.get waits without end when its deadline passes at the wrong moment.
        self._jobs: queue.Queue[_Step | _Call | _Close] = queue.Queue()
        self._depth = depth
        self._room = {_Step: threading.Semaphore(depth), _Call: threading.Semaphore(depth)}
        self._flying: deque[tuple[_Step, LaunchedStep]] = deque()
        self._poison: BaseException | None = None
        self._closed = False
        self.steps_done = 0
        self.last_progress = monotonic()
        self._thread = threading.Thread(target=self._work, name="forward-stream", daemon=True)
        self._thread.start()

    def __enter__(self) -> ForwardStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, plan: StepPlan) -> Future[StepOutcome]:
        """Begins a step's loads and queues it. Its future raises the step's error."""
        self._check_open()
        self._engine.begin(plan)
        step = _Step(plan)
        self._put(step)
        return step.future

    async def run(self, plan: StepPlan) -> StepOutcome:
        """Queues a step and awaits its outcome; cancelling the wait does not stop the step."""
        return await asyncio.wrap_future(self.submit(plan))

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Queues a closure in the same order. Its error goes to its future only."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._put(_Call(lambda: future.set_result(fn()), future.set_exception))
        return future

    def close(self) -> None:
        """Runs the submitted jobs, then ends the thread. Blocks; may be called twice."""
        if not self._closed:
            self._closed = True
            self._jobs.put(_Close())
        self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed("the forward stream is closed")
        if self._poison is not None:
            raise self._poisoned() from self._poison

    def _put(self, job: _Step | _Call) -> None:
        self._check_open()
        if not self._room[type(job)].acquire(blocking=False):
            raise QueueFull(f"{self._depth} jobs wait on the forward stream")
        self._jobs.put(job)

    def _work(self) -> None:
        with self._context:
            while True:
                job = self._next_job()
                if isinstance(job, _Close):
                    break
                if job is not None:
                    self._do(job)
                while self._flying and self._flying[0][1].is_ready():
                    self._deliver_oldest()
            while self._flying:
                self._deliver_oldest()

    def _next_job(self) -> _Step | _Call | _Close | None:
        """The next job; None when results are due and no job came in a short while."""
        try:
            job = self._jobs.get(timeout=POLL_SECONDS if self._flying else None)
        except queue.Empty:
            return None
        if not isinstance(job, _Close):
            self._room[type(job)].release()
        return job

    def _do(self, job: _Step | _Call) -> None:
        """An error of a job goes to its waiting caller: no code above this thread could handle
        it."""
        if self._poison is not None:
            job.fail(self._poisoned())
            return
        try:
            if isinstance(job, _Step):
                self._flying.append((job, self._engine.launch(job.plan)))
            else:
                job.run()
        except Exception as error:
            self._fail(job, error)

    def _deliver_oldest(self) -> None:
        """Gives the outcome of the oldest launched step to its waiting caller."""
        step, launched = self._flying.popleft()
        try:
            outcome = launched.outcome()
        except Exception as error:  # a card reports a failed kernel when its values are fetched
            self._fail(step, error)
            return
        self.steps_done += 1
        self.last_progress = monotonic()
        step.future.set_result(outcome)

    def _fail(self, job: _Step | _Call, error: Exception) -> None:
        if isinstance(job, _Step):
            self._poison = error
        job.fail(error)

    def _poisoned(self) -> StreamPoisoned:
        error = StreamPoisoned(
            f"an earlier step failed ({self._poison!r}); the state on the device is unknown"
        )
        error.__cause__ = self._poison
        return error
