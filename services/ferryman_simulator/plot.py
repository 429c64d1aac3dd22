"""A sweep as a picture: the hit rate by tier of every combination, and the predicted TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError
from ferryman_simulator.report import shown
from ferryman_simulator.sweep import SweepRun

COLOURS = {"device": "#1b6ca8", "host": "#3fa796", "storage": "#f2b134", "peer": "#9b5de5"}
_BAR_INCHES, _LEAST_INCHES, _HEIGHT_INCHES, _DPI = 0.55, 6.0, 6.5, 130
# With more bars than this their names are turned sideways.
_MANY = 6


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
