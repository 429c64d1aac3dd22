"""`ferryman trace ID`: what happened to a request, and whether its events are in a legal order;
`ferryman events [ID]`: events as they happen, like `nats sub`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict

from rich.console import Console

from ferryman.handoff.lifecycle import LifecycleEntry, Violation, check, is_over
from ferryman.handoff.waterfall import rows
from ferryman.runtime.life import EXIT_FAILED
from ferryman_cli.endpoints import BrokerPlace
from ferryman_cli.lifecycle_reader import follow_events, read_events, read_hops
from ferryman_cli.reports.broker_path import hops_as_objects, print_hops
from ferryman_cli.reports.phrases import sentence
from ferryman_cli.reports.waterfall import event_line, facts_text, print_request

_NO_LIMIT = 1 << 16


def run_trace(
    place: BrokerPlace,
    request_id: str,
    *,
    checks: bool,
    has_hops: bool,
    is_verbose: bool,
    as_json: bool,
) -> int:
    """Prints the trace, with `has_hops` also the way of its events through brokers; with `checks`
    the exit status says whether it is legal."""
    events = asyncio.run(read_events(place, request_id))
    hops = asyncio.run(read_hops(place, _request_ids(events))) if has_hops else []
    violations = check(events) if checks else []
    if as_json:
        of_broker = {"broker": hops_as_objects(events, hops)} if has_hops else {}
        print(json.dumps({**as_object(request_id, events, violations), **of_broker}))
    else:
        console = Console(highlight=False)
        print_lives(console, events, is_verbose=is_verbose)
        if has_hops:
            print_hops(console, events, hops)
        if checks:
            _print_verdict(events, violations)
    return EXIT_FAILED if violations else 0


def print_lives(
    console: Console, events: Sequence[LifecycleEntry], *, is_verbose: bool = False
) -> None:
    """Prints each request of a call, all on one scale of time."""
    lines, request_ids = rows(events), _request_ids(events)
    for request_id in request_ids:
        mine = [row for row in lines if row.event.request_id == request_id]
        print_request(console, mine, is_verbose=is_verbose)
        if request_id != request_ids[-1] and not is_over(row.event for row in mine):
            console.print(f"{request_id}: no end; the call was sent again", markup=False)


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


def run_events(place: BrokerPlace, request_id: str, *, is_verbose: bool, as_json: bool) -> int:
    """Follows one request until it is over; all requests, until Ctrl-C."""
    asyncio.run(_follow(place, request_id, is_verbose=is_verbose, as_json=as_json))
    return 0


async def _follow(place: BrokerPlace, request_id: str, *, is_verbose: bool, as_json: bool) -> None:
    console = Console(highlight=False)
    async with aclosing(follow_events(place, request_id)) as events:
        async for message, event in events:
            if as_json:
                record = {"subject": message.subject, **json.loads(message.payload)}
                print(json.dumps(record), flush=True)
            elif is_verbose:
                line = event_line(event, facts_text(event.facts), _NO_LIMIT)
                console.print(line, soft_wrap=True)
            else:
                console.print(event_line(event, sentence(event), console.width))
            if request_id and is_over([event]):
                return
