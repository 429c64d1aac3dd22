"""The forward stream: one thread, one bounded queue, everything in order.

The loop plans a step and submits it; the thread launches it and, when its values have arrived,
fulfils its future. Step k + 1 may be launched while k's values are still on their way. This is the
one bridge between asyncio and the device; nothing else calls the device.
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

# How long the thread waits for a next job before it asks again whether a result has arrived.
POLL_SECONDS = 0.0001


class Launched(Protocol):
    """A step whose values are on their way back."""

    def is_ready(self) -> bool: ...

    def outcome(self) -> StepOutcome: ...


class Engine(Protocol):
    """What runs steps: a runner, or its fake."""

    def begin(self, plan: StepPlan) -> None:
        """Starts what need not wait for the steps before it: loads. Called where plans are made."""
        ...

    def launch(self, plan: StepPlan) -> Launched: ...


class StreamPoisoned(RuntimeError):
    """A step failed, so the state on the device is unknown and no later step may run."""


class StreamClosed(RuntimeError):
    """The stream takes no more work."""


class _Step:
    """A plan on its way through the stream."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.future: Future[StepOutcome] = Future()
        # A step that was submitted runs: cancelling who waits for it must not skip it.
        self.future.set_running_or_notify_cancel()
        self.fail = self.future.set_exception


@dataclass(frozen=True, slots=True)
class _Call:
    """A closure on its way through the stream."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None]


class _Close:
    """The last job."""


class ForwardStream:
    """Runs plans and closures on one thread, in the order in which they were submitted.

    `context` is entered by the thread: `CudaDevice.entered()` for a card, nothing for the host.
    A full queue refuses with QueueFull.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        context: AbstractContextManager[object] | None = None,
        depth: int = 64,
    ) -> None:
        self._engine = engine
        self._context = context if context is not None else nullcontext()
        self._jobs: queue.Queue[_Step | _Call | _Close] = queue.Queue(depth)
        self._flying: deque[tuple[_Step, Launched]] = deque()
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
        """Begins a step's loads and queues it. Its future raises what the step raised."""
        self._check_open()
        self._engine.begin(plan)
        step = _Step(plan)
        self._put(step)
        return step.future

    async def run(self, plan: StepPlan) -> StepOutcome:
        """Queues a step and awaits its outcome; cancelling the wait does not stop the step."""
        return await asyncio.wrap_future(self.submit(plan))

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Queues a closure in the same order. What it raises goes to its future only."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._put(_Call(lambda: future.set_result(fn()), future.set_exception))
        return future

    def close(self) -> None:
        """Runs what was submitted, then ends the thread. Blocks; may be called twice."""
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
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise QueueFull(f"{self._jobs.maxsize} jobs wait on the forward stream") from None

    def _work(self) -> None:
        with self._context:
            while True:
                job = self._next_job()
                if isinstance(job, _Close):
                    break
                if job is not None:
                    self._do(job)
                self._settle()
            self._settle_all()

    def _next_job(self) -> _Step | _Call | _Close | None:
        """The next job; None when results are under way and none came in a short while."""
        if not self._flying:
            return self._jobs.get()
        try:
            return self._jobs.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return None

    def _do(self, job: _Step | _Call) -> None:
        if self._poison is not None:
            job.fail(self._poisoned())
        elif isinstance(job, _Step):
            step = job
            self._attempt(step, lambda: self._launch(step))
        else:
            self._attempt(job, job.run)

    def _attempt(self, job: _Step | _Call, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # the device thread's top: whatever it is goes to who waits
            if isinstance(job, _Step):
                self._poison = error
            job.fail(error)

    def _launch(self, step: _Step) -> None:
        self._flying.append((step, self._engine.launch(step.plan)))

    def _settle(self) -> None:
        """Delivers what has arrived, in order."""
        while self._flying and self._flying[0][1].is_ready():
            self._finish(*self._flying.popleft())

    def _settle_all(self) -> None:
        while self._flying:
            self._finish(*self._flying.popleft())

    def _finish(self, step: _Step, launched: Launched) -> None:
        # A card reports a failed kernel only when its values are fetched.
        self._attempt(step, lambda: self._deliver(step, launched.outcome()))

    def _deliver(self, step: _Step, outcome: StepOutcome) -> None:
        self.steps_done += 1
        self.last_progress = monotonic()
        step.future.set_result(outcome)

    def _poisoned(self) -> StreamPoisoned:
        error = StreamPoisoned(
            f"an earlier step failed ({self._poison!r}); the state on the device is unknown"
        )
        error.__cause__ = self._poison
        return error
