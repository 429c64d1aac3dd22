"""`ferryman simulate`: reads or makes a trace, runs it, and prints the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from ferryman_simulator.generator import Habits, write_trace
from ferryman_simulator.lifecycle import read_lifecycle
from ferryman_simulator.modelled_time import GUESSES
from ferryman_simulator.mooncake import read_mooncake
from ferryman_simulator.options import Format, SimulateOptions
from ferryman_simulator.report import check_plot, print_json, print_tables, write_plot
from ferryman_simulator.setup import make_setup
from ferryman_simulator.sweep import parse_axes, runs
from ferryman_simulator.trace import MAX_LINE_BYTES, BadTrace, Trace

Line = tuple[int, str]


def read_trace(path: Path, form: Format, *, block_tokens: int, page_size: int) -> Trace:
    """The trace in `path`. Raises BadTrace, with file and line, if it cannot be read.

    `block_tokens` is the length of a block in a Mooncake trace, `page_size` that of the cluster
    that wrote a lifecycle log.
    """
    try:
        with path.open("rb") as opened:
            lines = trace_lines(path, opened)
            first = next(lines, None)
            if first is None:
                raise BadTrace(path, 1, "there is no request in it")
            if form is Format.AUTO:
                form = _format_of(path, first)
            every = chain([first], lines)
            if form is Format.MOONCAKE:
                return read_mooncake(path, every, block_tokens)
            return read_lifecycle(path, every, page_size)
    except OSError as error:
        raise BadTrace(path, 0, error.strerror or str(error)) from None


def trace_lines(path: Path, opened: Iterator[bytes]) -> Iterator[Line]:
    """Lines that are not blank. `opened` is a file, which yields bytes line by line."""
    for number, raw in enumerate(opened, 1):
        if len(raw) > MAX_LINE_BYTES:
            raise BadTrace(path, number, f"a line has at most {MAX_LINE_BYTES} bytes")
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError:
            raise BadTrace(path, number, "no UTF-8") from None
        if line:
            yield number, line


def _format_of(path: Path, first: Line) -> Format:
    number, line = first
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BadTrace(path, number, f"no JSON: {error}") from None
    if isinstance(record, dict) and "hash_ids" in record:
        return Format.MOONCAKE
    if isinstance(record, dict) and "request_id" in record and "event" in record:
        return Format.LIFECYCLE
    raise BadTrace(path, number, "neither Mooncake's fields (hash_ids) nor a lifecycle event's")


# The width of piped output, which no terminal breaks.
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
    choices: SimulateOptions,
    *,
    costs: Mapping[str, float],
    sweep: Sequence[str],
    plot: Path | None,
    as_json: bool,
) -> int:
    """Reports mistakes before the first run, which may take long.

    Given `costs` take precedence over times in the trace, and those over guesses.
    """
    make_setup(choices.model_copy(update={"costs": replace(GUESSES, **costs)}))
    axes = parse_axes(sweep)
    if plot is not None:
        check_plot(plot)
    page_size = choices.state.page_size
    trace = read_trace(path, choices.form, block_tokens=choices.block_tokens, page_size=page_size)
    measured = replace(GUESSES.told_by(trace.pace), **costs)
    choices = choices.model_copy(update={"costs": measured})
    results = list(runs(choices, trace, axes))
    if plot is not None:
        write_plot(plot, results)
    if as_json:
        print_json(trace, results)
    else:
        width = None if sys.stdout.isatty() else WIDE
        print_tables(Console(width=width), trace, results)
    return 0
