"""`ferryman trace ID`: the events of a request, and whether their order is legal; `ferryman events
[ID]`: events as they happen, like `nats sub`.

A trace is a waterfall (`handoff/waterfall.py`), the work of each process and its duration.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferryman.handoff.lifecycle import LifecycleEntry, Violation, check, is_over
from ferryman.handoff.waterfall import WaterfallRow, rows
from ferryman.runtime.life import EXIT_FAILED
from ferryman_cli.endpoints import BrokerPlace
from ferryman_cli.lifecycle_reader import follow_events, read_events

MIN_BAR_WIDTH, MAX_BAR_WIDTH = 10, 28
COLOURS = {"router": "cyan", "prefill": "green", "decode": "magenta", "hostcache": "yellow"}
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL, _POINT = "█", "▏"
# A chain of page keys is for programs, which read it with --json.
_MAX_SHOWN = 48


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


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "[" + ",".join(_shown(inner) for inner in value) + "]"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def run_events(place: BrokerPlace, request_id: str, *, as_json: bool) -> int:
    """Follows one request until it is over; all requests, until Ctrl-C."""
    asyncio.run(_follow(place, request_id, as_json=as_json))
    return 0


async def _follow(place: BrokerPlace, request_id: str, *, as_json: bool) -> None:
    console = Console(soft_wrap=True)
    async with aclosing(follow_events(place, request_id)) as events:
        async for message, event in events:
            if as_json:
                line = {"subject": message.subject, **json.loads(message.payload)}
                print(json.dumps(line), flush=True)
            else:
                console.print(event_line(event))
            if request_id and is_over([event]):
                return


def event_line(event: LifecycleEntry) -> Text:
    """One line: milliseconds, worker, request, event, and its facts."""
    line = Text(f"{event.elapsed_ms:9.1f} ms  ")
    line.append(f"{event.worker_id:<26} ", COLOURS.get(event.role, "white"))
    line.append(f"{event.request_id}#{event.attempt} ", "bold")
    line.append(f"{event.name:<12} ")
    return line.append(facts_text(event.facts), "dim")
