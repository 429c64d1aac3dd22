"""`ferryman trace ID`: what happened to a request, and whether it could happen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferryman.handoff.lifecycle import LifecycleEvent, Violation, check, is_over
from ferryman.runtime.life import EXIT_FAILED
from ferryman_cli.lifecycle_reader import read_events
from ferryman_cli.waterfall import bar, facts_text, rows

MIN_BAR_WIDTH, MAX_BAR_WIDTH = 10, 28
COLOURS = {"router": "cyan", "prefill": "green", "decode": "magenta", "hostcache": "yellow"}


def run_trace(nats: tuple[str, str], request_id: str, *, checks: bool, as_json: bool) -> int:
    """Prints the trace; with `checks` the exit status says whether it is legal."""
    events = asyncio.run(read_events(*nats, request_id))
    violations = check(events) if checks else []
    if as_json:
        print(json.dumps(as_object(request_id, events, violations)))
    else:
        print_waterfall(Console(), request_id, events)
        if checks:
            _print_verdict(events, violations)
    return EXIT_FAILED if violations else 0


def print_waterfall(console: Console, request_id: str, events: Sequence[LifecycleEvent]) -> None:
    """One line an event, in the order of their time."""
    lines = rows(events)
    total = max(row.end_ms for row in lines)
    attempts = max(event.attempt for event in events)
    bar_width = min(max(console.width // 6, MIN_BAR_WIDTH), MAX_BAR_WIDTH)
    title = f"{request_id}: {len(lines)} events, {total:.1f} ms, attempts {attempts}"
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
    request_id: str, events: Sequence[LifecycleEvent], violations: Sequence[Violation]
) -> dict[str, object]:
    """Events in the order of their time, with milliseconds since the first."""
    return {
        "request_id": request_id,
        "is_over": is_over(events),
        "events": [{"at_ms": round(row.begin_ms, 3), **asdict(row.event)} for row in rows(events)],
        "violations": [asdict(violation) for violation in violations],
    }


def _print_verdict(events: Sequence[LifecycleEvent], violations: Sequence[Violation]) -> None:
    for found in violations:
        print(f"violation: {found.rule}: {found.detail} (attempt {found.attempt})")
    if not violations:
        end = "" if is_over(events) else "; it is not over yet"
        print(f"legal: {len(events)} events in an order that the tables allow{end}")
