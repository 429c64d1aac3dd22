"""Calls that are demanded, cut anywhere: what came of a call is one, and the rest is nothing."""

from __future__ import annotations

import pytest
from tests.text.tool_calls.samples import read

from ferryman.text.tool_calls.formats import NamedTool, SomeTool, ToolUse

ARGUMENTS = ('{"shape": "d\\"o\\u00e9t", "at": [1, -2.5e3], "deep": {"x": null}}', "{}", '{"": ""}')
NAMES = ("draw", "wait", "say")
LIST = (
    "["
    + ", ".join(
        f'{{"name": "{name}", "parameters": {arguments}}}'
        for name, arguments in zip(NAMES, ARGUMENTS, strict=True)
    )
    + "]"
)


@pytest.mark.parametrize("pieces", [1, 3, 1000], ids=["by character", "in threes", "whole"])
def test_no_cut_of_demanded_calls_shows_their_form(pieces: int) -> None:
    for end in range(len(LIST) + 1):
        text = LIST[:end]
        parts = [text[at : at + pieces] for at in range(0, end, pieces)]
        answer = read("none", parts, use=SomeTool(), is_cut=True)
        assert (answer.content, answer.reasoning) == ("", ""), text
        calls = answer.calls
        assert [name for name, _ in calls] == list(NAMES[: len(calls)])
        whole = [arguments for _, arguments in calls[:-1]]
        assert whole == list(ARGUMENTS[: len(whole)])
        assert not calls or ARGUMENTS[len(calls) - 1].startswith(calls[-1][1].rstrip(", :"))
    assert [arguments for _, arguments in read("none", [LIST], use=SomeTool()).calls] == list(
        ARGUMENTS
    )


def test_no_cut_of_a_named_call_shows_anything_else() -> None:
    for arguments in ARGUMENTS:
        for end in range(len(arguments) + 1):
            answer = read("none", [arguments[:end]], use=NamedTool("draw"), is_cut=True)
            assert answer.content == ""
            assert [name for name, _ in answer.calls] == (["draw"] if end else [])


WRONG: dict[str, tuple[ToolUse, str]] = {
    "words instead of a list": (SomeTool(), "Sorry, no."),
    "a list of no calls": (SomeTool(), '[{"nome": 3}]'),
    "words instead of an object": (NamedTool("draw"), "Sorry, no."),
    "text behind a call": (NamedTool("draw"), "{} and more"),
}


@pytest.mark.parametrize(("use", "text"), WRONG.values(), ids=WRONG.keys())
def test_a_text_that_is_something_else_is_content(use: ToolUse, text: str) -> None:
    answer = read("none", text, use=use)
    assert answer.content == text.removeprefix("{}").lstrip()
