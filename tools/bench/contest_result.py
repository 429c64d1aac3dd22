"""The outcome of a contest: one table of figures and ratios, JSON, and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from tools.bench.contender import BenchCell

from ferryman_bench.hardware import Machine, machine_json, machine_now
from ferryman_bench.report import figure, titled_table


@dataclass(frozen=True, slots=True)
class CellTimes:
    """Seconds of a run in each round, and the median of processor seconds over all threads."""

    rounds: tuple[float, ...]
    cpu: float


@dataclass(frozen=True, slots=True)
class CellResult:
    """The times of every contender in one cell; the first is ours."""

    cell: BenchCell
    times: Mapping[str, CellTimes]

    def rate(self, name: str) -> float:
        """Tokens per second, the median over the rounds."""
        return self.cell.tokens_per_run / median(self.times[name].rounds)

    def ratio(self, peer: str) -> float:
        """Our speed as a multiple of the peer's: the median over the rounds of theirs by ours."""
        ours = next(iter(self.times.values())).rounds
        theirs = self.times[peer].rounds
        return median(b / a for a, b in zip(ours, theirs, strict=True))

    def cpu_ratio(self, peer: str) -> float:
        """As `ratio`, by processor time: load hardly changes it where each side has one thread.
        Threads that wait for each other spin, and their time counts too."""
        ours = next(iter(self.times.values()))
        return self.times[peer].cpu / max(ours.cpu, 1e-9)

    def to_json(self) -> dict[str, Any]:
        ours, *peers = self.times
        return {
            "name": self.cell.name,
            "kind": self.cell.kind,
            "requests": self.cell.requests,
            "tokens": self.cell.tokens,
            "unit": "tok/s",
            "median": self.rate(ours),
            "rates": {name: self.rate(name) for name in self.times},
            "ratios": {name: self.ratio(name) for name in peers},
            "cpu_ratios": {name: self.cpu_ratio(name) for name in peers},
            "cpu_seconds": {name: times.cpu for name, times in self.times.items()},
            "rounds": {name: times.rounds for name, times in self.times.items()},
        }


@dataclass(frozen=True, slots=True)
class ContestResult:
    """All cells of one run. `difference` is the largest of a peer's logits from ours, as a share of
    their size.

    `contenders` begins with ours.
    """

    title: str
    contenders: tuple[str, ...]
    difference: float
    results: tuple[CellResult, ...]

    def to_json(self, machine: Machine) -> dict[str, Any]:
        return {
            "title": self.title,
            "machine": machine_json(machine),
            "logit_difference": self.difference,
            "rows": [result.to_json() for result in self.results],
        }


def show_comparison(result: ContestResult, notes: Iterable[str], console: Console) -> None:
    """The table: tokens per second of every contender, and our speed as a multiple of theirs, by
    the clock and by processor time."""
    ours, *peers = result.contenders
    table = titled_table(result.title)
    table.box, table.pad_edge, table.collapse_padding = box.SIMPLE_HEAD, False, True
    table.add_column("tok/s", no_wrap=True)
    for column in (ours, *(name for peer in peers for name in (peer, "ratio", "CPU"))):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in result.results:
        figures = [figure(cell.rate(ours))]
        for peer in peers:
            ratios = (cell.ratio(peer), cell.cpu_ratio(peer))
            figures += [figure(cell.rate(peer)), *(f"{ratio:.2f}" for ratio in ratios)]
        table.add_row(cell.cell.name, *figures)
    console.print(table)
    console.print(str(machine_now()))
    if peers:
        console.print(f"logits differ by at most {result.difference:.1g} of their size")
    for note in notes:
        console.print(note, markup=False)  # brackets are part of a command
