"""Requests in the lifecycle log: each is shown to its own tenant alone.

A worker's login can write there, but not on a router's subjects: the router acts on events alone
whose subjects show that a router wrote them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from prometheus_client import Counter

from ferryman.errors import NotFound, Unavailable
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.ids import is_request_id
from ferryman.runtime.lifecycle import credible_event, decode_event
from ferryman.wire.nats.bus import Bus, RecordedMessage
from ferryman.wire.nats.heartbeat import ServedState
from ferryman.wire.nats.subjects import Subjects
from ferryman_router.request.request_table import RequestTable
from ferryman_router.request.takeover import belongs_to, past_life
from ferryman_router.routing.fleet import Fleet
from ferryman_router.routing.generate_request import PastLife, Tenant

MAX_TRACE_EVENTS = 4096
TAKEOVER_SECONDS = 5.0  # for what must be known of a request before it goes on here
STATE_SECONDS = 0.05


def decoded(recorded: Iterable[RecordedMessage]) -> list[LifecycleEntry]:
    """The events of a request, as `RequestLog.of` returned them."""
    return [decode_event(message.payload) for message in recorded]


class RequestLog:
    """The log, asked by a request's id or by its caller's name for it. `forged` counts events
    there under a false name."""

    def __init__(
        self, requests: RequestTable, bus: Bus, subjects: Subjects, forged: Counter
    ) -> None:
        self._requests, self._bus, self._subjects = requests, bus, subjects
        self._forged = forged

    async def of(self, tenant: Tenant, name: str) -> tuple[RecordedMessage, ...]:
        """The log's events of this tenant's request of that name, or of that id. NotFound also for
        another tenant's: no answer may show that it exists."""
        request_id = self._requests.id_of(tenant, name)
        recorded: tuple[RecordedMessage, ...] = ()
        if is_request_id(request_id):
            pattern = self._subjects.all_life_of(request_id)
            recorded = self._credible(await self._bus.history(pattern, max_events=MAX_TRACE_EVENTS))
        if not belongs_to(decoded(recorded), tenant.name):
            raise NotFound(f"the lifecycle log has nothing of {name}")
        return recorded

    def _credible(self, recorded: Sequence[RecordedMessage]) -> tuple[RecordedMessage, ...]:
        kept = tuple(
            message
            for message in recorded
            if credible_event(message.subject, message.payload, self._subjects) is not None
        )
        self._forged.inc(len(recorded) - len(kept))
        return kept

    async def past_life(
        self, tenant: Tenant, request_id: str, held: tuple[int, ...], fleet: Fleet
    ) -> PastLife:
        """The life of a request at another router, whose client has these tokens. Raises NotFound
        when it cannot go on here, for whatever reason: then it can be begun again."""
        try:
            async with asyncio.timeout(TAKEOVER_SECONDS):
                state = await _served_state(fleet)  # by beats, so the broker is there as well
                recorded = await self.of(tenant, request_id)
        except (TimeoutError, Unavailable) as error:
            raise NotFound(f"nothing is known here of {request_id}: {error}") from error
        return past_life(decoded(recorded), held, state)


async def _served_state(fleet: Fleet) -> ServedState:
    """Waits until there is a worker: a router that has just started knows none."""
    while (state := fleet.state()) is None:  # noqa: ASYNC110  beats come in all the time
        await asyncio.sleep(STATE_SECONDS)
    return state
