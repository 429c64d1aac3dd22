"""The tables by which lifecycle events become spans.

Each role has one outer span for a request (the router) or an attempt (workers), and phases within
it. A phase begins with one event and ends with the next one that begins a phase, or with the end of
the outer span. An event that begins none is a moment of the outer span.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferryman.handoff.lifecycle import AUDITED, DECODE, FOLLOWS, PREFILL, ROUTER, START
from ferryman.runtime.spans.span import AttributeValue, WorkKind, flattened

ASKED = "asked"
"""A note of the router, before its first event: what is asked for, and since when."""
ATTEMPT = "attempt"
_FAILURES = frozenset({"failed", "cancelled", "rejected", "aborted"})
_FOR_PROGRAMS = frozenset({"chain", "page_size"})


@dataclass(frozen=True, slots=True)
class RoleRules:
    """The spans of one role: the outer one, and its phases by the event that begins them."""

    outer: str
    kind: WorkKind
    phases: Mapping[str, str]


RULES: Mapping[str, RoleRules] = {
    ROUTER: RoleRules(
        "request",
        WorkKind.INTERNAL,
        {"received": "queue", "taken_over": "queue", "migrated": "queue", "routed": ATTEMPT},
    ),
    PREFILL: RoleRules(
        "prefill",
        WorkKind.SERVER,
        {
            "queued": "prefill.queue",
            "prefetching": "prefill.prefetch",
            "prefetched": "prefill.queue",
            "admitted": "prefill.compute",
        },
    ),
    DECODE: RoleRules(
        "decode",
        WorkKind.SERVER,
        {
            "reserved": "handoff.receive",
            "verified": "decode.queue",
            "first_token": "decode.tokens",
            "retracted": "decode.retracted",
            "resumed": "decode.tokens",
            "moving": "handoff.send",
        },
    ),
}


def begins(role: str, name: str) -> bool:
    """Whether an event or note begins an outer span."""
    return name in FOLLOWS[role][START] or (role, name) == (ROUTER, ASKED)


def ends(role: str, name: str) -> bool:
    """Whether an event ends the outer span: nothing but an audit may follow it."""
    return set(FOLLOWS[role].get(name, ("",))) <= {AUDITED}


def phase_of(role: str, name: str, facts: Mapping[str, object]) -> str:
    """The phase that begins with an event; empty for none. After the last chunk of a prompt the
    rest of its state is sent."""
    if (role, name) == (PREFILL, "chunk"):
        return "handoff.send" if facts.get("index") == facts.get("count") else ""
    return RULES[role].phases.get(name, "")


def error_of(name: str, facts: Mapping[str, object]) -> str:
    """The reason in an event that ends a span badly; empty for a good end."""
    return str(facts.get("reason") or name) if name in _FAILURES else ""


def attributes_of(
    role: str, name: str, facts: Mapping[str, object]
) -> Mapping[str, AttributeValue]:
    """Attributes by an event: by OpenTelemetry's GenAI conventions where these have a name, all
    others as `ferryman.*`. Fields for programs, such as page keys, are left out."""
    if name == ASKED:
        return _gen_ai(name, facts)
    kept = {fact: value for fact, value in facts.items() if fact not in _FOR_PROGRAMS}
    named = _gen_ai(name, facts) if role == ROUTER else {}
    return {**flattened(kept, "ferryman"), **named}


def _gen_ai(name: str, facts: Mapping[str, object]) -> dict[str, AttributeValue]:
    """https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/"""
    named: dict[str, object] = {}
    if name == ASKED:
        named = {
            "provider.name": "ferryman",
            "operation.name": facts.get("operation"),
            "request.model": facts.get("model"),
            "request.max_tokens": facts.get("max_tokens"),
        }
    elif name == "received":
        named = {"usage.input_tokens": facts.get("tokens")}
    elif name == "finished":
        # The log counts by tier and in milliseconds; the conventions have sums and seconds.
        cached, ttft = facts.get("cached"), facts.get("ttft_ms")
        named = {
            "response.finish_reasons": [str(facts.get("reason", ""))],
            "usage.input_tokens": facts.get("prompt"),
            "usage.output_tokens": facts.get("tokens"),
            "usage.cache_read.input_tokens": (
                sum(cached.values()) if isinstance(cached, Mapping) else 0
            ),
            "response.time_to_first_chunk": (
                ttft / 1000 if isinstance(ttft, int | float) else None
            ),
        }
    return {
        f"gen_ai.{key}": value
        for key, value in named.items()
        if isinstance(value, int | float | str | list)
    }
