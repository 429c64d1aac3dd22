"""A request's lifecycle as a waterfall: the work of each process, and its duration. Pure.

A row is one event; its bar extends to the next event of the same process in the same attempt. Wall
clocks place processes relative to each other; within a process its own milliseconds count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ferryman.handoff.lifecycle import LifecycleEntry

_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL, _POINT = "█", "▏"
# A chain of page keys is for programs, which read it with --json.
_MAX_SHOWN = 48


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


def bar(row: WaterfallRow, total_ms: float, width: int) -> str:
    """`width` characters: blank, then the row's share of the whole; at least a point."""
    if total_ms <= 0:
        return _POINT.ljust(width)
    begin = min(int(row.begin_ms / total_ms * width), width - 1)
    eighths = round((row.end_ms - row.begin_ms) / total_ms * width * 8)
    whole, rest = divmod(min(eighths, (width - begin) * 8), 8)
    drawn = _FULL * whole + (_EIGHTHS[rest] if rest else "")
    return (" " * begin + (drawn or _POINT)).ljust(width)


def facts_text(facts: Mapping[str, object]) -> str:
    """`name=value name=value`; empty values are left out, and long ones are cut."""
    return " ".join(f"{name}={_shown(value)}" for name, value in facts.items() if value != "")


def _is_same_line(before: LifecycleEntry, after: LifecycleEntry) -> bool:
    if (before.publisher, before.request_id) != (after.publisher, after.request_id):
        return False
    return before.role == "router" or before.attempt == after.attempt


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


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "[" + ",".join(_shown(inner) for inner in value) + "]"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
