"""docs/api.md has every field that bodies may have, and says of each what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ferryman.text.tool_calls.formats import REASONING_FORMATS, TOOL_ALIASES, TOOL_FORMATS
from ferryman_router.bodies.api_fields import (
    CHAT,
    COMPLETION,
    CONTENT_BLOCKS,
    COUNT_TOKENS,
    INPUT_ITEMS,
    MESSAGE,
    MESSAGES,
    MESSAGES_WITHOUT_EFFECT,
    NOT_IN_INPUT,
    NOT_IN_MESSAGES,
    NOT_IN_MESSAGES_BODY,
    NOT_IN_RESPONSES,
    NOT_OFFERED,
    NOT_YET,
    OUTPUT_CONFIG,
    REASONING,
    RESPONSES,
    RESPONSES_WITHOUT_EFFECT,
    STREAM_OPTIONS,
    TEXT_OPTIONS,
    THINKING,
    TOOL_CHOICE,
    WITHOUT_EFFECT,
)

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
PARAMETERS = TEXT.partition("## Parameters")[2].partition("### Accepted")[0]
ACCEPTED = TEXT.partition("### Accepted")[2].partition("### Known")[0]
REFUSED = TEXT.partition("### Known")[2].partition("## Messages")[0]
RESPONSES_PART = TEXT.partition("## Responses")[2].partition("\n## ")[0]
MESSAGES_PART = TEXT.partition("## Messages of Anthropic")[2].partition("\n## ")[0]


def _tables(part: str) -> list[str]:
    """The fields that are read, those without effect, those that are not offered."""
    return part.split("\n\n|")[1:]


def _reasons(table: str) -> dict[str, str]:
    """By name: the second column of a table."""
    rows = [line.split("|")[-3:-1] for line in table.splitlines() if line.rstrip().endswith("|")]
    found = ((names, why.strip().replace("`", "")) for names, why in rows)
    return {name: why for names, why in found for name in re.findall(r"`(\w+)`", names)}


def _named(part: str) -> set[str]:
    """The names in the first column of a table."""
    rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def _not_yet() -> set[str]:
    rows = [line.split("|") for line in PARAMETERS.splitlines() if line.startswith("|")]
    return {
        name
        for row in rows
        if row[-2].strip() == "not yet"
        for name in re.findall(r"`(\w+)`", row[1])
    }


def test_every_field_that_is_read_has_a_row() -> None:
    assert _named(PARAMETERS) - _not_yet() >= (CHAT | COMPLETION) - set(WITHOUT_EFFECT) - _not_yet()


def test_what_is_not_yet_there_is_refused() -> None:
    later = {name for name, why in NOT_OFFERED.items() if why == NOT_YET}
    assert later <= _not_yet()


def test_every_field_without_effect_has_its_reason() -> None:
    assert _named(ACCEPTED) == set(WITHOUT_EFFECT)
    for reason in WITHOUT_EFFECT.values():
        assert reason.replace("x-request-id", "`x-request-id`") in ACCEPTED


def test_every_field_that_is_not_offered_has_its_reason() -> None:
    assert _named(REFUSED) == {name for name, why in NOT_OFFERED.items() if why != NOT_YET}


@pytest.mark.parametrize(
    ("part", "fields", "without_effect", "refused"),
    [
        (
            RESPONSES_PART,
            RESPONSES,
            RESPONSES_WITHOUT_EFFECT,
            {**NOT_IN_RESPONSES, **NOT_IN_INPUT},
        ),
        (MESSAGES_PART, MESSAGES | COUNT_TOKENS, MESSAGES_WITHOUT_EFFECT, NOT_IN_MESSAGES_BODY),
    ],
    ids=["responses", "messages of Anthropic"],
)
def test_an_endpoint_has_a_row_for_every_field(
    part: str,
    fields: set[str],
    without_effect: dict[str, str],
    refused: dict[str, str],
) -> None:
    read, nothing, never = _tables(part)
    assert _named("|" + read) == fields - set(without_effect)
    assert _reasons(nothing) == without_effect
    assert _reasons(never) == refused


@pytest.mark.parametrize(
    "names",
    [
        MESSAGE,
        set(NOT_IN_MESSAGES),
        STREAM_OPTIONS,
        set(INPUT_ITEMS) | TEXT_OPTIONS | REASONING,
        {*CONTENT_BLOCKS, *OUTPUT_CONFIG, *THINKING - {"type"}, *TOOL_CHOICE - {"type", "name"}},
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
