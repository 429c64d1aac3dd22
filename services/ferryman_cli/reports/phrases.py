"""Words for what the lifecycle log says in names and numbers."""

from __future__ import annotations

from collections.abc import Mapping

from ferryman.handoff.lifecycle import LifecycleEntry

REASONS: Mapping[str, str] = {
    "never_seen": "never seen before",
    "no_snapshot": "no recurrent state was kept there",
    "window_evicted": "their window was evicted",
    "page_alignment": "after the last full page",
    "cheaper_to_recompute": "quicker to compute than to load",
    "cache_off": "the prefix cache is off",
    "no_room": "no room to load them",
    "host_full": "the host tier was full",
    "storage_timeout": "storage was too slow",
    "below_threshold": "too few to fetch",
    "rate_limited": "fetching was rate-limited",
    "tier_failed": "a tier failed",
    "prompt_logprobs": "their log probabilities were asked for",
    "other_arithmetic": "kept in another arithmetic",
}
TIERS: Mapping[str, str] = {
    "device": "from the device",
    "host": "from host memory",
    "storage": "from storage",
    "peer": "from another node",
}
PHASES: Mapping[str, str] = {
    "queue": "chose workers",
    "attempt": "attempt",
    "prefill.queue": "waited for its turn",
    "prefill.prefetch": "fetched kept state",
    "prefill.compute": "computed the prompt",
    "handoff.send": "sent the state",
    "handoff.receive": "received the state",
    "decode.queue": "waited for a step",
    "decode.tokens": "drew tokens",
    "decode.retracted": "was pushed back",
}


def counted(number: int, noun: str) -> str:
    """`1 token`, `1,200 tokens`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def reason_words(reason: str) -> str:
    """A reason in words; one of a newer version by its name."""
    return REASONS.get(reason, reason.replace("_", " "))


def tier_words(tiers: Mapping[str, int]) -> str:
    """`240 from the device, 32 from host memory`, without tiers that gave nothing."""
    parts = (f"{number:,} {TIERS.get(tier, tier)}" for tier, number in tiers.items() if number)
    return ", ".join(parts)


def duration(ms: float) -> str:
    """`0.4 ms`, `43 ms`, `2.1 s`."""
    if ms >= 10_000:
        return f"{ms / 1000:.0f} s"
    if ms >= 1000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def table_of(facts: Mapping[str, object], name: str) -> dict[str, int]:
    """A fact that is a table of numbers; empty if it is missing or something else."""
    value = facts.get(name)
    if not isinstance(value, Mapping):
        return {}
    return {str(key): number for key, number in value.items() if isinstance(number, int)}


def number_of(facts: Mapping[str, object], name: str) -> int:
    """A fact that is a number; 0 if it is missing or something else."""
    value = facts.get(name)
    return int(value) if isinstance(value, int | float) else 0


def sentence(event: LifecycleEntry) -> str:
    """The fact of an event that matters most, in words; empty for one that needs none."""
    facts = event.facts
    match event.role, event.name:
        case "router", "received" | "taken_over":
            return f"a prompt of {counted(number_of(facts, 'tokens'), 'token')}"
        case "router", "routed":
            # The router's belief; the plan of the prefill worker says what was true.
            usable = sum(table_of(facts, "usable_tokens").values())
            return (
                f"to {facts.get('prefill')} and {facts.get('decode')}:"
                f" {counted(usable, 'token')} kept there"
            )
        case "router", "finished":
            return _finished(facts)
        case "prefill", "admitted":
            return _admitted(facts)
        case "prefill", "chunk":
            start, end = number_of(facts, "start"), number_of(facts, "end")
            return f"computed tokens {start:,} to {end - 1:,}"
        case _, "handed_off":
            size = f"{number_of(facts, 'bytes'):,} bytes" if "bytes" in facts else "it"
            return f"sent {size} by {facts['path']}" if "path" in facts else ""
        case "decode", "reserved":
            held = sum(table_of(facts, "held").values())
            return f"made room; had {counted(held, 'token')} itself" if held else "made room"
        case "decode", "verified":
            return f"{counted(number_of(facts, 'units'), 'unit')} arrived and are right"
        case "decode", "progress":
            return f"{counted(number_of(facts, 'tokens'), 'token')} so far"
        case "decode", "finished":
            return f"{counted(number_of(facts, 'tokens'), 'token')}, {facts.get('reason')}"
        case "hostcache", "stored":
            return f"stored {counted(number_of(facts, 'units'), 'unit')}"
        case "hostcache", "loaded":
            return f"lent {counted(number_of(facts, 'usable_pages'), 'page')}"
    reason = str(facts.get("reason", ""))
    return reason_words(reason) if reason else ""


def _finished(facts: Mapping[str, object]) -> str:
    cached = sum(table_of(facts, "cached").values())
    return (
        f"{counted(number_of(facts, 'tokens'), 'token')}, {facts.get('reason')};"
        f" {cached:,} of {number_of(facts, 'prompt'):,} prompt tokens reused"
    )


def _admitted(facts: Mapping[str, object]) -> str:
    position, prompt_len = number_of(facts, "position"), number_of(facts, "prompt_len")
    where = tier_words(table_of(facts, "cached"))
    begins = f"resumes at token {position:,} ({where})" if position else "begins at token 0"
    return f"{begins}; {prompt_len - position:,} to compute"
