"""What was measured, as a table for people or one line of JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from ferryman_cli.bench.timing import Timing


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside what it is held against. Ratios are in our favour where they are above 1.

    `median` and `best` are of the same runs; a busy machine drives them apart. `ratio` is that of
    the best runs, `cpu_ratio` that of the processor time in the median run.
    """

    name: str
    unit: str
    median: float
    best: float
    against: str
    against_median: float | None
    against_best: float | None
    ratio: float | None
    cpu_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the figures were taken. `load` is the number of processes that wanted to run."""

    processor: str
    cores: int
    load: float


def this_machine() -> Machine:
    return Machine(platform.machine(), os.cpu_count() or 1, round(os.getloadavg()[0], 1))


def compared(name: str, unit: str, amount: float, peer: str, found: Mapping[str, Timing]) -> Row:
    """The rates at which `amount` went by; `found` has the timings of "ours" and of the peer."""
    ours, theirs = found["ours"], found[peer]
    return Row(
        name,
        unit,
        amount / ours.median,
        amount / ours.least,
        peer,
        amount / theirs.median,
        amount / theirs.least,
        ratio=theirs.least / ours.least,
        cpu_ratio=theirs.cpu / max(ours.cpu, 1e-9),
    )


def aimed(name: str, unit: str, ours: tuple[float, float], aim: float | None) -> Row:
    """A time, (median, least), beside the most that it should be."""
    ratio = None if aim is None else aim / ours[0]
    against = "" if aim is None else "aim"
    return Row(name, unit, *ours, against, aim, aim, ratio)


def show(title: str, rows: Iterable[Row], *, as_json: bool) -> None:
    machine, listed = this_machine(), list(rows)
    if as_json:
        said = {"title": title, "machine": asdict(machine), "rows": [asdict(r) for r in listed]}
        print(json.dumps(said))
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("", "median (best)", "against", "ratio", "of CPU time"):
        table.add_column(column, justify="right" if column else "left")
    for row in listed:
        ours = f"{_pair(row.median, row.best)} {row.unit}"
        table.add_row(row.name, ours, _against(row), _figure(row.ratio), _figure(row.cpu_ratio))
    console = Console()
    console.print(table)
    console.print(f"{machine.processor}, {machine.cores} cores, load {machine.load}")


def _against(row: Row) -> str:
    if row.against_median is None or row.against_best is None:
        return row.against
    return f"{row.against} {_pair(row.against_median, row.against_best)}"


def _pair(median: float, best: float) -> str:
    """An aim has no best that differs."""
    return _figure(median) if median == best else f"{_figure(median)} ({_figure(best)})"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
