"""The result of a run: what was sent to which server on which machine, and its records.

Its JSON has the form that `ferryman bench compare` reads, with the samples behind each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ferryman_bench.hardware import Machine, machine_json
from ferryman_bench.report import figure, titled_table
from ferryman_bench.serve.turn_record import (
    PERCENTS,
    LatencyLimits,
    LoadTotals,
    TurnRecord,
    percentiles_of,
    samples,
    totals,
)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`title` names the workload and the loop; `server` the model and the software where it is
    told; `date` is that of the start, in UTC."""

    title: str
    server: str
    date: str
    machine: Machine
    limits: LatencyLimits
    records: Sequence[TurnRecord]

    @property
    def totals(self) -> LoadTotals:
        return totals(self.records, self.limits)

    def rows(self) -> list[dict[str, Any]]:
        """The rows that two runs are compared by; those of times have the samples."""
        sums = self.totals
        rates = {
            "tokens": sums.tokens_per_second,
            "requests": sums.requests_per_second,
            "good requests": sums.good_per_second,
        }
        rows: list[dict[str, Any]] = [
            {"name": name, "unit": "a second", "median": value} for name, value in rates.items()
        ]
        for name, values in samples(self.records).items():
            percents = percentiles_of(values)
            listed = {f"p{percent}": percents[percent] for percent in PERCENTS}
            rows.append(
                {"name": name, "unit": "ms", "median": percents[50], **listed, "samples": values}
            )
        return rows

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "server": self.server,
            "date": self.date,
            "machine": machine_json(self.machine),
            "limits": asdict(self.limits),
            "totals": self.totals.to_json(),
            "rows": self.rows(),
            "turns": [asdict(record) for record in self.records],
        }


def result_table(result: LoadResult) -> Table:
    """Percentiles of each time, in milliseconds."""
    table = titled_table(result.title)
    for column in ("", "p50 ms", "p90", "p99"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, values in samples(result.records).items():
        percents = percentiles_of(values)
        table.add_row(name, *(figure(percents[percent]) for percent in PERCENTS))
    return table


def sentences(result: LoadResult) -> list[str]:
    """The totals in words."""
    sums, limits = result.totals, result.limits
    lines = [
        f"{result.server}; {result.date}",
        f"{sums.requests} requests in {figure(sums.seconds)} s, {sums.errors} failed; "
        f"{figure(sums.tokens_per_second)} tokens and {figure(sums.requests_per_second)} requests "
        "a second",
        f"good (first token within {figure(limits.first_seconds * 1e3)} ms, mean gap within "
        f"{figure(limits.gap_seconds * 1e3)} ms): {sums.good_share:.0%}, "
        f"{figure(sums.good_per_second)} a second",
    ]
    if sums.cached_share is not None:
        lines.append(f"prompt tokens from the cache: {sums.cached_share:.1%}")
    if sums.right_share is not None:
        lines.append(f"right answers: {sums.right_share:.1%}")
    if errors := sorted({record.error for record in result.records if record.error}):
        lines.append(f"an error: {errors[0]}")
    return [*lines, str(result.machine)]


def show_result(result: LoadResult, console: Console) -> None:
    console.print(result_table(result))
    for line in sentences(result):
        console.print(line, highlight=False, markup=False)
