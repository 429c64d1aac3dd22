"""`ferryman trace ID`: the events of a request, and whether their order is legal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferryman.handoff.lifecycle import LifecycleEntry, Violation, check, is_over
from ferryman.runtime.life import EXIT_FAILED
from ferryman_cli.endpoints import BrokerPlace
from ferryman_cli.lifecycle_reader import read_events
from ferryman_cli.waterfall import WaterfallRow, bar, facts_text, rows

MIN_BAR_WIDTH, MAX_BAR_WIDTH = 10, 28
COLOURS = {"router": "cyan", "prefill": "green", "decode": "magenta", "hostcache": "yellow"}


def run_trace(place: BrokerPlace, request_id: str, *, checks: bool, as_json: bool) -> int:
    """Prints the trace; with `checks` the exit status says whether it is legal."""
    events = asyncio.run(read_events(place, request_id))
    violations = check(events) if checks else []
    if as_json:
        print(json.dumps(as_object(request_id, events, violations)))
    else:
        print_lives(Console(), events)
        if checks:
            _print_verdict(events, violations)
    return EXIT_FAILED if violations else 0


def print_lives(console: Console, events: Sequence[LifecycleEntry]) -> None:
    """Prints a waterfall for each request of a call, all on one scale of time."""
    lines, request_ids = rows(events), _request_ids(events)
    for request_id in request_ids:
        mine = [row for row in lines if row.event.request_id == request_id]
        print_waterfall(console, request_id, mine)
        if request_id != request_ids[-1] and not is_over(row.event for row in mine):
            console.print(f"{request_id}: no end; the call was sent again", markup=False)


def print_waterfall(console: Console, request_id: str, lines: Sequence[WaterfallRow]) -> None:
    """Prints one line an event, in order of time."""
    total = max(row.end_ms for row in lines)
    attempts = max(row.event.attempt for row in lines)
    bar_width = min(max(console.width // 6, MIN_BAR_WIDTH), MAX_BAR_WIDTH)
    begin = lines[0].begin_ms
    since = f"from {begin:.1f} ms, " if begin else ""
    spent = f"{since}{total - begin:.1f} ms, attempts {attempts}"
    title = f"{request_id}: {len(lines)} events, {spent}"
    table = Table(title=Text(title), box=None, pad_edge=False, title_justify="left")
    table.add_column("ms", justify="right")
    for name in ("who", "event", "", "facts"):
        table.add_column(name, overflow="fold" if name == "facts" else "ellipsis")
    for row in lines:
        colour = COLOURS.get(row.event.role, "white")
        who = row.event.worker_id + (f" #{row.event.attempt}" if attempts > 1 else "")
        table.add_row(
            f"{row.begin_ms:.1f}",
            Text(who, colour),
            Text(row.event.name),
            Text(bar(row, total, bar_width), colour),
            Text(facts_text(row.event.facts), "dim"),
        )
    console.print(table)


def as_object(
    request_id: str, events: Sequence[LifecycleEntry], violations: Sequence[Violation]
) -> dict[str, object]:
    """Events in order of time, with milliseconds since the first. There are several `request_ids`
    when the call was sent again."""
    return {
        "request_id": request_id,
        "request_ids": _request_ids(events),
        "is_over": _is_over(events),
        "events": [{"at_ms": round(row.begin_ms, 3), **asdict(row.event)} for row in rows(events)],
        "violations": [asdict(violation) for violation in violations],
    }


def _print_verdict(events: Sequence[LifecycleEntry], violations: Sequence[Violation]) -> None:
    for violation in violations:
        print(f"violation: {violation.rule}: {violation.detail} (attempt {violation.attempt})")
    if not violations:
        end = "" if _is_over(events) else "; it is not over yet"
        lives = _request_ids(events)
        of = f" of {len(lives)} requests" if len(lives) > 1 else ""
        print(f"legal: {len(events)} events{of} in an order that the tables allow{end}")


def _request_ids(events: Sequence[LifecycleEntry]) -> list[str]:
    """The ids in the order of the log: the request that was sent first comes first."""
    return list(dict.fromkeys(event.request_id for event in events))


def _is_over(events: Sequence[LifecycleEntry]) -> bool:
    """Whether the last request of the call has ended."""
    last = _request_ids(events)[-1]
    return is_over(event for event in events if event.request_id == last)
