"""`ferryman verify`: looks at what the endpoint offers, examines it, prints the report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from ferryman.errors import ConfigError
from ferryman_bench.endpoint.client import EndpointClient, EndpointRefusal, open_endpoint
from ferryman_bench.endpoint.inquiry import ChatMessage, EndpointDoor, Inquiry, logprob_fields
from ferryman_bench.verify.cold_source import ColdKind, cold_source
from ferryman_bench.verify.examination import Examination, ExaminationPlan, ExaminationReport
from ferryman_bench.verify.presentation import ExaminedEngine, report_object, show_report
from ferryman_bench.verify.ways import Material

EXIT_CHANGED = 1
FILLERS = 12
TRIAL = Inquiry((ChatMessage("user", "The red kite is in Oslo. Where is the red kite?"),), 4)


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The choices of `ferryman verify`. `num_fillers` prompts push others out of a cache."""

    url: str
    model: str = ""
    api_key: str = field(default="", repr=False)
    door: EndpointDoor = EndpointDoor.CHAT
    cold: ColdKind = ColdKind.AUTO
    plan: ExaminationPlan = field(default_factory=ExaminationPlan)
    max_tokens: int = 16
    num_fillers: int = FILLERS
    seed: int = 0


def run_verify(choice: VerifyOptions, *, as_json: bool) -> int:
    """Exit status 1 if a way of reuse changes answers, else 0. Raises ConfigError for an endpoint
    that cannot be asked, EndpointRefusal for one that stops answering."""
    report, engine = asyncio.run(examined_endpoint(choice))
    if as_json:
        print(json.dumps(report_object(report, engine)))
    else:
        show_report(report, engine, Console())
    return EXIT_CHANGED if report.accused else 0


async def examined_endpoint(choice: VerifyOptions) -> tuple[ExaminationReport, ExaminedEngine]:
    """The report on the endpoint, and how it was asked; a bar on stderr shows how far it is."""
    options = {"model": choice.model, "api_key": choice.api_key}
    async with open_endpoint(choice.url, door=choice.door, **options) as (client, card):
        plan = await _offered_plan(client, choice.plan)
        material = Material(Random(choice.seed), choice.max_tokens, choice.num_fillers)
        cold = await cold_source(choice.cold, client, material, card)
        engine = ExaminedEngine(client, cold, card.owner, has_key=bool(choice.api_key))
        examination = Examination(client, material, cold, plan=plan)
        with _bar(plan.max_requests) as progress:
            try:
                return await examination.run(progress), engine
            except asyncio.CancelledError:
                # Ctrl-C: what was seen so far counts, as the bet may be looked at at any time.
                return examination.report(), engine


async def _offered_plan(client: EndpointClient, plan: ExaminationPlan) -> ExaminationPlan:
    """The plan with log probabilities, if the endpoint gives any. Raises ConfigError if it does not
    answer at all."""
    fields = logprob_fields(client.door)
    try:
        if (await client.ask(TRIAL.with_fields(fields))).tokens:
            return _plan(plan, has_logprobs=True, client=client)
    except EndpointRefusal as error:
        if not error.status:
            raise ConfigError(str(error)) from None
    try:
        await client.ask(TRIAL)
    except EndpointRefusal as error:
        other = next(door for door in EndpointDoor if door is not client.door)
        raise ConfigError(f"{client.place}: {error}; is it --door {other.name.lower()}?") from None
    return _plan(plan, has_logprobs=False, client=client)


def _plan(plan: ExaminationPlan, *, has_logprobs: bool, client: EndpointClient) -> ExaminationPlan:
    fields = logprob_fields(client.door) if has_logprobs else {}
    return ExaminationPlan(plan.max_requests, plan.rate, plan.least_rounding, has_logprobs, fields)


@contextmanager
def _bar(total: int) -> Iterator[Progressed]:
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Progressed(progress, progress.add_task("", total=total))


@dataclass(frozen=True, slots=True)
class Progressed:
    """Moves the bar to a number of requests."""

    progress: Progress
    task: TaskID

    def __call__(self, num_requests: int) -> None:
        self.progress.update(self.task, completed=num_requests)
