"""Gives waiting requests their workers, as soon as there are any with room.

Every request passes through the queue: one that could be placed at once joins and leaves it in one
go, so that fairness is decided in one place. A request stays here until a worker can begin it soon
(late binding). One that would not be answered in time is refused: at once when that can be
foreseen, and before anything is computed in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from ferryman.errors import DeadlineExceeded, FerrymanError, NoWorker, Overloaded
from ferryman.runtime.background import seconds_to_tick
from ferryman_router.routing.fleet import Fleet
from ferryman_router.routing.forecast import Forecast, Need, retry_seconds
from ferryman_router.routing.queue import QueuePosition, Ticket, WaitQueue
from ferryman_router.routing.routing_policy import (
    Explanation,
    RoutingCosts,
    RoutingRequest,
    choose,
    least_prefill,
)
from ferryman_router.routing.worker_starts import RolePatience

TICK_SECONDS = 0.05
IDLE_SECONDS = 1.0
# Callers that are refused come back together. Those who came back when all had been served would
# find workers that stood idle.
ROOM_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: Ticket
    asking: RoutingRequest
    need: Need
    placed: asyncio.Future[Explanation]

    def refuse(self, error: FerrymanError) -> None:
        """Fails the wait, unless the client has left in the same moment."""
        if not self.placed.done():
            self.placed.set_exception(error)


class Dispatcher:
    """One queue and one fleet. `patience` is how long a role may lack a worker that is ready or
    starting; `forecast` records every request that was served."""

    def __init__(
        self,
        fleet: Fleet,
        queue: WaitQueue,
        *,
        costs: RoutingCosts,
        patience: float,
        clock: Callable[[], float],
    ) -> None:
        self._fleet, self._queue, self._costs = fleet, queue, costs
        self.patience = RolePatience(fleet.starts, fleet.is_served, patience, fleet.discord)
        self._clock = clock
        self.forecast = Forecast()
        self._waiting: dict[str, _Waiting] = {}
        self._has_come = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def queue_seconds(self) -> float:
        """The predicted time until those that wait now have been served."""
        return self.forecast.rate.seconds_for(self._queue.cost, self._clock())

    def retry_seconds(self) -> float:
        """The time until there is room for ROOM_SHARE of those that wait, as a hint to later
        callers; at least the time until workers are expected."""
        until_ready = self.patience.remaining_seconds(self._clock())
        return max(until_ready, retry_seconds(ROOM_SHARE * self.queue_seconds()))

    async def place(
        self, ticket: Ticket, asking: RoutingRequest, standing: QueuePosition
    ) -> Explanation:
        """Waits for a pair of workers, which are the attempt's until `leave`.

        Raises QueueFull, Overloaded when it would not be answered in time, or NoWorker when a role
        was empty for too long. A request that returns was accepted before: it always gets a place,
        and once under way it is never refused for lack of time.
        """
        placed: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        need = self._join(ticket, asking, standing)
        self._waiting[ticket.request_id] = _Waiting(ticket, asking, need, placed)
        self._has_come.set()
        try:
            self.serve()
            return await placed
        except BaseException:
            # It may have been placed in the moment in which its client left.
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                self.leave(ticket.request_id, placed.result())
            raise
        finally:
            self._queue.leave(ticket.request_id, ticket.tenant)
            self._waiting.pop(ticket.request_id, None)

    def check_in_time(self, ticket: Ticket, max_tokens: int) -> None:
        """Raises Overloaded for a new request that would come too late if its whole prompt were
        cached: before anybody is asked how much of it is. Under overload most requests end here."""
        need = Need(0.0, self.forecast.output_tokens(max_tokens))
        self._check_in_time(ticket, need, self._clock())

    def leave(self, request_id: str, explanation: Explanation) -> None:
        """The attempt is over: its workers have room for another one. A second call changes
        nothing."""
        chosen = explanation.chosen
        for name in (chosen.prefill, chosen.decode):
            self._fleet.release(name, attempt_name(request_id, explanation.attempt))

    def _join(self, ticket: Ticket, asking: RoutingRequest, standing: QueuePosition) -> Need:
        now = self._clock()
        num_tokens, seconds = least_prefill(self._fleet, asking, costs=self._costs, now=now)
        need = Need(seconds, self.forecast.output_tokens(asking.max_tokens))
        ticket = replace(ticket, cost=num_tokens + need.output_tokens)
        match standing:
            case QueuePosition.UNDER_WAY:
                self._queue.rejoin(ticket)
            case QueuePosition.TURNED_AWAY:
                self._queue.put_back(ticket)
            case QueuePosition.NEW:
                self._check_in_time(ticket, need, now)
                self._queue.check_room(ticket.tenant, self.retry_seconds())
                self._queue.join(ticket)
        return need

    def _check_in_time(self, ticket: Ticket, need: Need, now: float) -> None:
        """Raises Overloaded. An empty queue takes every request, which corrects a wrong
        forecast."""
        if not len(self._queue):
            return
        before = self._queue.cost_before(ticket.tenant)
        late = self.forecast.seconds_too_late(need, before, ticket.deadline - now, now)
        if late > 0:
            message = f"{len(self._queue)} requests wait: this one would not be answered in time"
            raise Overloaded(message, retry_seconds(late))

    async def run(self, look: Callable[[float], None], is_busy: Callable[[], bool]) -> None:
        """Looks again now and then, because room is seldom announced.

        While no request waits and `is_busy` is false it looks once a second, until a request
        comes. Workers that come or go are noticed at once.
        """
        while True:
            if not self._waiting and not is_busy():
                self._has_come.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds_to_tick(IDLE_SECONDS)):
                        await self._has_come.wait()
            if self._waiting or is_busy():
                await asyncio.sleep(TICK_SECONDS)
            self.serve()
            look(self._clock())

    def serve(self) -> None:
        """Places the requests that can be placed; called whenever there may be news."""
        now = self._clock()
        self.patience.look(now)
        for ticket in self._queue.expire(now):
            self._waiting[ticket.request_id].refuse(
                DeadlineExceeded("the deadline passed in the queue")
            )
        while any(self._try_place(ticket, now) for ticket in self._queue.heads()):
            pass
        # A cluster that is starting is not a slow one: later requests would be refused for it.
        is_waiting = len(self._queue) > 0 and not self.patience.lacks_workers
        self.forecast.rate.looked(now, is_waiting=is_waiting)
        if (refusal := self.patience.refusal(now)) is not None:
            self._refuse_all(refusal)

    def _try_place(self, ticket: Ticket, now: float) -> bool:
        """Whether the ticket left the queue: to be served, or because it is too late for that."""
        waiting = self._waiting[ticket.request_id]
        explanation = choose(self._fleet, waiting.asking, costs=self._costs, now=now)
        if explanation is None:
            return False
        if self._is_in_vain(ticket, waiting.need, now):
            self._queue.leave(ticket.request_id, ticket.tenant)
            message = "it waited for too long: it would not be answered in time any more"
            waiting.refuse(Overloaded(message, self.retry_seconds()))
            return True
        if self._slows_others_down(ticket, waiting.need, explanation, now):
            return False
        self._take(ticket, now)
        if not waiting.placed.done():
            # Counted before the next one is placed: it may not count on the same room.
            name = attempt_name(ticket.request_id, explanation.attempt)
            chosen = explanation.chosen
            self._fleet.claim(
                chosen.prefill, name, waiting.asking.prompt_len - chosen.usable_tokens
            )
            if chosen.decode != chosen.prefill:  # one worker has one claim, for a row and its work
                self._fleet.claim(chosen.decode, name, 0)
            waiting.placed.set_result(explanation)
        return True

    def _is_in_vain(self, ticket: Ticket, need: Need, now: float) -> bool:
        """Whether a request would be too late and only take a place that others wait for. A
        request that was begun before is never given up here."""
        if len(self._queue) == 1 or self._queue.has_returned(ticket):
            return False
        return self.forecast.is_hopeless(need, ticket.deadline - now, now)

    def _slows_others_down(
        self, ticket: Ticket, need: Need, explanation: Explanation, now: float
    ) -> bool:
        """Whether a request would be too late in any case, and others that run there as well for
        its sake: rows share a machine, and one that is slow enough answers nobody in time while
        all its rows are taken. It waits until fewer are, and a worker without any takes it."""
        if self._queue.has_returned(ticket):
            return False
        decode = self._fleet.get(explanation.chosen.decode)
        is_busy = decode is not None and bool(decode.claims)
        return is_busy and self.forecast.is_past_hope(need, ticket.deadline - now, now)

    def _take(self, ticket: Ticket, now: float) -> None:
        if not self._queue.has_returned(ticket):
            self.forecast.rate.taken(ticket.cost, now)
        self._queue.take(ticket)

    def _refuse_all(self, error: NoWorker) -> None:
        for waiting in self._waiting.values():
            self._queue.leave(waiting.ticket.request_id, waiting.ticket.tenant)
            waiting.refuse(error)


def attempt_name(request_id: str, attempt: int) -> str:
    """The name of an attempt, at the workers as well."""
    return f"{request_id}.{attempt}"
