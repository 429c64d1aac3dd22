"""`ferryman explain ID`: the reasons for the routing of a request, the alternatives, and the
places from which its state was fetched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferryman.client import Client, LifecycleEvent, RouteCandidate, RouteExplanation
from ferryman.errors import DeadlineExceeded, NotFound, Unavailable
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.handoff.reuse_events import BEGINS, FetchedUnits, PartedPrompt, fetches, partings
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.nats.heartbeat import HOSTCACHE
from ferryman_cli.endpoints import DoorPlace
from ferryman_cli.reports.routes import route_summary
from ferryman_cli.reports.waterfall import print_line, print_summary

MAX_OTHERS = 3  # fit next to the choice in 80 columns; --json prints all


def fetched_units(events: Iterable[LifecycleEvent]) -> list[FetchedUnits]:
    """The units that the lifecycle log has: routes are predictions, this is what came."""
    stored = [event for event in events if (event.role, event.event) == (HOSTCACHE, "stored")]
    return fetches(decode_event(event.json.encode()) for event in stored)


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """Tokens of the prompt whose state an attempt's decode worker had, by tier; they were not sent
    to it."""

    attempt: int
    worker_id: str
    tokens: Mapping[str, int]

    @property
    def text(self) -> str:
        tiers = ", ".join(f"{tokens} in tier {tier}" for tier, tokens in self.tokens.items())
        return f"attempt {self.attempt}: {self.worker_id} had tokens of the prompt itself: {tiers}"


def held_tokens(events: Iterable[LifecycleEvent]) -> list[HeldTokens]:
    """The tokens that the lifecycle log has."""
    reserved = [event for event in events if event.event == "reserved"]
    entries = [decode_event(event.json.encode()) for event in reserved]
    return [
        HeldTokens(event.attempt, event.worker_id, held)
        for event in entries
        if isinstance(held := event.facts.get("held"), dict)
    ]


def parted_prompts(events: Iterable[LifecycleEvent]) -> list[PartedPrompt]:
    """The places that the lifecycle log has."""
    return partings(chain.from_iterable(map(_read, events)))


def _read(event: LifecycleEvent) -> Iterator[LifecycleEntry]:
    if event.event in BEGINS:
        # A router of another version writes another log.
        with suppress(ValueError):
            yield decode_event(event.json.encode())


def run_explain(
    door: DoorPlace, request_id: str, *, api_key: str, is_verbose: bool, as_json: bool
) -> int:
    routes, events = asyncio.run(_explained(door, request_id, api_key))
    fetched, held, parted = fetched_units(events), held_tokens(events), parted_prompts(events)
    if as_json:
        fields = {
            "request_id": request_id,
            "routes": [asdict(route) for route in routes],
            "fetched": [asdict(units) for units in fetched],
            "held": [asdict(tokens) for tokens in held],
            "parts": [asdict(place) for place in parted],
        }
        print(json.dumps(fields))
    elif not routes:
        print(f"{request_id} was never routed: it is waiting, or was rejected before")
    if not as_json:
        console = Console(highlight=False)
        for route in routes:
            print_summary(console, route_summary(request_id, route))
            if is_verbose:
                print_route(console, request_id, route)
        texts = [units.text for units in fetched] + [tokens.text for tokens in held]
        for text in (*texts, *(place.text for place in parted)):
            print_line(console, text)
    return 0


async def _explained(
    door: DoorPlace, request_id: str, api_key: str
) -> tuple[tuple[RouteExplanation, ...], tuple[LifecycleEvent, ...]]:
    """The routes and the events; without the log, because the broker is away or has none, the
    routes alone."""
    async with Client(door.address, api_key=api_key, tls=door.tls()) as client:
        routes = await client.explain(request_id)
        try:
            return routes, tuple(await client.trace(request_id))
        except (NotFound, Unavailable, DeadlineExceeded):
            return routes, ()


def print_route(console: Console, request_id: str, route: RouteExplanation) -> None:
    """The choice and the best alternatives, with the milliseconds predicted for each part.

    The cost of recomputing is not part of the total: it is the cost without any loads.
    """
    candidates = (route.chosen, *route.others[:MAX_OTHERS])
    title = f"{request_id}, attempt {route.attempt} (predicted milliseconds)"
    table = Table(title=Text(title), box=None, pad_edge=False, title_justify="left")
    table.add_column("")
    for index, _ in enumerate(candidates):
        table.add_column(("chosen", "next")[index] if index < 2 else "", justify="right")
    for row in zip(*(_lines(candidate) for candidate in candidates), strict=True):
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
    # Tiers from the nearest on, as a plan tries them.
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
        ("in another arithmetic", str(candidate.unlike_tokens)),
        ("data plane", candidate.plane),
        ("exactness", candidate.exactness.value),
    ]
