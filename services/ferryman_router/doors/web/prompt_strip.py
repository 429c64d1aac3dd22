"""A prompt as a strip: for each range of its tokens, where its state came from. Pure.

    0            16                   30
    ├── device ──┤── page_alignment ──┤
                 ▲ snapshot

It is read from the lifecycle log: `admitted` has the tokens reused by tier, and the pages computed
by reason, in the order of the prompt. The log counts tokens of each tier and does not say which
pages they were: those of the device are always the first ones, and slower tiers follow by nearness,
which is the order in which a plan looks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ferryman.handoff.lifecycle import DECODE, PREFILL, ROUTER, LifecycleEntry
from ferryman.handoff.usage import NONE_CACHED

TIERS = tuple(NONE_CACHED.by_tier)
COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class StripSpan:
    """Tokens [start, end) from one source: a tier, or `computed` for a `reason`."""

    start: int
    end: int
    source: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PromptStrip:
    """The plan of a prompt of `tokens` tokens, of its latest attempt that had one. It resumed at
    `position`, with the recurrent state `recurrent`; later prompts can resume at `snapshots`."""

    attempt: int
    tokens: int
    page_size: int
    position: int
    recurrent: str
    spans: tuple[StripSpan, ...]
    snapshots: tuple[int, ...]
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class HandoffPages:
    """The hand-off of an attempt. By kind, the pages [first, end) that decode asked for (of
    recurrent state: positions); the tokens that it `held` itself, by tier; the data plane, and
    `why` it was no faster one. Bytes and seconds are 0 until it was handed off."""

    attempt: int
    wanted: Mapping[str, tuple[int, int]]
    held: Mapping[str, int]
    path: str
    why: str
    units: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


def prompt_strip(events: Sequence[LifecycleEntry], page_size: int) -> PromptStrip | None:
    """The strip of a request's prompt; None before it was admitted. `page_size` counts where the
    log has none."""
    admitted = _latest(events, PREFILL, "admitted")
    if admitted is None:
        return None
    begun = [event.facts for event in events if event.role == ROUTER]
    sizes = [size for facts in begun if (size := _number(facts.get("page_size")))]
    size, facts = sizes[0] if sizes else max(1, page_size), admitted.facts
    tokens = _number(facts.get("prompt_len"))
    snapshots = facts.get("snapshots")
    return PromptStrip(
        attempt=admitted.attempt,
        tokens=tokens,
        page_size=size,
        position=_number(facts.get("position")),
        recurrent=str(facts.get("recurrent", "")),
        spans=tuple(_spans(facts, tokens, size)),
        snapshots=tuple(map(_number, snapshots)) if isinstance(snapshots, list) else (),
        seconds={
            name: _real(facts.get(f"{name}_seconds")) for name in ("load", "compute", "recompute")
        },
    )


def _spans(facts: Mapping[str, object], tokens: int, page_size: int) -> Iterator[StripSpan]:
    cached, at = _counts(facts.get("cached")), 0
    for tier in TIERS:
        end = min(tokens, at + cached.get(tier, 0))
        if end > at:
            yield StripSpan(at, end, tier)
        at = end
    for reason, pages in _counts(facts.get("uncached")).items():
        end = min(tokens, at + pages * page_size)
        if end > at:
            yield StripSpan(at, end, COMPUTED, reason)
        at = end
    if at < tokens:  # the event was too long for its reasons
        yield StripSpan(at, tokens, COMPUTED)


def handoff_pages(events: Sequence[LifecycleEntry]) -> HandoffPages | None:
    """The latest hand-off; None before decode had made room for one."""
    reserved = _latest(events, DECODE, "reserved")
    if reserved is None:
        return None
    of_attempt = [event for event in events if event.attempt == reserved.attempt]
    done = next((event.facts for event in of_attempt if event.name == "handed_off"), {})
    verified = next((event.facts for event in of_attempt if event.name == "verified"), {})
    facts = reserved.facts
    wanted = {
        name.removeprefix("wanted_"): (_number(ends[0]), _number(ends[1]))
        for name, ends in facts.items()
        if name.startswith("wanted_") and isinstance(ends, list) and len(ends) == 2
    }
    return HandoffPages(
        attempt=reserved.attempt,
        wanted=wanted,
        held=_counts(facts.get("held")),
        path=str(done.get("path", facts.get("path", ""))),
        why=str(facts.get("why", "")),
        units=_number(verified.get("units")),
        num_bytes=_number(done.get("bytes")),
        seconds=_real(done.get("seconds")),
    )


def _latest(events: Sequence[LifecycleEntry], role: str, name: str) -> LifecycleEntry | None:
    """The last event of that name in the last attempt that has one."""
    named = [event for event in events if (event.role, event.name) == (role, name)]
    return max(named, key=lambda event: (event.attempt, event.seq), default=None)


# The log may be of a worker that says other things: what is no number counts as nothing.


def _number(value: object) -> int:
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else 0


def _real(value: object) -> float:
    return max(0.0, float(value)) if isinstance(value, int | float) else 0.0


def _counts(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): _number(count) for name, count in value.items()}
