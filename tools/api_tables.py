"""The rows of fields in docs/api.md, from the table of body fields.

python tools/api_tables.py          adds the rows that are missing

A row that is there keeps its words: it compares with other servers, which no table knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ferryman_router.bodies.field_table import FIELDS, Field
from ferryman_router.bodies.unread_fields import (
    ANTHROPIC,
    NOT_OFFERED,
    NOT_YET,
    OPENAI,
    RESPONSES,
    WITHOUT_EFFECT,
    Apis,
    Unread,
)

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
SHARED = "as in a chat"


@dataclass(frozen=True, slots=True)
class FieldTable:
    """A table of the page: the one at `index` below a heading, and the last cell of each field. A
    field that is `shared` with a chat stands in a row for all of those."""

    heading: str
    index: int
    last_cells: dict[str, str]
    shared: frozenset[str] = frozenset()


def tables() -> list[FieldTable]:
    """All tables of fields, in the order of the page."""
    later = {name: "not yet" for row in NOT_OFFERED if row.why == NOT_YET for name in _names(row)}
    return [
        FieldTable("## Parameters", 0, _read(OPENAI) | later),
        FieldTable("### Accepted without effect", 0, _reasons(WITHOUT_EFFECT, OPENAI)),
        FieldTable("### Known and not offered", 0, _reasons(NOT_OFFERED, OPENAI)),
        *_of_endpoint("## Responses", RESPONSES),
        *_of_endpoint("## Messages of Anthropic", ANTHROPIC),
    ]


def written(page: str) -> str:
    """The page with a row for every field. Raises ValueError for a table that is missing."""
    lines = page.split("\n")
    for table in tables():
        begin, end = _place(lines, table)
        lines[begin:end] = _completed(lines[begin:end], table)
    return "\n".join(lines)


def named(row: str) -> list[str]:
    """The fields that a row is for."""
    return re.findall(r"`(\w+)`", row.split("|")[1])


def rows_of(page: str, table: FieldTable) -> list[str]:
    """The rows of a table, without its head."""
    lines = page.split("\n")
    begin, end = _place(lines, table)
    return lines[begin + 2 : end]


def _of_endpoint(heading: str, apis: Apis) -> list[FieldTable]:
    shared = {field.name for field in FIELDS if field.on & OPENAI and field.on & apis}
    return [
        FieldTable(heading, 0, _read(apis), frozenset(shared)),
        FieldTable(heading, 1, _reasons(WITHOUT_EFFECT, apis)),
        FieldTable(heading, 2, _reasons(NOT_OFFERED, apis)),
    ]


def _read(apis: Apis) -> dict[str, str]:
    return {field.name: _shown(field) for field in FIELDS if field.on & apis}


def _reasons(rows: Iterable[Unread], apis: Apis) -> dict[str, str]:
    asked = [row for row in rows if row.on & apis and row.why != NOT_YET]
    return {name: row.why for row in asked for name in _names(row)}


def _names(row: Unread) -> list[str]:
    return row.names.split()


def _shown(field: Field) -> str:
    """The type and the range of a field's values, as its schema says them."""
    schema = field.kind.schema
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    if least is None:
        return "yes"
    above = "above " if "exclusiveMinimum" in schema else ""
    return f"default {field.kind.default}; {above}{least} to {schema['maximum']}"


def _place(lines: list[str], table: FieldTable) -> tuple[int, int]:
    """The lines of a table, with its head."""
    if table.heading not in lines:
        raise ValueError(f"the page has no heading {table.heading}")
    place, count = lines.index(table.heading) + 1, 0
    while place < len(lines) and not lines[place].startswith("#"):
        end = place
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if end > place:
            if count == table.index:
                return place, end
            count += 1
        place = end + 1
    raise ValueError(f"the page has no table {table.index} below {table.heading}")


def _completed(lines: list[str], table: FieldTable) -> list[str]:
    present = {name for line in lines[2:] for name in named(line)}
    rows, num_columns = list(lines), lines[0].count("|") - 1
    for name in [name for name in table.last_cells if name not in present]:
        common = [at for at, row in enumerate(rows) if row.endswith(f"| {SHARED} |")]
        if name in table.shared and common:
            first, rest = rows[common[0]].split(" | ", 1)
            rows[common[0]] = f"{first}, `{name}` | {rest}"
        else:
            cells = [f"`{name}`", *["–"] * (num_columns - 2), table.last_cells[name]]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
