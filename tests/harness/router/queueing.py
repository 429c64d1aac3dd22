"""A queueing model under the router's dispatcher: virtual time, rows that serve, callers who leave.

The dispatcher, the queue and the fleet are the real ones; only time, arrivals and workers are made
here. A request occupies its row for as long as its service takes, or until its deadline.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.errors import DeadlineExceeded, Overloaded, QueueFull
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.fleet import Fleet
from ferryman_router.routing.forecast import ServedRequest
from ferryman_router.routing.generate_request import PageKeyCache
from ferryman_router.routing.queue import QueuePosition, Ticket, WaitQueue
from ferryman_router.routing.routing_policy import Explanation, RoutingCosts, RoutingRequest

STATE = ServedState("f", 4, "d", (Kind.FULL, Kind.RECURRENT))
PROMPT = PageKeyCache(np.arange(8, dtype="<u4"), b"")
TOKENS = 20
FIRST_SHARE = 0.1  # of a service, until its first token


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
    """`rows` requests are served at once, each for about `service` seconds."""

    rows: int
    service: float
    deadline: float
    seed: int = 0
    max_waiting: int = 1000
    callers: list[QueueCaller] = field(default_factory=list)
    num_placed: int = 0
    now: float = 0.0

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
        seconds = self.service * self.rng.uniform(0.6, 1.4)
        ends = min(self.now + seconds, caller.deadline)
        is_whole, begun = self.now + seconds <= caller.deadline, self.now

        def end() -> None:
            caller.kind = "whole" if is_whole else "deadline while served"
            caller.ended = self.now
            self.dispatcher.leave(caller.name, placed)
            first, took = seconds * FIRST_SHARE, ends - begun
            if took > first:
                num_tokens = TOKENS if is_whole else max(1, int(TOKENS * took / seconds))
                self.dispatcher.forecast.served(
                    ServedRequest(first, took - first, num_tokens, is_whole)
                )

        self.at(ends, end)
