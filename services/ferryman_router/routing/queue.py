"""Requests that wait for a worker: bounded, in order of arrival, fair between tenants. Pure.

Fairness is counted in tokens (fair queueing by start tags, a deficit round robin without a round):
each tenant has a line of its own, and a tag that grows by the cost of each request taken from it.
The line with the least tag is next. A tenant that comes to the queue starts at the tag of the
request taken last, so its first request is before the second one of every tenant that has more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from ferryman.errors import QueueFull


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue. `deadline` is in monotonic seconds. `cost` is in tokens: the uncached
    ones of the prompt, and as many as the answer is expected to have. A lower `priority` is served
    before a higher one of the same tenant; `share` is the tenant's weight against others: with
    twice the weight, twice the tokens."""

    request_id: str
    tenant: str
    deadline: float
    cost: int = 1
    priority: int = 0
    share: float = 1.0

    @property
    def weighted_cost(self) -> float:
        """The growth of its line's tag when it is served."""
        return self.cost / self.share


class QueuePosition(Enum):
    """The place at which a request joins the queue. One that was turned away gets its old place,
    for no worker has begun it; one that is under way goes before all that are not."""

    NEW = "new"
    TURNED_AWAY = "turned_away"
    UNDER_WAY = "under_way"


@dataclass(slots=True)
class _TenantQueue:
    """One tenant's requests. `tag` is where the head starts, `cost` what all of them cost."""

    tag: float
    tickets: deque[Ticket] = field(default_factory=deque)
    cost: int = 0

    @property
    def share(self) -> float:
        """The tenant's weight."""
        return self.tickets[0].share if self.tickets else 1.0


class WaitQueue:
    """All waiting requests. `max_waiting` bounds all, `max_per_tenant` those of one tenant."""

    def __init__(self, max_waiting: int, max_per_tenant: int) -> None:
        self._max_waiting, self._max_per_tenant = max_waiting, max_per_tenant
        self._returned: deque[Ticket] = deque()
        self._lines: dict[str, _TenantQueue] = {}
        self._ends: dict[str, float] = {}
        self._tag = 0.0

    def __len__(self) -> int:
        return len(self._returned) + sum(len(line.tickets) for line in self._lines.values())

    def check_room(self, tenant: str, retry_seconds: float) -> None:
        """Raises QueueFull when there is no place; `retry_seconds` is when there may be one."""
        if len(self) >= self._max_waiting:
            raise QueueFull(f"{len(self)} requests wait already", retry_seconds)
        line = self._lines.get(tenant)
        if line is not None and len(line.tickets) >= self._max_per_tenant:
            message = f"{len(line.tickets)} requests of this tenant wait already"
            raise QueueFull(message, retry_seconds)

    def join(self, ticket: Ticket) -> None:
        """Adds it at the end of the tenant's line, before higher numbers; there must be room."""
        line = self._line_of(ticket.tenant)
        at = len(line.tickets)
        while at and line.tickets[at - 1].priority > ticket.priority:
            at -= 1
        line.tickets.insert(at, ticket)
        line.cost += ticket.cost

    def put_back(self, ticket: Ticket) -> None:
        """Puts it at the head of the tenant's line, which gets back what was charged for it."""
        line = self._line_of(ticket.tenant)
        line.tickets.appendleft(ticket)
        line.cost += ticket.cost
        line.tag -= ticket.weighted_cost

    def rejoin(self, ticket: Ticket) -> None:
        """Puts it before all lines: it was taken and charged before, and its client may be
        reading."""
        self._returned.append(ticket)

    def _line_of(self, tenant: str) -> _TenantQueue:
        line = self._lines.get(tenant)
        if line is None:
            # A tenant that was here a moment ago goes on where its last request ended: coming and
            # going must not be cheaper than waiting.
            line = _TenantQueue(max(self._tag, self._ends.pop(tenant, 0.0)))
            self._lines[tenant] = line
        return line

    def heads(self) -> Iterator[Ticket]:
        """The next tickets, the first in turn first: those under way, then one a line."""
        yield from tuple(self._returned)
        for line in sorted(self._lines.values(), key=lambda line: line.tag):
            if line.tickets:  # the caller may have taken some since
                yield line.tickets[0]

    def has_returned(self, ticket: Ticket) -> bool:
        """Whether it is under way already."""
        return ticket in self._returned

    def cost_before(self, tenant: str) -> float:
        """Tokens that would be served before a request that joins now."""
        own_line = self._lines.get(tenant)
        mine = own_line.cost if own_line is not None else 0
        start = max(self._tag, self._ends.get(tenant, 0.0)) if own_line is None else own_line.tag
        others = (line for line in self._lines.values() if line is not own_line)
        returned = sum(ticket.cost for ticket in self._returned)
        end = start + (mine / own_line.share if own_line is not None else 0)
        return returned + mine + sum(_cost_until(line, end) for line in others)

    @property
    def cost(self) -> int:
        """Tokens of all that wait."""
        waiting = sum(line.cost for line in self._lines.values())
        return waiting + sum(ticket.cost for ticket in self._returned)

    def take(self, ticket: Ticket) -> None:
        """The head of a line, or one under way, leaves to be served."""
        if ticket in self._returned:
            self._returned.remove(ticket)
            return
        line = self._lines[ticket.tenant]
        assert line.tickets[0] == ticket, "only the head of a line is served"
        line.tickets.popleft()
        line.cost -= ticket.cost
        self._tag = max(self._tag, line.tag)
        line.tag += ticket.weighted_cost
        self._tidy(ticket.tenant)

    def leave(self, request_id: str, tenant: str) -> bool:
        """Gives a place up; False when there was none."""
        for ticket in self._returned:
            if ticket.request_id == request_id:
                self._returned.remove(ticket)
                return True
        line = self._lines.get(tenant)
        for ticket in line.tickets if line is not None else ():
            if ticket.request_id == request_id:
                assert line is not None, "it was found there"
                line.tickets.remove(ticket)
                line.cost -= ticket.cost
                self._tidy(tenant)
                return True
        return False

    def expire(self, now: float) -> tuple[Ticket, ...]:
        """Takes out the requests whose deadline has passed."""
        lines = (line.tickets for line in self._lines.values())
        over = [t for line in (self._returned, *lines) for t in line if t.deadline <= now]
        for ticket in over:
            self.leave(ticket.request_id, ticket.tenant)
        return tuple(over)

    def _tidy(self, tenant: str) -> None:
        """Drops a line that is empty, and remembers its end while that is ahead of the others."""
        line = self._lines[tenant]
        if not line.tickets:
            del self._lines[tenant]
            self._ends[tenant] = line.tag
        if not self._lines:
            self._ends.clear()  # no tenant competes any more
            self._tag = 0.0
        self._ends = {name: end for name, end in self._ends.items() if end > self._tag}


def _cost_until(line: _TenantQueue, tag: float) -> float:
    """The cost of a line that is served before its tag has reached `tag`."""
    return min(line.cost, max(0.0, tag - line.tag) * line.share)
