"""Opens a trace, tells its format by its first line, and gives its lines with their numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from pathlib import Path

from ferryman_cli.simulate.lifecycle import read_lifecycle
from ferryman_cli.simulate.mooncake import read_mooncake
from ferryman_cli.simulate.trace import MAX_LINE_BYTES, BadTrace, Trace

Line = tuple[int, str]


class Format(StrEnum):
    """What a trace is written in; AUTO looks at its first line."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    LIFECYCLE = "lifecycle"


def read_trace(path: Path, form: Format, *, block_tokens: int, page_size: int) -> Trace:
    """The trace in `path`. Raises BadTrace, with file and line, for what is none.

    `block_tokens` is what one id of a Mooncake trace names, `page_size` that of the cluster whose
    lifecycle log this is.
    """
    try:
        with path.open("rb") as opened:
            lines = _lines(path, opened)
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


def _lines(path: Path, opened: Iterator[bytes]) -> Iterator[Line]:
    """Lines that are not blank. `opened` is a file: it gives bytes line by line."""
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
