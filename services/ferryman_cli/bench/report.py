"""What was measured, as a table for people or one line of JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside what it is held against. `ratio` is in our favour where it is above 1.

    `median` and `best` are of the same runs; a busy machine drives them apart.
    """

    name: str
    unit: str
    median: float
    best: float
    against: str
    against_median: float | None
    against_best: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the figures were taken. `load` is the number of processes that wanted to run."""

    processor: str
    cores: int
    load: float


def this_machine() -> Machine:
    return Machine(platform.machine(), os.cpu_count() or 1, round(os.getloadavg()[0], 1))


def compared(
    name: str, unit: str, ours: tuple[float, float], peer: str, theirs: tuple[float, float]
) -> Row:
    """Two rates, each (median, best); the ratio is that of the best."""
    return Row(name, unit, *ours, peer, *theirs, ours[1] / theirs[1])


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
    for column in ("", "unit", "median", "best", "against", "median", "best", "ratio"):
        table.add_column(column, justify="left" if column in ("", "unit", "against") else "right")
    for row in listed:
        figures = [_figure(row.median), _figure(row.best)]
        others = [_figure(row.against_median), _figure(row.against_best), _figure(row.ratio)]
        table.add_row(row.name, row.unit, *figures, row.against, *others)
    console = Console()
    console.print(table)
    console.print(f"{machine.processor}, {machine.cores} cores, load {machine.load}")


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
