"""What the router's lifecycle events say: small, readable, and never content. Pure."""

from __future__ import annotations

from ferryman.handoff.chain_prints import chain_prints, encode_prints
from ferryman.runtime.lifecycle import Fact
from ferryman.schedule.request import FinishReason
from ferryman.wire.beats import ServedState
from ferryman.wire.values import Usage
from ferryman_router.chains import Chains
from ferryman_router.pace import Pace
from ferryman_router.policy import Explanation


def routed_facts(explanation: Explanation) -> dict[str, Fact]:
    """The choice with its numbers, and the runner-up with its total."""
    chosen, arrival = explanation.chosen, explanation.chosen.arrival
    facts: dict[str, Fact] = {
        "prefill": chosen.prefill.worker_id,
        "decode": chosen.decode.worker_id,
        "total_ms": _ms(chosen.total_seconds),
        "queue_ms": _ms(chosen.queue_seconds),
        "fetch_ms": _ms(arrival.fetch_seconds),
        "load_ms": _ms(arrival.load_seconds),
        "prefill_ms": _ms(chosen.prefill_seconds),
        "handoff_ms": _ms(chosen.handoff_seconds),
        "row_ms": _ms(chosen.row_seconds),
        "recompute_ms": _ms(arrival.recompute_seconds),
        "usable_tokens": chosen.cached.by_tier,
        "plane": chosen.plane,
    }
    if explanation.others:
        other = explanation.others[0]
        facts["next_prefill"] = other.prefill.worker_id
        facts["next_decode"] = other.decode.worker_id
        facts["next_total_ms"] = _ms(other.total_seconds)
    return facts


def finished_facts(reason: FinishReason, usage: Usage, pace: Pace) -> dict[str, Fact]:
    return {
        "reason": str(reason),
        "prompt": usage.prompt_tokens,
        "tokens": usage.completion_tokens,
        "cached": usage.cached.by_tier,
        "drafted": usage.drafted_tokens,
        "accepted": usage.accepted_tokens,
        "ttft_ms": _ms(pace.first_seconds or 0.0),
        "itl_p50_ms": _ms(pace.gap_quantile(0.5)),
        "itl_p99_ms": _ms(pace.gap_quantile(0.99)),
    }


def chain_facts(chains: Chains, state: ServedState | None) -> dict[str, Fact]:
    """What a simulator needs to see which requests share a prefix; nothing while nobody serves."""
    if state is None:
        return {}
    prints = encode_prints(chain_prints(chains.of(state)))
    return {"page_size": state.page_size, "chain": prints}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
