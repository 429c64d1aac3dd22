"""`ferryman simulate`: reads or makes a trace, runs it, and says what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ferryman_cli.simulate.choices import Choices, make_setup
from ferryman_cli.simulate.costs import GUESSES
from ferryman_cli.simulate.generator import Habits, write_trace
from ferryman_cli.simulate.plot import check_plot, write_plot
from ferryman_cli.simulate.reading import Format, read_trace
from ferryman_cli.simulate.report import print_json, print_tables
from ferryman_cli.simulate.sweep import parse_axes, runs

# Of what is piped: nobody's terminal breaks it.
WIDE = 120


def run_generate(path: Path, habits: Habits, block_tokens: int, *, as_json: bool) -> int:
    count = write_trace(path, habits, block_tokens)
    if as_json:
        print(json.dumps({"trace": str(path), "requests": count, "block_tokens": block_tokens}))
    else:
        print(f"{count} requests in {path}; simulate it with --block-tokens {block_tokens}")
    return 0


def run_simulate(
    path: Path,
    form: Format,
    block_tokens: int,
    choices: Choices,
    *,
    costs: Mapping[str, float],
    sweep: Sequence[str],
    plot: Path | None,
    as_json: bool,
) -> int:
    """Mistakes are found before the first run, which may take its time.

    `costs` that were given go before what the trace says of time, and that before guesses.
    """
    make_setup(replace(choices, costs=replace(GUESSES, **costs)))
    axes = parse_axes(sweep)
    if plot is not None:
        check_plot(plot)
    page_size = choices.state.page_size
    trace = read_trace(path, form, block_tokens=block_tokens, page_size=page_size)
    choices = replace(choices, costs=replace(GUESSES.told_by(trace.pace), **costs))
    found = list(runs(choices, trace, axes))
    if plot is not None:
        write_plot(plot, found)
    if as_json:
        print_json(trace, found)
    else:
        width = None if sys.stdout.isatty() else WIDE
        print_tables(Console(width=width), trace, found)
    return 0
