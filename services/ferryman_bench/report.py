"""Measurements as a table for people or one line of JSON for programs, and two of them compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ferryman.errors import ConfigError
from ferryman_bench.hardware import check_same_processor, machine_json, machine_now
from ferryman_bench.serve.turn_record import ratio_interval
from ferryman_bench.timer import Timing


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One figure beside the one it is comparison_row with. A ratio above 1 is in our favour.

    `median` and `best` are of the same runs; a busy machine drives them apart. `ratio` compares the
    best runs, `cpu_ratio` the processor time of the median runs.
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


def comparison_row(
    name: str, unit: str, amount: float, peer: str, found: Mapping[str, Timing]
) -> ReportRow:
    """A row of rates for `amount` per run; `found` has the timings of "ours" and of the peer."""
    ours, theirs = found["ours"], found[peer]
    return ReportRow(
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


def target_row(name: str, unit: str, ours: tuple[float, float], aim: float | None) -> ReportRow:
    """A row of a time, (median, least), beside the longest that it should take."""
    ratio = None if aim is None else aim / ours[0]
    against = "" if aim is None else "aim"
    return ReportRow(name, unit, *ours, against, aim, aim, ratio)


def show(title: str, rows: Iterable[ReportRow], *, as_json: bool) -> None:
    """Prints the rows, and the machine that they are of."""
    listed = list(rows)
    if as_json:
        print_json(title, map(asdict, listed))
        return
    table = titled_table(title)
    with_cpu = any(row.cpu_ratio is not None for row in listed)
    # Figures stay whole; the name takes the width that is left, broken between its words.
    longest = max((len(word) for row in listed for word in row.name.split()), default=0)
    table.add_column("", min_width=longest)
    for column in ("median (best)", "against", "ratio", *(["CPU"] if with_cpu else [])):
        table.add_column(column, justify="right", no_wrap=True)
    for row in listed:
        ours = f"{_pair(row.median, row.best)} {row.unit}"
        ratios = [figure(row.ratio), *([figure(row.cpu_ratio)] if with_cpu else [])]
        table.add_row(row.name, ours, _reference(row), *ratios)
    console = Console()
    console.print(table)
    console.print(str(machine_now()))


def titled_table(title: str) -> Table:
    """A table without columns, in the form that all benches have."""
    return Table(title=title, title_justify="left", title_style="bold")


def print_json(title: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints one object, as `ferryman bench compare` reads it."""
    machine = machine_json(machine_now())
    print(json.dumps({"title": title, "machine": machine, "rows": list(rows)}))


def _reference(row: ReportRow) -> str:
    if row.against_median is None or row.against_best is None:
        return row.against
    return f"{row.against} {_pair(row.against_median, row.against_best)}"


def _pair(median: float, best: float) -> str:
    """Both figures, or one if they are equal, as for an aim."""
    return figure(median) if median == best else f"{figure(median)} ({figure(best)})"


def figure(value: float | None) -> str:
    """Three digits, or whole thousands with commas; "" for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def run_bench_compare(old: Path, new: Path, *, as_json: bool) -> int:
    """Prints, for each row that both files have, the new figure as a multiple of the old one.

    Raises ConfigError for files of two processors or two benches, and for those that no bench
    wrote. Rows with samples have a bootstrap interval of 95 % of the ratio.
    """
    before, after = _read(old), _read(new)
    check_same_processor(before["machine"], after["machine"])
    if before["title"] != after["title"]:
        raise ConfigError(f"the runs are of two benches: {before['title']!r}, {after['title']!r}")
    olds = {row["name"]: row["median"] for row in before["rows"]}
    rows = [(row, olds[row["name"]]) for row in after["rows"] if olds.get(row["name"])]
    intervals = _intervals(before["rows"], after["rows"])
    if as_json:
        ratios = {row["name"]: row["median"] / earlier for row, earlier in rows}
        result = {"machine": after["machine"], "new_by_old": ratios, "intervals": intervals}
        print(json.dumps(result))
        return 0
    table = titled_table(after["title"])
    for column in ("", "old", "new", "new / old"):
        table.add_column(column, justify="right" if column else "left")
    for row, earlier in rows:
        figures = (figure(earlier), f"{figure(row['median'])} {row['unit']}")
        ratio = f"{row['median'] / earlier:.2f}"
        if row["name"] in intervals:
            _, low, high = intervals[row["name"]]
            ratio += f" ({low:.2f} to {high:.2f})"
        table.add_row(row["name"], *figures, ratio)
    Console().print(table)
    return 0


def _intervals(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]
) -> dict[str, tuple[float, float, float]]:
    """The interval of each row that has samples in both runs."""
    olds = {row["name"]: row["samples"] for row in before if row.get("samples")}
    return {
        row["name"]: ratio_interval(olds[row["name"]], row["samples"])
        for row in after
        if row["name"] in olds and row.get("samples")
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(result, dict) or not {"title", "machine", "rows"} <= result.keys():
        raise ConfigError(f"{file} has no result of a bench; make one with --json")
    return result
