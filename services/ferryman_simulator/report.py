"""The results of a simulation: tables for people, JSON for programs, and a sweep as a picture.

A picture has the hit rate by tier of every combination, and the predicted TTFT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ferryman.errors import ConfigError
from ferryman.settings.declaration import size_text
from ferryman_simulator.result import Result
from ferryman_simulator.sweep import SweepRun, Value
from ferryman_simulator.trace import Trace

SWEPT_TIERS = ("device", "host", "storage", "computed")
COLOURS = {"device": "#1b6ca8", "host": "#3fa796", "storage": "#f2b134", "peer": "#9b5de5"}
_BAR_INCHES, _LEAST_INCHES, _HEIGHT_INCHES, _DPI = 0.55, 6.0, 6.5, 130
# With more bars than this their names are turned sideways.
_MANY = 6


def as_object(trace: Trace, runs: Sequence[SweepRun]) -> dict[str, object]:
    """All results as one object."""
    return {
        "requests": len(trace.requests),
        "left_out": trace.num_left_out,
        "runs": [
            {
                "varied": dict(run.varied),
                "warnings": run.warnings,
                "hit_rate": run.result.hit_rate,
                "shares": run.result.shares,
                **_without_outcomes(run.result),
            }
            for run in runs
        ],
    }


def _without_outcomes(result: Result) -> dict[str, object]:
    """All that is the same size for any trace."""
    return {name: value for name, value in asdict(result).items() if name != "outcomes"}


def print_json(trace: Trace, runs: Sequence[SweepRun]) -> None:
    print(json.dumps(as_object(trace, runs)))


def print_tables(console: Console, trace: Trace, runs: Sequence[SweepRun]) -> None:
    if len(runs) == 1 and not runs[0].varied:
        print_result(console, runs[0].result)
    else:
        console.print(sweep_table(runs))
    for warning in dict.fromkeys(warning for run in runs for warning in run.warnings):
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    refused = max(run.result.num_refused for run in runs)
    if refused:
        console.print(f"{refused} requests are longer than the pools or the model; left out")
    if trace.num_left_out:
        console.print(f"{trace.num_left_out} requests did not end well in the log; left out")


def print_result(console: Console, result: Result) -> None:
    """One run: the sources of prompt tokens, the reasons for computing the others, and the rest."""
    table = Table(title="Prompt tokens", title_justify="left", box=None, pad_edge=False)
    for name in ("from", "tokens", "share"):
        table.add_column(name, justify="left" if name == "from" else "right")
    for tier, count in result.tokens.items():
        table.add_row(tier, f"{count:,}", f"{result.shares[tier]:.1%}")
    for reason, count in sorted(result.reasons.items(), key=lambda item: -item[1]):
        share = count / max(1, result.prompt_tokens)
        table.add_row(f"  {reason}", f"{count:,}", f"{share:.1%}")
    console.print(table)
    for line in _lines(result):
        console.print(line, highlight=False)


def _lines(result: Result) -> list[str]:
    times = " ".join(f"{name} {_time(value)}" for name, value in result.ttft_seconds.items())
    evicted = "; ".join(f"{who} {_counts(kinds)}" for who, kinds in result.evicted.items())
    return [
        f"hit rate {result.hit_rate:.1%} of {result.prompt_tokens:,} prompt tokens in "
        f"{result.num_requests - result.num_refused:,} requests; predicted TTFT {times}",
        f"snapshots kept: {_counts(result.snapshots)}",
        f"units evicted: {evicted}",
        f"truncated prefetches {result.num_truncated}, retracted {result.num_retracted}, "
        f"turned away by decode {result.num_turned_away}, {result.seconds:,.0f} s simulated",
    ]


def sweep_table(runs: Sequence[SweepRun]) -> Table:
    """One row for each combination."""
    title = "prompt tokens by tier in %, snapshots kept, predicted TTFT in ms"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in (*runs[0].varied, "hits", *SWEPT_TIERS, "states", "p50", "p90", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        result = run.result
        shares = [f"{100 * result.shares.get(tier, 0.0):.1f}" for tier in SWEPT_TIERS]
        times = [f"{value * 1000:,.0f}" for value in result.ttft_seconds.values()]
        varied = [shown(name, value) for name, value in run.varied.items()]
        kept = str(sum(result.snapshots.values()))
        table.add_row(*varied, f"{100 * result.hit_rate:.1f}", *shares, kept, *times)
    return table


def shown(name: str, value: Value) -> str:
    """A varied value in the form it was given."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if name in ("host-memory", "storage-bytes"):
        return size_text(value)
    return str(value)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


# A picture.


def write_plot(path: Path, runs: Sequence[SweepRun]) -> None:
    """Writes a PNG. Raises ConfigError without matplotlib, or where `path` cannot be written."""
    width = max(_LEAST_INCHES, _BAR_INCHES * len(runs) + 2)
    figure, (shares, times) = load_pyplot().subplots(
        2, 1, sharex=True, figsize=(width, _HEIGHT_INCHES), height_ratios=(3, 2)
    )
    _draw_shares(shares, runs)
    _draw_times(times, runs)
    labels = [_label(run, len(runs)) for run in runs]
    times.set_xticks(range(len(runs)), labels, rotation=90 if len(runs) > _MANY else 0)
    times.set_xlabel(" × ".join(runs[0].varied) or "one run")
    figure.tight_layout()
    save_figure(path, figure, "png")


def save_figure(path: Path, figure: Any, picture_format: str) -> None:
    """Writes and closes a figure. Raises ConfigError where `path` cannot be written."""
    try:
        figure.savefig(path, dpi=_DPI, format=picture_format)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from None
    finally:
        load_pyplot().close(figure)


def check_plot(path: Path) -> None:
    """Raises ConfigError for a plot that could not be drawn or written."""
    load_pyplot()
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no such folder")


def load_pyplot() -> Any:
    """matplotlib, drawing without a screen. Raises ConfigError if it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib; install it with pip install 'ferryman[plot]'"
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw_shares(axes: Any, runs: Sequence[SweepRun]) -> None:
    floor = [0.0] * len(runs)
    for tier, colour in COLOURS.items():
        heights = [100 * run.result.shares.get(tier, 0.0) for run in runs]
        if any(heights):
            axes.bar(range(len(runs)), heights, bottom=floor, color=colour, label=tier)
        floor = [below + height for below, height in zip(floor, heights, strict=True)]
    for place, top in enumerate(floor):
        axes.text(place, top + 1, f"{top:.0f}", ha="center", fontsize=8)
    axes.set_ylabel("prompt tokens not computed, %")
    axes.set_ylim(0, 110)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_times(axes: Any, runs: Sequence[SweepRun]) -> None:
    for name, marker in (("p50", "o"), ("p90", "s"), ("p99", "^")):
        values = [run.result.ttft_seconds[name] for run in runs]
        axes.plot(range(len(runs)), values, marker, linestyle="none", label=name)
    axes.set_ylabel("predicted TTFT, s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _label(run: SweepRun, num_runs: int) -> str:
    separator = " " if num_runs > _MANY else "\n"
    return separator.join(shown(name, value) for name, value in run.varied.items())
