"""A request that goes on here though it began at another router, by what its client and the
lifecycle log know of it. Pure.

    client    the prompt, the sampling with its seed, and the tokens it has
    log       whose request it is, which router had it, its latest attempt
    here      attempt k + 1 after those tokens, as after the death of a decode worker
"""

from __future__ import annotations

from collections.abc import Sequence

from ferryman.errors import NotFound, RequestIdInUse, Stopping, TakenOver
from ferryman.handoff.lifecycle import ROUTER, LifecycleEntry
from ferryman.wire.nats.heartbeat import ServedState
from ferryman_router.request.request_history import state_mark
from ferryman_router.routing.generate_request import PastLife, TokenizedRequest

# Events by which a router has a request, and those that have its tenant.
_HAS = ("received", "taken_over", "routed")
_BEGINS = ("received", "taken_over")
# A router that ended, or lost the request to another one, logged nothing about the answer.
_NO_LAST_WORDS = (Stopping.__name__, TakenOver.__name__, RequestIdInUse.__name__)


def belongs_to(events: Sequence[LifecycleEntry], tenant: str) -> bool:
    """Whether these are the events of a request of this tenant. If the event that says so was
    lost, they belong to no tenant."""
    begun = (event for event in events if event.role == ROUTER and event.name in _BEGINS)
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
    return PastLife(had[-1].worker_id, max(event.attempt for event in events), decode, token_ids)


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
