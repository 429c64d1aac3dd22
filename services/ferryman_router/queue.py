"""Where requests wait for a worker: bounded, first come first served, and fair between tenants.

Pure. Each tenant has its own line; lines take turns, so a tenant with a thousand requests delays
another one's single request by one turn only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from ferryman.errors import QueueFull

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
_RATE_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue. `deadline` and `since` are monotonic seconds."""

    request_id: str
    tenant: str
    since: float
    deadline: float


class WaitQueue:
    """All waiting requests. `max_waiting` counts everybody, `max_per_tenant` each tenant."""

    def __init__(self, max_waiting: int, max_per_tenant: int) -> None:
        self._max_waiting, self._max_per_tenant = max_waiting, max_per_tenant
        self._lines: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self._num_waiting = 0
        self._seconds_per_take = 0.0
        self._last_take: float | None = None

    def __len__(self) -> int:
        return self._num_waiting

    def join(self, ticket: Ticket) -> None:
        """At the end of the tenant's line; raises QueueFull with a guess at when to come back."""
        line = self._lines.get(ticket.tenant, ())
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._num_waiting} requests wait already", self.retry_seconds())
        if len(line) >= self._max_per_tenant:
            message = f"{len(line)} requests of this tenant wait already"
            raise QueueFull(message, self.retry_seconds())
        self._lines.setdefault(ticket.tenant, deque()).append(ticket)
        self._num_waiting += 1

    def rejoin(self, ticket: Ticket) -> None:
        """At the head of the line: it has been taken before and could not be placed."""
        self._lines.setdefault(ticket.tenant, deque()).appendleft(ticket)
        self._num_waiting += 1

    def heads(self) -> Iterator[Ticket]:
        """The first of every line, whose turn it is first."""
        for line in list(self._lines.values()):
            yield line[0]

    def take(self, ticket: Ticket, now: float) -> None:
        """The head of a line leaves to be served; its tenant's next turn is behind all others'."""
        line = self._lines[ticket.tenant]
        assert line[0] == ticket, "only the head of a line is served"
        line.popleft()
        self._num_waiting -= 1
        self._lines.move_to_end(ticket.tenant)
        self._drop_if_empty(ticket.tenant)
        self._measure(now)

    def leave(self, request_id: str, tenant: str) -> bool:
        """Gives a place up; False when there was none."""
        line = self._lines.get(tenant, deque())
        for ticket in line:
            if ticket.request_id == request_id:
                line.remove(ticket)
                self._num_waiting -= 1
                self._drop_if_empty(tenant)
                return True
        return False

    def expire(self, now: float) -> tuple[Ticket, ...]:
        """Takes out whoever's deadline has passed."""
        over = [t for line in self._lines.values() for t in line if t.deadline <= now]
        for ticket in over:
            self.leave(ticket.request_id, ticket.tenant)
        return tuple(over)

    def retry_seconds(self) -> float:
        """When a place may be free: the measured pace of the queue times its length."""
        guess = self._seconds_per_take * self._num_waiting
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, guess))

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]

    def _measure(self, now: float) -> None:
        if self._last_take is not None:
            took = now - self._last_take
            self._seconds_per_take += _RATE_SMOOTHING * (took - self._seconds_per_take)
        self._last_take = now
