"""Tables in Markdown whose lines stay short: a long cell says "below", and follows in a list."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

MAX_LINE, WRAPPED_LINE = 160, 120
BELOW = "below"

_SENTENCE_END = re.compile(r"(?<=[.;]) ")


def short_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, long: int) -> list[str]:
    """The lines of a table. Where a row is longer than MAX_LINE its cell `long` keeps the sentences
    that fit, and the others stand in a list behind the table, by the row's first cell."""
    lines, notes = [_line(head), _line(["---"] * len(head))], list[str]()
    for row in rows:
        kept, moved = _divided(row, long)
        lines.append(_line([*row[:long], kept, *row[long + 1 :]]))
        if moved:
            notes += _list_item(f"{row[0]}: {moved}")
    return [*lines, "", *notes] if notes else lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _divided(row: Sequence[str], long: int) -> tuple[str, str]:
    """The cell `long` of a row, and the part of it that stands behind the table."""
    room = MAX_LINE - len(_line([*row[:long], "", *row[long + 1 :]]))
    cell = row[long]
    if len(cell) <= room:
        return cell, ""
    ends = [found for found in _SENTENCE_END.finditer(cell) if found.start() + 8 <= room]
    if not ends:
        return BELOW, cell
    kept = cell[: ends[-1].start()]
    return f"{kept.removesuffix(';')} ({BELOW})", cell[ends[-1].end() :]


def _list_item(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WRAPPED_LINE,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
