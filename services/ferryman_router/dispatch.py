"""Gives waiting requests their workers, as soon as there are any with room.

Nobody passes by the queue: a request that could be placed at once joins and leaves it in one go,
so that fairness is decided in one place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ferryman.errors import DeadlineExceeded, Unavailable
from ferryman_router.fleet import Fleet
from ferryman_router.policy import Asking, Costs, Explanation, choose
from ferryman_router.queue import Ticket, WaitQueue

TICK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: Ticket
    asking: Asking
    attempt: int
    placed: asyncio.Future[Explanation]


class Dispatcher:
    """One queue, one fleet. `patience` is how long a request waits while no worker is ready."""

    def __init__(
        self,
        fleet: Fleet,
        queue: WaitQueue,
        *,
        costs: Costs,
        patience: float,
        clock: Callable[[], float],
    ) -> None:
        self._fleet, self._queue, self._costs = fleet, queue, costs
        self._patience, self._clock = patience, clock
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def retry_seconds(self) -> float:
        return self._queue.retry_seconds()

    async def place(
        self, ticket: Ticket, asking: Asking, *, attempt: int, is_retry: bool
    ) -> Explanation:
        """Waits for a pair of workers. Raises QueueFull, or Unavailable when nobody is ready."""
        placed: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        (self._queue.rejoin if is_retry else self._queue.join)(ticket)
        self._waiting[ticket.request_id] = _Waiting(ticket, asking, attempt, placed)
        try:
            self.serve()
            return await self._patiently(placed, is_retry)
        finally:
            self._queue.leave(ticket.request_id, ticket.tenant)
            self._waiting.pop(ticket.request_id, None)

    async def run(self, look: Callable[[float], None]) -> None:
        """Looks again now and then: what makes room is seldom announced."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.serve()
            look(self._clock())

    def serve(self) -> None:
        """Places whoever can be placed; called whenever there may be news."""
        now = self._clock()
        for ticket in self._queue.expire(now):
            placed = self._waiting[ticket.request_id].placed
            if not placed.done():
                placed.set_exception(DeadlineExceeded("the deadline passed in the queue"))
        while any(self._try_place(ticket, now) for ticket in self._queue.heads()):
            pass

    def _try_place(self, ticket: Ticket, now: float) -> bool:
        waiting = self._waiting[ticket.request_id]
        explanation = choose(
            self._fleet, waiting.asking, attempt=waiting.attempt, costs=self._costs, now=now
        )
        if explanation is None:
            return False
        self._queue.take(ticket, now)
        chosen = explanation.chosen
        self._fleet.sent(chosen.prefill, waiting.asking.prompt_len - chosen.usable_tokens)
        self._fleet.sent(chosen.decode, 0)
        if not waiting.placed.done():
            waiting.placed.set_result(explanation)
        return True

    async def _patiently(self, placed: asyncio.Future[Explanation], is_retry: bool) -> Explanation:
        while True:
            done, _ = await asyncio.wait({placed}, timeout=None if is_retry else self._patience)
            if done:
                return placed.result()
            now = self._clock()
            for role in ("prefill", "decode"):
                if not self._fleet.usable(role, now):
                    raise Unavailable(f"no {role} worker is ready")
