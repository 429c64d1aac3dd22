"""Requests in the lifecycle log: each is shown to its own tenant alone, and may go on here if the
router that had it is gone.

A worker's login can write there, but not on a router's subjects: the router acts on events alone
whose subjects show that a router wrote them. Of a request that is taken over there are known:

    client    the prompt, the sampling with its seed, and the tokens it has
    log       whose request it is, which router had it, its latest attempt
    here      attempt k + 1 after those tokens, as after the death of a decode worker
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from prometheus_client import Counter

from ferryman.cache.manifest import ANY_ARITHMETIC
from ferryman.errors import NotFound, RequestIdInUse, Stopping, TakenOver, Unavailable
from ferryman.handoff.lifecycle import ROUTER, LifecycleEntry
from ferryman.handoff.reuse_events import begins_request
from ferryman.ids import is_request_id
from ferryman.runtime.lifecycle import credible_event, decode_event
from ferryman.wire.nats.bus import Bus, RecordedMessage
from ferryman.wire.nats.heartbeat import ServedState
from ferryman.wire.nats.subjects import Subjects
from ferryman_router.request.request_history import state_mark
from ferryman_router.request.request_table import RequestTable
from ferryman_router.routing.fleet import Fleet
from ferryman_router.routing.generate_request import PastLife, Tenant, TokenizedRequest

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
        recorded = await self._recorded(self._requests.id_of(tenant, name))
        if not belongs_to(decoded(recorded), tenant.name):
            raise NotFound(f"the lifecycle log has nothing of {name}")
        return recorded

    async def of_any_tenant(self, request_id: str) -> tuple[RecordedMessage, ...]:
        """The log's events of a request, whoever sent it: for the observer. Raises NotFound."""
        recorded = await self._recorded(request_id)
        if not recorded:
            raise NotFound(f"the lifecycle log has nothing of {request_id}")
        return recorded

    async def _recorded(self, request_id: str) -> tuple[RecordedMessage, ...]:
        if not is_request_id(request_id):
            return ()
        pattern = self._subjects.all_life_of(request_id)
        return self._credible(await self._bus.history(pattern, max_events=MAX_TRACE_EVENTS))

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


# A request that began at another router. Pure.

# Events by which a router has a request.
_HAS = ("received", "taken_over", "routed")
# A router that ended, or lost the request to another one, logged nothing about the answer.
_NO_LAST_WORDS = (Stopping.__name__, TakenOver.__name__, RequestIdInUse.__name__)


def belongs_to(events: Sequence[LifecycleEntry], tenant: str) -> bool:
    """Whether these are the events of a request of this tenant. If the event that says so was
    lost, they belong to no tenant."""
    begun = filter(begins_request, events)
    return any(event.facts.get("tenant") == tenant for event in begun)


def past_life(
    events: Sequence[LifecycleEntry], token_ids: tuple[int, ...], state: ServedState
) -> PastLife:
    """The life so far of the request of these events, oldest first, whose client has these tokens.
    Raises NotFound for one that failed, because its error was its answer, for one that began with
    another model than the `state` that is served now, and if two routers began requests of this
    id: the log does not say which one is this client's."""
    # Others may write in workers' names.
    events = [event for event in events if event.role == ROUTER]
    had = [event for event in events if event.name in _HAS]
    if not had:
        raise NotFound("the lifecycle log does not say which router had the request")
    if len({event.worker_id for event in had if event.name == "received"}) > 1:
        raise NotFound("two routers began requests of this id")
    mark = state_mark(state)
    if any(event.facts.get("state", mark) != mark for event in had):
        raise NotFound("the request began with another model")
    failed = [event for event in events if event.name in ("failed", "rejected")]
    if any(event.facts.get("reason") not in _NO_LAST_WORDS for event in failed):
        raise NotFound("the request failed")
    routed = [event for event in had if event.name == "routed"]
    decode = str(routed[-1].facts.get("decode", "")) if routed else ""
    latest, attempt = had[-1].worker_id, max(event.attempt for event in events)
    return PastLife(latest, attempt, decode, token_ids, _arithmetics(routed, attempt))


def _arithmetics(routed: Sequence[LifecycleEntry], num_attempts: int) -> frozenset[str]:
    """The arithmetics of all attempts: ANY_ARITHMETIC is among them for one that says none, and if
    the log has lost one. Attempts are counted from 1 on without gaps."""
    logged = {str(event.facts.get("arithmetic", ANY_ARITHMETIC)) for event in routed}
    is_whole = len({event.attempt for event in routed}) == num_attempts
    return frozenset(logged if is_whole else logged | {ANY_ARITHMETIC})


def check_goes_on(asked: TokenizedRequest, vocab: int) -> None:
    """Raises NotFound for an answer that is whole already, or was never one of this model's.

    Nothing is left to draw of a whole answer: only its end is missing, and a new request finds
    that. So it is for the log probabilities of a prompt.
    """
    held = asked.past.token_ids
    if not held:
        return
    is_over = len(held) >= asked.params.max_tokens or held[-1] in asked.stop_token_ids
    if is_over or asked.params.prompt_logprobs is not None or max(held) >= vocab:
        raise NotFound(f"request {asked.request_id} cannot go on here: begin it anew")
