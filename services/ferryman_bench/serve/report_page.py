"""A run as one HTML page that loads nothing: totals, percentiles, and plots as SVG within it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError
from ferryman_bench.report import figure
from ferryman_bench.serve.load_result import LoadResult, sentences
from ferryman_bench.serve.turn_record import PERCENTS, TurnRecord, percentiles_of, samples
from ferryman_simulator.report import COLOURS, load_pyplot

_WIDTH_INCHES, _HEIGHT_INCHES = 8.0, 3.0
_BAR = 0.8
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid #8884; }
svg { max-width: 100%; height: auto; background: #fff; border-radius: .3rem; }
:root { color-scheme: light dark; }
"""


def write_page(path: Path, result: LoadResult) -> None:
    """Writes the page. Raises ConfigError without matplotlib, or where `path` is not writable."""
    text = page_of(result)
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror or error}") from None


def page_of(result: LoadResult) -> str:
    """The whole page."""
    lines = "".join(f"<p>{escape(line)}</p>" for line in sentences(result))
    plots = "".join(f"<h2>{escape(name)}</h2>{svg}" for name, svg in _plots(result.records).items())
    title = escape(result.title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>{lines}"
        f"{_table(samples(result.records))}{plots}</body></html>"
    )


def _table(groups: Mapping[str, Sequence[float]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("", *(f"p{part} ms" for part in PERCENTS)))
    rows = ""
    for name, values in groups.items():
        cells = (figure(value) for value in percentiles_of(values).values())
        rows += f"<tr><td>{escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return f"<table><tr>{head}</tr>{rows}</table>"


def _plots(records: Sequence[TurnRecord]) -> dict[str, str]:
    """Plots by their headings."""
    groups = samples(records)
    if not groups:
        return {}
    first = {name: values for name, values in groups.items() if name.startswith("first")}
    gaps = {name: values for name, values in groups.items() if name == "between tokens"}
    return {
        "First token: share of answers within": _drawn(_draw_shares, first),
        "Between tokens: share of gaps within": _drawn(_draw_shares, gaps or first),
        "Requests: waiting for the first token, then answered": _drawn(_draw_spans, records),
    }


def _drawn(draw: Any, subject: Any) -> str:
    """The SVG element that `draw` makes on a pair of axes."""
    pyplot = load_pyplot()
    drawing, axes = pyplot.subplots(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES))
    draw(axes, subject)
    drawing.tight_layout()
    text = StringIO()
    drawing.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(drawing)
    svg = text.getvalue()
    # An element within a page has no declaration and no document type.
    return svg[svg.index("<svg") :]


def _draw_shares(axes: Any, groups: Mapping[str, Sequence[float]]) -> None:
    """The distribution of each group, in milliseconds on a logarithmic scale."""
    for (name, values), colour in zip(groups.items(), COLOURS.values(), strict=False):
        ordered = sorted(max(1e-3, value) for value in values)
        shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=name, color=colour)
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False)


def _draw_spans(axes: Any, records: Sequence[TurnRecord]) -> None:
    """One bar a request, in the order of sending."""
    waiting, answered, *_ = COLOURS.values()
    for row, record in enumerate(sorted(records, key=lambda record: record.sent)):
        first = record.sent + record.first_seconds
        axes.barh(row, record.first_seconds, _BAR, left=record.sent, color=waiting)
        axes.barh(row, record.ended - first, _BAR, left=first, color=answered)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_ylabel("request")
