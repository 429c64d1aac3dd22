"""The report of a what-if: lines of at most 80 columns, and one object for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from ferryman_simulator.what_if.figures import Calibration, Figures
from ferryman_simulator.what_if.search import Changes, SearchResult, Trial
from ferryman_simulator.what_if.setting_words import spelled
from ferryman_simulator.what_if.tunable import UNKNOWN, SettingChange

WIDTH = 80
MAX_SHOWN = 8
NAMES = 38


@dataclass(frozen=True, slots=True)
class WhatIfReport:
    """A simulated log, how well it was met, and the figures with other settings.

    `span_seconds` is the log's length, `num_left_out` counts requests that did not end well or are
    of earlier processes.
    """

    num_requests: int
    num_left_out: int
    prompt_tokens: int
    span_seconds: float
    num_nodes: int
    calibration: Calibration
    search: SearchResult
    warnings: tuple[str, ...] = ()


def report_lines(report: WhatIfReport) -> Iterator[str]:
    """For people."""
    calibration = report.calibration
    yield from _wrapped(
        f"{report.num_requests:,} requests of {_span(report.span_seconds)} "
        f"({report.prompt_tokens:,} prompt tokens); the later {calibration.num_judged:,} are "
        f"judged, the others warm the caches"
    )
    if report.num_left_out:
        yield from _wrapped(f"left out: {report.num_left_out:,} (unfinished, failed, or before)")
    yield ""
    yield from _calibration_lines(calibration)
    yield ""
    yield from _gain_lines(report)
    yield from _other_lines(report)


def _calibration_lines(calibration: Calibration) -> Iterator[str]:
    measured, simulated = calibration.measured, calibration.simulated
    yield f"{'as the cluster is set now':<28}{'measured':>12}{'simulated':>12}"
    yield f"{'  prompt tokens reused':<28}{measured.reused:>12.1%}{simulated.reused:>12.1%}"
    for tier in measured.shares:
        share, simulated_share = measured.shares[tier], simulated.shares.get(tier, 0.0)
        if share or simulated_share:
            yield f"{f'    from {tier}':<28}{share:>12.1%}{simulated_share:>12.1%}"
    for name in ("p50", "p90"):
        mine, theirs = (_time(getattr(figures, name)) for figures in (measured, simulated))
        yield f"{f'  first token, {name}':<28}{mine:>12}{theirs:>12}"
    extra = f"{calibration.extra_seconds * 1000:+,.0f} ms"
    yield from _wrapped(f"{extra} of each first token is fitted on the earlier requests")
    if calibration.is_trusted:
        yield "the two agree within the bounds"
    else:
        yield "DO NOT TRUST what follows: measured and simulated differ too much"
        for doubt in calibration.doubts:
            yield from _wrapped(doubt, "  ")
    for cause in calibration.causes:
        yield from _wrapped(f"note: {cause}")


def _gain_lines(report: WhatIfReport) -> Iterator[str]:
    before, gains = report.calibration.simulated, report.search.gains
    if not gains:
        yield "no change that was tried gains anything"
        return
    yield f"{'change':<{NAMES}}{'reused':>14}{'first p50':>14}{'p90':>14}"
    yield _row("(as it is)", f"{before.reused:.1%}", before)
    for trial in gains[:MAX_SHOWN]:
        yield from _trial_lines(trial, before, report.num_nodes)
    if len(gains) > MAX_SHOWN:
        yield f"and {len(gains) - MAX_SHOWN} more that gain less (--json)"


def _trial_lines(trial: Trial, before: Figures, num_nodes: int) -> Iterator[str]:
    figures, first, *others = trial.figures, *map(_change, trial.changes)
    names = [first, *(f"+ {other}" for other in others)]
    for name in names[:-1]:
        yield name[: WIDTH - 1]
    last = names[-1]
    if len(last) >= NAMES:
        yield last[: WIDTH - 1]
        last = ""
    yield _row(last, f"{figures.reused:.1%} {figures.reused - before.reused:+.1%}", figures)
    for changed in trial.changes:
        yield from _setting_lines(changed, num_nodes)


def _row(name: str, reused: str, figures: Figures) -> str:
    return f"{name:<{NAMES}}{reused:>14}{_time(figures.p50):>14}{_time(figures.p90):>14}"


def _setting_lines(change: SettingChange, num_nodes: int) -> Iterator[str]:
    words = spelled(change, num_nodes)
    ways = [f"up {words.flag}"] if words.flag else []
    ways.append(words.variable)
    ways += [f"chart {path}" for path in words.chart]
    line = "   "
    for way in ways:
        if len(line) + len(way) >= WIDTH:
            yield line
            line = "   "
        line += f" {way} ·"
    yield line.removesuffix(" ·")


def _other_lines(report: WhatIfReport) -> Iterator[str]:
    search = report.search
    if search.without_gain:
        names = ", ".join(_joined(trial.changes) for trial in search.without_gain)
        yield ""
        yield from _wrapped(f"no gain: {names}")
    for changes, why in search.impossible:
        yield from _wrapped(f"not possible: {_joined(changes)}: {' '.join(why.split())}")
    if search.untried:
        names = ", ".join(map(_joined, search.untried))
        yield from _wrapped(f"not tried, for --seconds were over: {names}")
    for warning in report.warnings:
        yield from _wrapped(f"note: {warning}")
    yield from _wrapped(f"not simulated: {', '.join(UNKNOWN)}")


def as_object(report: WhatIfReport) -> dict[str, object]:
    """For programs."""
    search, nodes = report.search, report.num_nodes
    return {
        "requests": report.num_requests,
        "left_out": report.num_left_out,
        "prompt_tokens": report.prompt_tokens,
        "span_seconds": report.span_seconds,
        **_calibration_object(report.calibration),
        "gains": [_trial_object(trial, nodes) for trial in search.gains],
        "without_gain": [_trial_object(trial, nodes) for trial in search.without_gain],
        "impossible": [
            {"changes": [change.name for change in changes], "reason": why}
            for changes, why in search.impossible
        ],
        "untried": [[change.name for change in changes] for changes in search.untried],
        "not_simulated": dict(UNKNOWN),
        "warnings": list(report.warnings),
    }


def _calibration_object(calibration: Calibration) -> dict[str, object]:
    return {
        "judged": calibration.num_judged,
        "is_trusted": calibration.is_trusted,
        "doubts": list(calibration.doubts),
        "causes": list(calibration.causes),
        "extra_seconds": calibration.extra_seconds,
        "measured": _figures_object(calibration.measured),
        "simulated": _figures_object(calibration.simulated),
    }


def _trial_object(trial: Trial, num_nodes: int) -> dict[str, object]:
    changes = [
        {
            "setting": change.name,
            "before": change.before,
            "after": change.text,
            **asdict(spelled(change, num_nodes)),
        }
        for change in trial.changes
    ]
    return {"changes": changes, **_figures_object(trial.figures)}


def _figures_object(figures: Figures) -> dict[str, object]:
    return {
        "reused": figures.reused,
        "shares": dict(figures.shares),
        "ttft_p50_seconds": figures.p50,
        "ttft_p90_seconds": figures.p90,
    }


def _joined(changes: Changes) -> str:
    return " + ".join(_change(change) for change in changes)


def _change(change: SettingChange) -> str:
    return f"{change.name} {change.before} → {change.text}"


def _wrapped(text: str, indent: str = "") -> Sequence[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _span(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
