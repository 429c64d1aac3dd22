"""A request's lifecycle events in order of time, as rows of a waterfall. Pure.

A row is one event, the work that began with it, and its end: the next event of the same process in
the same attempt. Wall clocks place processes relative to each other; within a process its own
milliseconds count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ferryman.handoff.lifecycle import ROUTER, LifecycleEntry


@dataclass(frozen=True, slots=True)
class WaterfallRow:
    """One event: work that began at `begin_ms` and lasted until `end_ms`."""

    begin_ms: float
    end_ms: float
    event: LifecycleEntry


def rows(events: Iterable[LifecycleEntry]) -> list[WaterfallRow]:
    """Rows in order of time, from 0 ms on."""
    times = _times(list(events))
    ordered = sorted(times, key=lambda timed: (timed[0], timed[1].publisher, timed[1].seq))
    lines: list[WaterfallRow] = []
    for index, (begin, event) in enumerate(ordered):
        later = (t for t, e in ordered[index + 1 :] if _is_same_line(event, e))
        lines.append(WaterfallRow(begin, next(later, begin), event))
    return lines


def _is_same_line(before: LifecycleEntry, after: LifecycleEntry) -> bool:
    if (before.publisher, before.request_id) != (after.publisher, after.request_id):
        return False
    return before.role == ROUTER or before.attempt == after.attempt


def _times(events: list[LifecycleEntry]) -> list[tuple[float, LifecycleEntry]]:
    """Milliseconds since the earliest event; never backwards within a process."""
    firsts: dict[tuple[tuple[str, str, int], str], LifecycleEntry] = {}
    for event in sorted(events, key=lambda event: event.seq):
        firsts.setdefault((event.publisher, event.request_id), event)
    start = min((event.unix_ms for event in firsts.values()), default=0)
    timed = []
    for event in events:
        first = firsts[event.publisher, event.request_id]
        timed.append((first.unix_ms - start + event.elapsed_ms - first.elapsed_ms, event))
    return timed
