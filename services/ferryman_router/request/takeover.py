"""A request that goes on here though it began at another router, by what its client and the
lifecycle log know of it. Pure.

    client    the prompt, the sampling with its seed, and the tokens it has
    log       whose request it is, which router had it, its latest attempt
    here      attempt k + 1 behind those tokens, as after the death of a decode worker
"""

from __future__ import annotations

from collections.abc import Sequence

from ferryman.errors import NotFound, RequestIdInUse, Stopping, TakenOver
from ferryman.handoff.lifecycle import ROUTER, LifecycleEntry
from ferryman.wire.nats.heartbeat import ServedState
from ferryman_router.request.request_history import state_mark
from ferryman_router.routing.generate_request import PastLife, TokenizedRequest

# Events by which a router has a request, and those that say whose it is.
_HAS = ("received", "taken_over", "routed")
_BEGINS = ("received", "taken_over")
# A router that ended, or lost the request to another one, said nothing about the answer.
_NO_LAST_WORDS = (Stopping.__name__, TakenOver.__name__, RequestIdInUse.__name__)


def belongs_to(events: Sequence[LifecycleEntry], tenant: str) -> bool:
    """Whether these are the events of a request of this tenant. Where the event that says so was
    lost, they belong to no tenant."""
    begun = (one for one in events if one.role == ROUTER and one.name in _BEGINS)
    return any(one.facts.get("tenant") == tenant for one in begun)


def past_life(
    events: Sequence[LifecycleEntry], token_ids: tuple[int, ...], state: ServedState
) -> PastLife:
    """The life so far of the request of these events, oldest first, whose client has these tokens.
    Raises NotFound for one that failed, because its error was its answer, for one that began with
    another model than the `state` that is served now, and where two routers began requests of this
    id: the log does not say which one is this client's."""
    events = [one for one in events if one.role == ROUTER]  # others may write in workers' names
    had = [one for one in events if one.name in _HAS]
    if not had:
        raise NotFound("the lifecycle log does not say which router had the request")
    if len({one.worker_id for one in had if one.name == "received"}) > 1:
        raise NotFound("two routers began requests of this id")
    mark = state_mark(state)
    if any(one.facts.get("state", mark) != mark for one in had):
        raise NotFound("the request began with another model")
    failed = [one for one in events if one.name in ("failed", "rejected")]
    if any(one.facts.get("reason") not in _NO_LAST_WORDS for one in failed):
        raise NotFound("the request failed")
    routed = [one for one in had if one.name == "routed"]
    decode = str(routed[-1].facts.get("decode", "")) if routed else ""
    return PastLife(had[-1].worker_id, max(one.attempt for one in events), decode, token_ids)


def check_goes_on(asked: TokenizedRequest, vocab: int) -> None:
    """Raises NotFound for an answer that is whole already, or was never one of this model's.

    Nothing is left to draw of a whole answer: only its end is lacking, and that is found by
    beginning anew. So it is for the log probabilities of a prompt.
    """
    held = asked.past.token_ids
    if not held:
        return
    is_over = len(held) >= asked.params.max_tokens or held[-1] in asked.stop_token_ids
    if is_over or asked.params.prompt_logprobs is not None or max(held) >= vocab:
        raise NotFound(f"request {asked.request_id} cannot go on here: begin it anew")
