"""A request in a few lines: its time, its reuse, and why the rest was computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ferryman.handoff.lifecycle import LifecycleEntry, is_over
from ferryman_cli.reports.phrases import (
    counted,
    duration,
    number_of,
    reason_words,
    table_of,
    tier_words,
)

SummaryLine = tuple[str, str]
"""A label of at most eight letters, and its text."""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """The headline, and lines with a label each."""

    headline: str
    lines: tuple[SummaryLine, ...]


def summary_of(timed: Sequence[tuple[float, LifecycleEntry]]) -> RequestSummary:
    """The summary of one request's events, each with its milliseconds, in order of time."""
    events = [event for _, event in timed]
    lines = (*_reuse(events), *_parting(events), *_at_decode(events), *_attempts(events))
    return RequestSummary(_headline(timed), lines)


def _headline(timed: Sequence[tuple[float, LifecycleEntry]]) -> str:
    request_id, events = timed[0][1].request_id, [event for _, event in timed]
    first = next((at for at, event in timed if event.name == "first_token"), None)
    begun = timed[0][0]
    spent = duration(timed[-1][0] - begun)
    end = next((event for event in reversed(events) if _ends(event)), None)
    if end is None:
        return f"{request_id}: not over yet, {spent} so far"
    if end.name != "finished":
        reason = str(end.facts.get("reason", ""))
        return f"{request_id}: {end.name} after {spent}" + (f", {reason}" if reason else "")
    tokens = counted(number_of(end.facts, "tokens"), "token")
    after = f", the first after {duration(first - begun)}" if first is not None else ""
    return f"{request_id}: {tokens} in {spent}{after}; ended by {end.facts.get('reason')}"


def _ends(event: LifecycleEntry) -> bool:
    return event.role == "router" and is_over([event])


def _last(events: Sequence[LifecycleEntry], role: str, name: str) -> Mapping[str, object] | None:
    """The facts of the last such event: a later plan replaces an earlier one."""
    latest = (event.facts for event in reversed(events) if (event.role, event.name) == (role, name))
    return next(latest, None)


def _reuse(events: Sequence[LifecycleEntry]) -> Iterator[SummaryLine]:
    plan, end = _last(events, "prefill", "admitted"), _last(events, "router", "finished")
    facts = end if end is not None and "cached" in end else plan
    if facts is None:
        return
    cached = {tier: number for tier, number in table_of(facts, "cached").items() if number}
    prompt = number_of(facts, "prompt") or number_of(facts, "prompt_len")
    reused = sum(cached.values())
    if not reused:
        yield "reused", f"nothing of {counted(prompt, 'prompt token')}"
    else:
        share = f"{reused / prompt:.0%}" if prompt else "all"
        where = tier_words(cached)
        yield "reused", f"{reused:,} of {counted(prompt, 'prompt token')} ({share}): {where}"
    if plan is not None and prompt > reused:
        page_size = _page_size(events)
        why = _why(table_of(plan, "uncached"), page_size, prompt - reused)
        yield "computed", f"{counted(prompt - reused, 'token')}{why}"


def _page_size(events: Sequence[LifecycleEntry]) -> int:
    received = _last(events, "router", "received") or _last(events, "router", "taken_over")
    return number_of(received or {}, "page_size")


def _why(pages: Mapping[str, int], page_size: int, num_tokens: int) -> str:
    """The reasons with their tokens. They stand in the order of pages, so the last one has the page
    that is cut short; without the size of a page they are named alone."""
    left, parts = num_tokens, []
    for reason, number in pages.items():
        tokens = min(left, number * page_size)
        left -= tokens
        words = reason_words(reason)
        parts.append(f"{tokens:,} ({words})" if page_size and len(pages) > 1 else words)
    return f": {', '.join(parts)}" if parts else ""


def _parting(events: Sequence[LifecycleEntry]) -> Iterator[SummaryLine]:
    facts = _last(events, "router", "received") or {}
    parts = table_of(facts, "parts")
    if parts:
        yield (
            "parts",
            f"from request {facts.get('parts_from')} at token {parts.get('at', 0):,}, in"
            f" {facts.get('parts_in')}: {counted(parts.get('missed', 0), 'token')} after it may"
            " have been kept",
        )


def _at_decode(events: Sequence[LifecycleEntry]) -> Iterator[SummaryLine]:
    held = table_of(_last(events, "decode", "reserved") or {}, "held")
    if sum(held.values()):
        num_held = counted(sum(held.values()), "token")
        yield "decode", f"had the state of {num_held} itself: {tier_words(held)}"


def _attempts(events: Sequence[LifecycleEntry]) -> Iterator[SummaryLine]:
    routed = [event for event in events if (event.role, event.name) == ("router", "routed")]
    if len(routed) > 1:
        lost = ", ".join(
            f"{before.facts.get('prefill')} + {before.facts.get('decode')}"
            for before in routed[:-1]
        )
        yield "attempts", f"{len(routed)}; given up at {lost}"
    pushed = sum(event.name == "retracted" for event in events)
    if pushed:
        yield "pauses", f"pushed back {counted(pushed, 'time')}: decode ran out of pages"
