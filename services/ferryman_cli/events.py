"""`ferryman events [ID]`: lifecycle events as they happen, like `nats sub`."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

from rich.console import Console
from rich.text import Text

from ferryman.handoff.lifecycle import LifecycleEntry, is_over
from ferryman_cli.endpoints import BrokerPlace
from ferryman_cli.lifecycle_reader import follow_events
from ferryman_cli.trace import COLOURS
from ferryman_cli.waterfall import facts_text


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
