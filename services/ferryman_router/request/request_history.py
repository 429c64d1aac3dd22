"""A request's stage, and the lifecycle events that report it: small, readable, never content."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ferryman.cache.manifest import Exactness
from ferryman.handoff import request as events
from ferryman.handoff.chain_prints import chain_prints, encode_prints
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.handoff.request import RequestEvent, RequestState, next_state, reached
from ferryman.runtime.lifecycle import Fact, LifecyclePublisher
from ferryman.runtime.logs import Tail
from ferryman.runtime.spans.span_rules import ASKED
from ferryman.schedule.request import FinishReason
from ferryman.wire.nats.heartbeat import ServedState
from ferryman.wire.public import RouteCandidate, RouteExplanation
from ferryman.wire.values import Usage
from ferryman_router.routing.fleet import WorkerName
from ferryman_router.routing.forecast import LatencyTracker
from ferryman_router.routing.generate_request import (
    Caller,
    GenerateRequest,
    PageKeyCache,
    TokenizedRequest,
)
from ferryman_router.routing.routing_policy import Explanation, RouteChoice

log = logging.getLogger(__name__)

MAX_IGNORED_CHARS = 200  # an event has at most 1 KiB
_COMMITTED = (RequestState.COMMITTED, RequestState.DECODING)


class RequestHistory:
    """The stage of one request by the lifecycle law, and the events that report it.

    `attempt` is the number of the latest attempt; 0 before the first. A request that began at
    another router has one from there.
    """

    def __init__(self, caller: Caller, lifecycle: LifecyclePublisher, attempt: int = 0) -> None:
        self._caller, self._lifecycle = caller, lifecycle
        self.state = RequestState.RECEIVED
        self.attempt = attempt

    def enter(self, event: RequestEvent) -> None:
        self.state = next_state(self.state, event)

    def reach(self, stage: RequestState) -> None:
        """A stage was seen; what it implies has happened too."""
        self.state = reached(self.state, stage)

    def received(
        self, asked: TokenizedRequest, chains: PageKeyCache, state: ServedState | None
    ) -> None:
        past, facts = asked.past, dict[str, Fact]()
        if past.router_id:
            facts = {"from": past.router_id, "offset": len(past.token_ids)}
        if ignored := asked.request.ignored:
            facts["ignored"] = ", ".join(ignored)[:MAX_IGNORED_CHARS]
        if parting := asked.parting:
            facts["parts"] = {"at": parting.position, "missed": parting.missed_tokens}
            facts["parts_in"], facts["parts_from"] = parting.place, parting.request_id
        self._publish(
            "taken_over" if past.router_id else "received",
            **facts,
            tokens=asked.prompt_len,
            tenant=asked.tenant.name,
            deadline_ms=int(asked.caller.deadline_seconds * 1000),
            state=state_mark(state),
            **name_facts(asked.caller),
            **chain_facts(chains, state),
        )

    def asked(self, request: GenerateRequest, intake_seconds: float) -> None:
        """Notes what was asked for, and how long it was read and tokenized, for the request's
        span."""
        sampling = request.sampling
        self._lifecycle.note(
            self._caller.request_id,
            ASKED,
            traceparent=self._caller.traceparent,
            operation="chat" if request.is_chat else "text_completion",
            model=request.model,
            parent_span=self._caller.parent_span,
            intake_seconds=intake_seconds,
            **({} if sampling.is_open_ended else {"max_tokens": sampling.params.max_tokens}),
        )

    def routed(self, explanation: Explanation, decoded_by: WorkerName | None, offset: int) -> None:
        """A pair was chosen. A request that the worker `decoded_by` had decoded up to `offset` has
        migrated."""
        self.attempt = explanation.attempt
        if decoded_by is not None and self.state in _COMMITTED:
            self.enter(events.Migrated())
            workers = {"from": decoded_by.worker_id, "to": explanation.chosen.decode.worker_id}
            self._publish("migrated", **workers, offset=offset)
        self.enter(events.Routed(self.attempt))
        self._publish("routed", **routed_facts(explanation))

    def finished(
        self,
        reason: FinishReason,
        usage: Usage,
        exactness: Exactness,
        pace: LatencyTracker,
        chains: PageKeyCache,
        state: ServedState | None,
    ) -> None:
        self.enter(events.RequestFinished())
        facts = finished_facts(reason, usage, pace) | chain_facts(chains, state)
        self._publish("finished", **facts, exactness=exactness.value)
        log.info(
            "request done %s",
            Tail(
                id=self._caller.request_id,
                prompt=usage.prompt_tokens,
                cached=usage.cached.total,
                tokens=usage.completion_tokens,
                ttft_ms=(pace.first_seconds or 0.0) * 1000,
                attempts=self.attempt,
            ),
        )

    def broken(self, event: RequestEvent, reason: str, offset: int, cause: str) -> None:
        """The answer ended at `offset`: cancelled, failed, or rejected if none was attempted."""
        facts: dict[str, Fact] = {"stage": str(self.state), "reason": reason, "offset": offset}
        self.enter(event)
        if isinstance(event, events.RequestCancelled):
            self._publish("cancelled", **facts, cause=cause)
        else:
            self._publish("failed" if self.attempt else "rejected", **facts)

    def _publish(self, event: str, **facts: Fact) -> None:
        self._lifecycle.publish(
            self._caller.request_id,
            max(1, self.attempt),
            event,
            traceparent=self._caller.traceparent,
            **facts,
        )


def state_mark(state: ServedState | None) -> str:
    """A short mark of the served state: another model, or another layout, has another one."""
    return state.digest[:8] if state is not None else ""


def routed_facts(explanation: Explanation) -> dict[str, Fact]:
    """The choice and the runner-up with their numbers: `past_routes` reads them again."""
    facts = _choice_facts(explanation.chosen, "")
    if explanation.others:
        facts |= _choice_facts(explanation.others[0], "next_")
    return facts


def _choice_facts(choice: RouteChoice, prefix: str) -> dict[str, Fact]:
    facts: dict[str, Fact] = {
        "prefill": choice.prefill.worker_id,
        "decode": choice.decode.worker_id,
        "total_ms": _ms(choice.total_seconds),
        "queue_ms": _ms(choice.queue_seconds),
        "fetch_ms": _ms(choice.arrival.fetch_seconds),
        "load_ms": _ms(choice.arrival.load_seconds),
        "prefill_ms": _ms(choice.prefill_seconds),
        "handoff_ms": _ms(choice.handoff_seconds),
        "row_ms": _ms(choice.row_seconds),
        "recompute_ms": _ms(choice.arrival.recompute_seconds),
        "usable_tokens": choice.cached.by_tier,
        "plane": choice.plane,
        "exactness": choice.exactness.value,
        "arithmetic": choice.arithmetic,
    }
    if choice.unlike_tokens:
        facts["unlike_tokens"] = choice.unlike_tokens
    return {f"{prefix}{name}": fact for name, fact in facts.items()}


def shown_route(explanation: Explanation) -> RouteExplanation:
    """A route of a request that is still known here, with all alternatives."""
    others = tuple(_shown_candidate(other) for other in explanation.others)
    return RouteExplanation(explanation.attempt, _shown_candidate(explanation.chosen), others)


def _shown_candidate(candidate: RouteChoice) -> RouteCandidate:
    return RouteCandidate(
        candidate.prefill.worker_id,
        candidate.decode.worker_id,
        candidate.queue_seconds,
        candidate.arrival.load_seconds,
        candidate.prefill_seconds,
        candidate.handoff_seconds,
        candidate.total_seconds,
        candidate.usable_tokens,
        candidate.cached.host,
        fetch_seconds=candidate.arrival.fetch_seconds,
        row_seconds=candidate.row_seconds,
        recompute_seconds=candidate.arrival.recompute_seconds,
        device_tokens=candidate.cached.device,
        storage_tokens=candidate.cached.storage,
        peer_tokens=candidate.cached.peer,
        plane=candidate.plane,
        exactness=candidate.exactness,
        unlike_tokens=candidate.unlike_tokens,
    )


def past_routes(entries: Sequence[LifecycleEntry]) -> list[RouteExplanation]:
    """One for each attempt: the choice, and the runner-up if there was one."""
    routed = [entry for entry in entries if entry.name == "routed"]
    return [
        RouteExplanation(
            entry.attempt,
            _candidate(entry.facts, ""),
            (_candidate(entry.facts, "next_"),) if "next_prefill" in entry.facts else (),
        )
        for entry in routed
    ]


def _candidate(facts: Mapping[str, Any], prefix: str) -> RouteCandidate:
    def seconds(name: str) -> float:
        return float(facts.get(f"{prefix}{name}_ms", 0.0)) / 1000

    # The log may be of a router that said less, or other things.
    tiers = facts.get(f"{prefix}usable_tokens")
    tokens: dict[str, int] = tiers if isinstance(tiers, dict) else {}
    return RouteCandidate(
        prefill_worker_id=str(facts.get(f"{prefix}prefill", "")),
        decode_worker_id=str(facts.get(f"{prefix}decode", "")),
        queue_seconds=seconds("queue"),
        load_seconds=seconds("load"),
        prefill_seconds=seconds("prefill"),
        handoff_seconds=seconds("handoff"),
        total_seconds=seconds("total"),
        usable_tokens=sum(tokens.values()),
        host_tokens=tokens.get("host", 0),
        fetch_seconds=seconds("fetch"),
        row_seconds=seconds("row"),
        recompute_seconds=seconds("recompute"),
        device_tokens=tokens.get("device", 0),
        storage_tokens=tokens.get("storage", 0),
        peer_tokens=tokens.get("peer", 0),
        plane=str(facts.get(f"{prefix}plane", "")),
        exactness=_exactness(facts.get(f"{prefix}exactness")),
        unlike_tokens=int(facts.get(f"{prefix}unlike_tokens", 0)),
    )


def _exactness(level: object) -> Exactness:
    return Exactness.BITS if level == Exactness.BITS.value else Exactness.VALUES


def name_facts(caller: Caller) -> dict[str, Fact]:
    """The caller's name of the request, by which `trace` finds it, and how often it was sent
    before: it may have other lives, at routers that are gone."""
    facts: dict[str, Fact] = {}
    if caller.correlation_id:
        facts["correlation_id"] = caller.correlation_id
    if caller.num_sent_before:
        facts["sent_before"] = caller.num_sent_before
    return facts


def finished_facts(reason: FinishReason, usage: Usage, pace: LatencyTracker) -> dict[str, Fact]:
    held = {tier: tokens for tier, tokens in usage.at_decode.by_tier.items() if tokens}
    return {
        "reason": str(reason),
        "prompt": usage.prompt_tokens,
        "tokens": usage.completion_tokens,
        "cached": usage.cached.by_tier,
        **({"held": held} if held else {}),
        "drafted": usage.drafted_tokens,
        "accepted": usage.accepted_tokens,
        "ttft_ms": _ms(pace.first_seconds or 0.0),
        "itl_p50_ms": _ms(pace.gap_quantile(0.5)),
        "itl_p99_ms": _ms(pace.gap_quantile(0.99)),
    }


def chain_facts(chains: PageKeyCache, state: ServedState | None) -> dict[str, Fact]:
    """The prints by which a simulator sees shared prefixes; none while there is no worker."""
    if state is None:
        return {}
    prints = encode_prints(chain_prints(chains.of(state)))
    return {"page_size": state.page_size, "chain": prints}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
