"""What the router's lifecycle events say: small, readable, and never content. Pure."""

from __future__ import annotations

from typing import Any

from ferryman.schedule.request import FinishReason
from ferryman.wire.values import Usage
from ferryman_router.pace import Pace
from ferryman_router.policy import Candidate, Explanation


def routed_facts(explanation: Explanation) -> dict[str, Any]:
    """The choice and the runner-up with their numbers."""
    facts: dict[str, Any] = {"chosen": candidate_facts(explanation.chosen)}
    if explanation.others:
        facts["runner_up"] = candidate_facts(explanation.others[0])
    return facts


def candidate_facts(candidate: Candidate) -> dict[str, Any]:
    return {
        "prefill": candidate.prefill.worker_id,
        "decode": candidate.decode.worker_id,
        "queue_ms": _ms(candidate.queue_seconds),
        "load_ms": _ms(candidate.load_seconds),
        "prefill_ms": _ms(candidate.prefill_seconds),
        "handoff_ms": _ms(candidate.handoff_seconds),
        "usable_tokens": candidate.usable_tokens,
        "host_tokens": candidate.host_tokens,
    }


def finished_facts(reason: FinishReason, usage: Usage, pace: Pace) -> dict[str, Any]:
    return {
        "reason": str(reason),
        "prompt": usage.prompt_tokens,
        "tokens": usage.completion_tokens,
        "cached": {
            "device": usage.cached.device,
            "host": usage.cached.host,
            "storage": usage.cached.storage,
        },
        "ttft_ms": _ms(pace.first_seconds or 0.0),
        "itl_p50_ms": _ms(pace.gap_quantile(0.5)),
        "itl_p99_ms": _ms(pace.gap_quantile(0.99)),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
