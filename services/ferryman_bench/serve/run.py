"""`ferryman bench serve`: makes the workload, sends it, shows and writes the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ferryman.errors import ConfigError
from ferryman_bench.endpoint.client import EndpointClient, EndpointRefusal, open_endpoint
from ferryman_bench.endpoint.inquiry import ChatMessage, Delivery, EndpointDoor, Inquiry
from ferryman_bench.hardware import machine_now
from ferryman_bench.serve.load_result import LoadResult, show_result
from ferryman_bench.serve.load_run import (
    ArrivalLoop,
    Ends,
    FullLoop,
    LoadRun,
    ignoring_ends,
    own_ends,
    without_ends,
)
from ferryman_bench.serve.report_page import write_page
from ferryman_bench.serve.turn_record import LatencyLimits
from ferryman_bench.serve.workload import LoadSession
from ferryman_simulator.report import load_pyplot

_TRIAL = Inquiry((ChatMessage("user", "Say yes."),), 2)

_REFUSED_FIELD = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)
# Such a refusal says nothing about the fields of a request.
_BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The server, and the load on it. `name` is that of the workload."""

    url: str
    name: str
    sessions: Sequence[LoadSession]
    loop: ArrivalLoop = field(default_factory=lambda: FullLoop(8))
    limits: LatencyLimits = field(default_factory=lambda: LatencyLimits(1.0, 0.1))
    model: str = ""
    api_key: str = field(default="", repr=False)
    door: EndpointDoor = EndpointDoor.CHAT
    seed: int = 0

    @property
    def has_right_answers(self) -> bool:
        """Whether any is known: then answers end by themselves."""
        turns = (turn for session in self.sessions for turn in session.turns)
        return any(turn.answer or turn.wants_call for turn in turns)

    @property
    def title(self) -> str:
        turns = sum(len(session.turns) for session in self.sessions)
        return f"{self.name}: {len(self.sessions)} sessions, {turns} turns, {self.loop}"


def run_bench_serve(choice: ServeOptions, *, as_json: bool, html: Path | None) -> int:
    """Exit status 1 if no request was answered. Raises ConfigError for a server that cannot be
    asked."""
    if html is not None:
        # Its absence is told before the run, not after it.
        load_pyplot()
    result = asyncio.run(loaded_endpoint(choice))
    if html is not None:
        write_page(html, result)
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        show_result(result, Console())
    return 0 if result.totals.errors < result.totals.requests else 1


async def loaded_endpoint(choice: ServeOptions) -> LoadResult:
    """The result of the load on the endpoint; a bar on stderr shows how far it is."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    options = {"model": choice.model, "api_key": choice.api_key}
    async with open_endpoint(choice.url, door=choice.door, **options) as (client, card):
        ends = own_ends if choice.has_right_answers else await _accepted_ends(client)
        total = sum(len(session.turns) for session in choice.sessions)
        columns = TextColumn("turns"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            run = LoadRun(client, ends, lambda: bar.advance(task))
            records = await run.run(choice.sessions, choice.loop, choice.seed)
        server = f"{client.model} ({card.owner})" if card.owner else client.model
        return LoadResult(choice.title, server, date, machine_now(), choice.limits, records)


async def _accepted_ends(client: EndpointClient) -> Ends:
    """The way to answers as long as asked for, of one piece a token, that the server takes.

    A server that knows `min_tokens` refuses more of them than `max_tokens` as a bad request; others
    pass over them. Raises ConfigError if it does not answer without such fields, or is busy.
    """
    if refusal := await _refusal(client, own_ends(_TRIAL.max_tokens)):
        raise ConfigError(f"{client.place}: {refusal}")
    too_many = await _refusal(client, without_ends(_TRIAL.max_tokens + 1))
    knows_field = too_many is not None and too_many.status in _REFUSED_FIELD
    for ends in (without_ends, ignoring_ends) if knows_field else (ignoring_ends,):
        if await _refusal(client, ends(_TRIAL.max_tokens)) is None:
            return ends
    return own_ends


async def _refusal(client: EndpointClient, fields: Mapping[str, Any]) -> EndpointRefusal | None:
    """The server's refusal of a request with `fields`, or an error within its answer; None if it
    answers. Raises ConfigError if there is no server, or a busy one."""
    try:
        await client.ask(_TRIAL.with_fields(fields), Delivery.STREAMED)
    except EndpointRefusal as refusal:
        if not refusal.status:
            raise ConfigError(str(refusal)) from None
        if refusal.status in _BUSY:
            raise ConfigError(f"{client.place}: {refusal}; measure when it is ready") from None
        return refusal
    return None
