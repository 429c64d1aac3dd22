"""docs/api.md has every field that bodies may have, and says of each what the code does."""

from __future__ import annotations

import pytest

from ferryman.text.tool_calls.format_table import REASONING_FORMATS, TOOL_ALIASES, TOOL_FORMATS
from ferryman_router.bodies.anthropic_requests import CONTENT_BLOCKS
from ferryman_router.bodies.chat_messages import MESSAGE, NOT_IN_MESSAGES
from ferryman_router.bodies.field_table import (
    OUTPUT_CONFIG,
    REASONING,
    STREAM_OPTIONS,
    TEXT_OPTIONS,
    THINKING,
    TOOL_CHOICE,
)
from ferryman_router.bodies.responses_requests import INPUT_ITEMS, NOT_IN_INPUT
from tools import api_tables

TEXT = api_tables.PAGE.read_text()
TABLES = api_tables.tables()
# Rows of several fields, whose reasons the page of OpenAI's fields says together.
TOGETHER = {
    "mm_processor_kwargs": "models here read and write text",
    "functions": "send tools and tool_choice",
    "function_call": "send tools and tool_choice",
    "length_penalty": "tokens are drawn one by one",
    "early_stopping": "tokens are drawn one by one",
}


def _table(index: int) -> str:
    table = TABLES[index]
    return f"{table.heading} {table.index}"


def test_every_field_has_a_row() -> None:
    assert api_tables.written(TEXT) == TEXT, "run `python tools/api_tables.py`"


@pytest.mark.parametrize("index", range(len(TABLES)), ids=_table)
def test_no_row_is_of_a_field_that_is_gone(index: int) -> None:
    table = TABLES[index]
    rows = api_tables.rows_of(TEXT, table)
    assert {name for row in rows for name in api_tables.named(row)} - set(NOT_IN_INPUT) == set(
        table.last_cells
    )


@pytest.mark.parametrize("index", [1, 2, 4, 5, 7, 8], ids=_table)
def test_a_field_that_is_not_read_has_its_reason(index: int) -> None:
    table = TABLES[index]
    reasons = {**NOT_IN_INPUT, **table.last_cells, **(TOGETHER if index == 2 else {})}
    for row in api_tables.rows_of(TEXT, table):
        why = row.split("|")[-2].strip().replace("`", "")
        for name in api_tables.named(row):
            assert why == reasons[name].replace("`", ""), name


@pytest.mark.parametrize("heading", ["## Parameters", "## Responses"])
def test_a_row_that_is_missing_is_written(heading: str) -> None:
    table = next(table for table in TABLES if table.heading == heading)
    (row,) = [row for row in api_tables.rows_of(TEXT, table) if "`min_p`" in row]
    shorter = (
        TEXT.replace(row, row.replace(", `min_p`", ""))
        if table.shared
        else TEXT.replace(f"{row}\n", "")
    )
    assert shorter != TEXT
    again = api_tables.rows_of(api_tables.written(shorter), table)
    assert sum("`min_p`" in row for row in again) == 1
    assert len(again) == len(api_tables.rows_of(TEXT, table))


def test_a_page_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no heading ## Parameters"):
        api_tables.written(TEXT.replace("## Parameters", "## Others"))


@pytest.mark.parametrize(
    "names",
    [
        MESSAGE.names,
        set(NOT_IN_MESSAGES),
        STREAM_OPTIONS.names,
        set(INPUT_ITEMS) | TEXT_OPTIONS.names | REASONING.names,
        {*CONTENT_BLOCKS, *OUTPUT_CONFIG.names, *THINKING.names, *TOOL_CHOICE.names}
        - {"type", "name"},
        {*TOOL_FORMATS, *TOOL_ALIASES},
        set(REASONING_FORMATS),
    ],
    ids=[
        "messages",
        "refused in messages",
        "stream options",
        "responses",
        "messages of Anthropic",
        "tools",
        "thoughts",
    ],
)
def test_every_other_name_is_told(names: set[str]) -> None:
    assert {name for name in names if f"`{name}`" not in TEXT} == set()
