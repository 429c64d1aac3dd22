"""`ferryman explain ID`: the reasons for the routing of a request, and the alternatives."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferryman.client import Client, RouteCandidate, RouteExplanation
from ferryman_cli.endpoints import DoorPlace

MAX_OTHERS = 3  # fit beside the choice in 80 columns; --json prints all


def run_explain(door: DoorPlace, request_id: str, *, api_key: str, as_json: bool) -> int:
    routes = asyncio.run(_explained(door, request_id, api_key))
    if as_json:
        print(json.dumps({"request_id": request_id, "routes": [asdict(one) for one in routes]}))
    elif not routes:
        print(f"{request_id} was never routed: it is waiting, or was rejected before")
    for route in () if as_json else routes:
        print_route(Console(), request_id, route)
    return 0


async def _explained(
    door: DoorPlace, request_id: str, api_key: str
) -> tuple[RouteExplanation, ...]:
    async with Client(door.address, api_key=api_key, tls=door.tls()) as client:
        return await client.explain(request_id)


def print_route(console: Console, request_id: str, route: RouteExplanation) -> None:
    """The choice and the best alternatives, with the milliseconds predicted for each part.

    The cost of recomputing is not part of the total: it is the cost without any loads.
    """
    shown = (route.chosen, *route.others[:MAX_OTHERS])
    title = f"{request_id}, attempt {route.attempt} (predicted milliseconds)"
    table = Table(title=Text(title), box=None, pad_edge=False, title_justify="left")
    table.add_column("")
    for index, _ in enumerate(shown):
        table.add_column(("chosen", "next")[index] if index < 2 else "", justify="right")
    for row in zip(*(_lines(candidate) for candidate in shown), strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    console.print(table)
    if len(route.others) > MAX_OTHERS:
        console.print(f"and {len(route.others) - MAX_OTHERS} more")


def _lines(candidate: RouteCandidate) -> list[tuple[str, str]]:
    """A candidate's column as (name, value) pairs."""
    seconds = {
        "queue": candidate.queue_seconds,
        "fetch": candidate.fetch_seconds,
        "load": candidate.load_seconds,
        "prefill": candidate.prefill_seconds,
        "hand-off": candidate.handoff_seconds,
        "row at decode": candidate.row_seconds,
        "total": candidate.total_seconds,
        "(recomputing)": candidate.recompute_seconds,
    }
    tokens = {
        "device": candidate.device_tokens,
        "host": candidate.host_tokens,
        "storage": candidate.storage_tokens,
        "peer": candidate.peer_tokens,
    }
    return [
        ("prefill worker", candidate.prefill_worker_id),
        ("decode worker", candidate.decode_worker_id),
        *((name, f"{value * 1000:.2f}") for name, value in seconds.items()),
        ("usable tokens", str(candidate.usable_tokens)),
        *((f"  {tier}", str(count)) for tier, count in tokens.items()),
        ("data plane", candidate.plane),
    ]
