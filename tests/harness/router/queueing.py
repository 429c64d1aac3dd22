"""A queueing model under the router's dispatcher: virtual time, rows that serve, callers who leave.

The dispatcher, the queue and the fleet are the real ones; only time, arrivals and workers are made
here. A request occupies its row for as long as its service takes, or until its deadline. The rows
share one machine, whose speed may swing: that of a service is `service` seconds at full speed with
all rows taken, and less with fewer, but never less than ALONE of it.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.errors import DeadlineExceeded, Overloaded, QueueFull
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.fleet import Fleet
from ferryman_router.routing.forecast import DecodingRow
from ferryman_router.routing.generate_request import PageKeyCache
from ferryman_router.routing.queue import QueuePosition, Ticket, WaitQueue
from ferryman_router.routing.routing_policy import Explanation, RoutingCosts, RoutingRequest

STATE = ServedState("f", 4, "d", (Kind.FULL, Kind.RECURRENT))
PROMPT = PageKeyCache(np.arange(8, dtype="<u4"), b"")
TOKENS = 20
FIRST_SHARE = 0.1  # of a service, until its first token
ALONE = 0.3  # of the time with all rows taken: a batch of a tiny model on a CPU gains as much
TINY = 1e-9


@dataclass
class QueueCaller:
    """One request: when it came, what became of it, and how many were placed before it."""

    name: str
    arrived: float
    deadline: float
    kind: str = "waits"
    ended: float = 0.0
    placed_after: int = -1
    retry_seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.kind == "whole" and self.ended <= self.deadline


@dataclass
class QueueCluster:
    """`rows` requests are served at once, each for about `service` seconds. `possible` are the
    services that the machine could have done so far."""

    rows: int
    service: float
    deadline: float
    seed: int = 0
    max_waiting: int = 1000
    callers: list[QueueCaller] = field(default_factory=list)
    num_placed: int = 0
    now: float = 0.0
    possible: float = 0.0

    def __post_init__(self) -> None:
        self.rng, self._ids = random.Random(self.seed), count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.fleet = Fleet(1e9)
        for role in ("prefill", "decode"):
            name = f"{role}-00000001"
            beat = Heartbeat(role, name, 1, f"{role}:1", True, STATE, 1000, max_running=self.rows)
            self.fleet.on_heartbeat(beat, 0.0)
        self.dispatcher = Dispatcher(
            self.fleet,
            WaitQueue(self.max_waiting, self.max_waiting),
            costs=RoutingCosts(),
            patience=1e9,
            clock=lambda: self.now,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs: list[_Job] = []
        self._speed, self._worked_until, self._num_looks = 1.0, 0.0, 0

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return self.rows / self.service

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._ids), act))

    async def run(self, until: float) -> None:
        """All that happens until then."""
        await self._settle()
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
            self.dispatcher.serve()
            await self._settle()
        self.now = until
        self._advance()

    async def _settle(self) -> None:
        """A caller that was placed, or refused, hears of it at the same instant."""
        for _ in range(12):
            await asyncio.sleep(0)

    async def drain(self) -> None:
        """Until everything has ended."""
        await self._settle()
        while self._events:
            await self.run(self._events[0][0])
        assert not self._tasks
        assert not any(worker.claims for worker in self.fleet), "nothing is claimed for ever"

    def arrivals(self, rate: float, start: float, end: float) -> None:
        """By chance, so many a second."""
        at = start
        while (at := at + self.rng.expovariate(rate)) < end:
            self.at(at, self.arrive)

    def arrive(self, tenant: str = "a") -> None:
        name = f"r{next(self._ids)}"
        caller = QueueCaller(name, self.now, self.now + self.deadline)
        self.callers.append(caller)
        # Nothing looks at the queue at a deadline but a tick.
        self.at(caller.deadline, lambda: None)
        task = asyncio.get_running_loop().create_task(self._ask(caller, tenant))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, caller: QueueCaller, tenant: str) -> None:
        ticket = Ticket(caller.name, tenant, caller.deadline)
        asking = RoutingRequest(PROMPT, max_tokens=TOKENS)
        try:
            placed = await self.dispatcher.place(ticket, asking, QueuePosition.NEW)
        except (Overloaded, QueueFull) as error:
            caller.kind, caller.ended = "refused", self.now
            caller.retry_seconds = error.retry_after_seconds
        except DeadlineExceeded:
            caller.kind, caller.ended = "deadline in the queue", self.now
        else:
            caller.placed_after = self.num_placed
            self.num_placed += 1
            self._serve(caller, placed)

    def _serve(self, caller: QueueCaller, placed: Explanation) -> None:
        job = _Job(caller, placed, self.now, self.rng.uniform(0.6, 1.4), self.dispatcher)
        self._advance()
        self._jobs.append(job)
        self.at(caller.deadline, self._look)
        self._look()

    # The machine that all rows share.

    def swing(self, speeds: Sequence[tuple[float, float]]) -> None:
        """The machine has a new speed at each of these times, a share of its full speed."""
        for when, speed in speeds:
            self.at(when, partial(self._set_speed, speed))

    def _set_speed(self, speed: float) -> None:
        self._advance()
        self._speed = speed
        self._look()

    def _advance(self) -> None:
        """Does the work of the time since the last look."""
        elapsed, self._worked_until = self.now - self._worked_until, self.now
        self.possible += elapsed * self._speed * self.capacity
        for job in self._jobs:
            job.advance(elapsed * self._pace)

    @property
    def _pace(self) -> float:
        """The services a second of one row."""
        share = ALONE + (1 - ALONE) * len(self._jobs) / self.rows
        return self._speed / (self.service * share) if self._jobs else 0.0

    def _look(self) -> None:
        """Ends the requests that are answered, or too late; looks again at the next token."""
        self._advance()
        over = [job for job in self._jobs if job.is_over(self.now)]
        self._jobs = [job for job in self._jobs if job not in over]
        for job in over:
            job.end(self.now)
        for job in self._jobs:
            job.report(self.now)
        self._num_looks += 1
        if self._jobs:
            seconds = min(job.left for job in self._jobs) / self._pace
            # Soon enough for a token of each row to be seen when it comes, or nearly so.
            at = self.now + min(seconds, self.service / TOKENS)
            self.at(at, partial(self._look_again, self._num_looks))

    def _look_again(self, number: int) -> None:
        if number == self._num_looks:
            self._look()


@dataclass(eq=False)
class _Job:
    """A request in its row. `done` is the part of a mean service that it has had, of `size`."""

    caller: QueueCaller
    placed: Explanation
    begun: float
    size: float
    dispatcher: Dispatcher
    done: float = 0.0
    num_tokens: int = 0
    row: DecodingRow = field(init=False)

    def __post_init__(self) -> None:
        self.row = self.dispatcher.forecast.row()

    @property
    def left(self) -> float:
        return self.size - self.done

    def advance(self, work: float) -> None:
        self.done += work

    def is_over(self, now: float) -> bool:
        return self.left <= TINY or now >= self.caller.deadline

    def report(self, now: float) -> None:
        """The tokens that came since the last report; the first after FIRST_SHARE of the time."""
        share = min(1.0, self.done / self.size + TINY)
        if share < FIRST_SHARE:
            return
        if not self.num_tokens:
            self.dispatcher.forecast.first_token(now - self.begun)
        drawn = 1 + int((TOKENS - 1) * (share - FIRST_SHARE) / (1 - FIRST_SHARE))
        if drawn > self.num_tokens:
            self.row.drawn(drawn - self.num_tokens, now)
            self.num_tokens = drawn

    def end(self, now: float) -> None:
        self.report(now)
        self.row.leave(now)
        is_whole = self.left <= TINY
        self.caller.kind = "whole" if is_whole else "deadline while served"
        self.caller.ended = now
        self.dispatcher.leave(self.caller.name, self.placed)
        if is_whole:
            self.dispatcher.forecast.answered(TOKENS)
