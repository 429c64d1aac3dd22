"""A request's lifecycle as a waterfall: what each process was doing, and for how long. Pure.

A row is one event; its bar runs to the next event of the same process in the same attempt. Wall
clocks place processes beside each other; within a process its own milliseconds count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ferryman.handoff.lifecycle import LifecycleEvent

_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL, _POINT = "█", "▏"
# A chain of key prints is for programs: they read it with --json.
_MAX_SHOWN = 48


@dataclass(frozen=True, slots=True)
class Row:
    """One event: what began at `begin_ms`, and lasted until `end_ms`."""

    begin_ms: float
    end_ms: float
    event: LifecycleEvent


def rows(events: Iterable[LifecycleEvent]) -> list[Row]:
    """Rows in the order of their time, from 0 ms on."""
    times = _times(list(events))
    ordered = sorted(times, key=lambda timed: (timed[0], timed[1].publisher, timed[1].seq))
    found: list[Row] = []
    for index, (begin, event) in enumerate(ordered):
        later = (t for t, e in ordered[index + 1 :] if _is_same_line(event, e))
        found.append(Row(begin, next(later, begin), event))
    return found


def bar(row: Row, total_ms: float, width: int) -> str:
    """`width` characters: blank, then the row's share of the whole; at least a point."""
    if total_ms <= 0:
        return _POINT.ljust(width)
    begin = min(int(row.begin_ms / total_ms * width), width - 1)
    eighths = round((row.end_ms - row.begin_ms) / total_ms * width * 8)
    whole, rest = divmod(min(eighths, (width - begin) * 8), 8)
    drawn = _FULL * whole + (_EIGHTHS[rest] if rest else "")
    return (" " * begin + (drawn or _POINT)).ljust(width)


def facts_text(facts: Mapping[str, object]) -> str:
    """`name=value name=value`; what is empty says nothing, and what is long is cut."""
    return " ".join(f"{name}={_shown(value)}" for name, value in facts.items() if value != "")


def _is_same_line(before: LifecycleEvent, after: LifecycleEvent) -> bool:
    if before.publisher != after.publisher:
        return False
    return before.role == "router" or before.attempt == after.attempt


def _times(events: list[LifecycleEvent]) -> list[tuple[float, LifecycleEvent]]:
    """Milliseconds since the earliest event; never backwards within a process."""
    firsts: dict[tuple[str, str, int], LifecycleEvent] = {}
    for event in sorted(events, key=lambda event: event.seq):
        firsts.setdefault(event.publisher, event)
    start = min((event.unix_ms for event in firsts.values()), default=0)
    timed = []
    for event in events:
        first = firsts[event.publisher]
        timed.append((first.unix_ms - start + event.elapsed_ms - first.elapsed_ms, event))
    return timed


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "[" + ",".join(_shown(inner) for inner in value) + "]"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
