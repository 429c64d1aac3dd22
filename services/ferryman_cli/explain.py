"""`ferryman explain ID`: why a request went where it went, and what else there was."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferryman.client import Client, RouteCandidate, RouteExplanation

COLUMNS = ("", "prefill", "decode", "queue", "load", "prefill s", "hand-off", "total", "usable")


def run_explain(grpc: str, request_id: str, *, as_json: bool) -> int:
    routes = asyncio.run(_explained(grpc, request_id))
    if as_json:
        print(json.dumps({"request_id": request_id, "routes": [asdict(one) for one in routes]}))
    elif not routes:
        print(f"{request_id} was never routed: it is waiting, or was rejected before")
    for route in () if as_json else routes:
        print_route(Console(), request_id, route)
    return 0


async def _explained(grpc: str, request_id: str) -> tuple[RouteExplanation, ...]:
    async with Client(grpc) as client:
        return await client.explain(request_id)


def print_route(console: Console, request_id: str, route: RouteExplanation) -> None:
    """The choice, then the others, best first, with the seconds predicted for each."""
    title = f"{request_id}, attempt {route.attempt} (predicted milliseconds)"
    table = Table(title=Text(title), box=None, pad_edge=False, title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in COLUMNS[:3] else "right")
    table.add_row(*_cells("chosen", route.chosen), style="bold")
    for index, other in enumerate(route.others):
        table.add_row(*_cells("" if index else "next", other))
    console.print(table)


def _cells(word: str, candidate: RouteCandidate) -> tuple[str, ...]:
    parts = (
        candidate.queue_seconds,
        candidate.load_seconds,
        candidate.prefill_seconds,
        candidate.handoff_seconds,
        candidate.total_seconds,
    )
    usable = f"{candidate.usable_tokens} tokens"
    if candidate.host_tokens:
        usable += f", {candidate.host_tokens} from host"
    times = (f"{seconds * 1000:.2f}" for seconds in parts)
    return (word, candidate.prefill_worker_id, candidate.decode_worker_id, *times, usable)
