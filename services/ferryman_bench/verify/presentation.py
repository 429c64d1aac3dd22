"""An examination's report: a table with a sentence for people, an object for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ferryman_bench.endpoint.client import EndpointClient
from ferryman_bench.endpoint.inquiry import curl_command
from ferryman_bench.verify.cold_source import ColdSource
from ferryman_bench.verify.examination import ExaminationReport
from ferryman_bench.verify.way_record import WayProbe, WayRecord, WayResult

API_KEY_HEADER = "authorization: Bearer $OPENAI_API_KEY"
LEGEND = (
    "hits: warm answers with cached tokens; differ: warm answers unlike all cold ones; "
    "nats, cold: largest differences, warm from cold and among cold; "
    "odd: the warm answer was the odd one, of all odd ones."
)


@dataclass(frozen=True, slots=True)
class ExaminedEngine:
    """The engine of a report, and how it was asked. `has_key`: requests need an API key."""

    client: EndpointClient
    cold: ColdSource
    owner: str
    has_key: bool = False

    def commands(self, probe: WayProbe, fields: Mapping[str, Any]) -> tuple[str, str]:
        """Two commands for a shell: the question cold, and the same in its way.

        Salts are new, so that both begin as the probe did.
        """
        cold = self._command(probe, len(probe.sent) - 1, {**fields, **self.cold.cold_fields()})
        warm_fields, parts = {**fields, **self.cold.warm_fields()}, list[str]()
        for place, sent in enumerate(probe.sent[:-1]):
            command = self._command(probe, place, warm_fields)
            parts.append(f"{command} > /dev/null {'&' if sent.is_beside else ';'}")
        parts.append(self._command(probe, len(probe.sent) - 1, warm_fields))
        return cold, " ".join(parts)

    def _command(self, probe: WayProbe, place: int, fields: Mapping[str, Any]) -> str:
        sent = probe.sent[place]
        body = self.client.body(sent.inquiry.with_fields(fields), sent.delivery)
        headers = [API_KEY_HEADER] if self.has_key else []
        return curl_command(self.client.place, body, headers)


def summary(report: ExaminationReport) -> str:
    """The finding in a sentence."""
    results = {report.result(record) for record in report.records} - {WayResult.UNTRIED}
    probes = sum(record.probes for record in report.records)
    if accused := report.accused:
        names = ", ".join(record.name for record in accused)
        return f"Reuse changes answers: {names}. A sound engine is accused in 1 run of " + (
            f"{round(1 / report.plan.rate):,}."
        )
    if not results:
        return "No way was tried: give more --requests."
    if results == {WayResult.BITS}:
        if report.plan.has_logprobs:
            return f"bits: {probes} of {probes} answers equal to the last digit, cold and warm."
        return f"The same text in {probes} of {probes} answers; this server tells no probabilities."
    if WayResult.NOISE not in results:
        return (
            f"No wrong state seen: differences of at most {report.floor:.3g} nats, as rounding has."
        )
    return "No wrong state seen: cold answers differ from each other as much as warm ones do."


def remarks(report: ExaminationReport) -> list[str]:
    """Further sentences: what limits the finding."""
    lines = []
    tried = [record for record in report.records if record.probes]
    if tried and not any(record.num_reusing for record in tried):
        lines.append("The server reports no cached tokens: it may reuse nothing, or not tell.")
    if drafting := sum(record.num_drafting for record in tried):
        lines.append(f"{drafting} warm answers had accepted drafts in them.")
    noise = max((record.largest_cold_nats for record in tried), default=0.0)
    if noise > 0:
        lines.append(f"Cold answers to one question differ by up to {_shown(noise)} nats.")
    if not report.plan.has_logprobs:
        lines.append("Without log probabilities only frequent changes can be told from rounding.")
    return lines


def show_report(report: ExaminationReport, engine: ExaminedEngine, console: Console) -> None:
    """Prints the table, the finding, and for each accused way two commands that show it."""
    console.print(f"{engine.client.place}, {engine.client.model}", highlight=False)
    console.print(f"cold by {engine.cold.meaning}", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in ("probes", "hits", "differ", "nats", "cold", "odd"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for record in report.records:
        table.add_row(record.name, *_cells(record), str(report.result(record)))
    console.print(table)
    console.print(LEGEND, highlight=False)
    console.print(f"{summary(report)} {report.num_requests:,} requests.", highlight=False)
    for line in remarks(report):
        console.print(line, highlight=False)
    for record in report.accused:
        _show_commands(record, report, engine, console)


def _show_commands(
    record: WayRecord, report: ExaminationReport, engine: ExaminedEngine, console: Console
) -> None:
    assert record.worst is not None, "an accused way has an odd warm answer"
    cold, warm = engine.commands(record.worst, report.plan.fields)
    console.print(f"\n{record.name}: cold, then warm (once; a second time all is warm)")
    for command in (cold, warm):
        console.print(command, highlight=False, markup=False, soft_wrap=True)


def _cells(record: WayRecord) -> Sequence[str]:
    return (
        str(record.probes),
        str(record.num_reusing),
        str(record.num_different),
        _shown(record.largest_nats),
        _shown(record.largest_cold_nats),
        f"{record.wager.wins}/{record.wager.counted}",
    )


def _shown(nats: float) -> str:
    return "words" if math.isinf(nats) else f"{nats:.3g}"


def report_object(report: ExaminationReport, engine: ExaminedEngine) -> dict[str, Any]:
    """The report as JSON has it; null stands for a difference that has no size."""
    return {
        "url": engine.client.place,
        "model": engine.client.model,
        "owner": engine.owner,
        "cold": engine.cold.meaning,
        "requests": report.num_requests,
        "logprobs": report.plan.has_logprobs,
        "false_accusation_rate": report.plan.rate,
        "rounding_nats": report.floor,
        "summary": summary(report),
        "remarks": remarks(report),
        "ways": [_way_object(record, report, engine) for record in report.records],
    }


def _way_object(
    record: WayRecord, report: ExaminationReport, engine: ExaminedEngine
) -> dict[str, Any]:
    result = report.result(record)
    listed: dict[str, Any] = {
        "way": record.name,
        "result": result,
        "probes": record.probes,
        "reusing": record.num_reusing,
        "different": record.num_different,
        "largest_nats": _number(record.largest_nats),
        "largest_cold_nats": _number(record.largest_cold_nats),
        "odd_warm": record.wager.wins,
        "odd": record.wager.counted,
        "log_capital": record.wager.log_capital,
    }
    if result is WayResult.CHANGED and record.worst is not None:
        cold, warm = engine.commands(record.worst, report.plan.fields)
        listed |= {"cold_command": cold, "warm_command": warm}
    return listed


def _number(nats: float) -> float | None:
    return nats if math.isfinite(nats) else None
