"""Texts of Gemma's calls without their marks: where they end, and what it costs to see it."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from tests.text.tool_calls.samples import Answer, read

from ferryman.text.tool_calls.formats import FreeTools

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


def _num_steps(num_parameters: int, text: str) -> int:
    """The functions that are called to read a text."""
    use = FreeTools({"f": {f"key{number}": ["string"] for number in range(num_parameters)}})
    num = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        read("gemma4", [text], use=use)
    finally:
        sys.setprofile(before)
    return num


@pytest.mark.parametrize(
    "arguments",
    ["key0:" + ",key" * 50, "key0:" + ", x=" * 50, ",key0:x" * 50],
    ids=["commas", "signs", "parameters"],
)
def test_a_comma_costs_no_more_where_a_tool_has_many_parameters(arguments: str) -> None:
    text = f"{BEGIN}call:f{{{arguments}}}{END}"
    assert _num_steps(1000, text) < 1.2 * _num_steps(2, text)


@pytest.mark.parametrize(
    ("value", "read_as"),
    [
        ("Paris, France", "Paris, France"),
        ("x,, ,  b:2", "x,, ,  b:2"),
        ("x, c:1, d=2", "x, c:1, d=2"),
        ("x,c:", "x,c:"),
        ("a:1, a", "a:1, a"),
        ("1 < 2, <tool_cal", "1 < 2, <tool_cal"),
    ],
)
@pytest.mark.parametrize("comma", [",", ", "])
@pytest.mark.parametrize("sign", [":", "="])
def test_a_text_without_marks_ends_where_a_parameter_begins(
    value: str, read_as: str, comma: str, sign: str
) -> None:
    use = FreeTools({"f": {"a": ["string"], "b": ["string"]}})
    text = f"{BEGIN}call:f{{a{sign}{value}{comma}b{sign}{QUOTE}2{QUOTE}}}{END}"
    expected = Answer("", "", (("f", f'{{"a": "{read_as}", "b": "2"}}'),))
    assert read("gemma4", [text], use=use) == expected
    assert read("gemma4", text, use=use) == expected


@pytest.mark.parametrize(
    ("arguments", "read_as"),
    [
        ('{"a": "x}, b:1}', '{"a": "x}, b:1"}'),
        ("{a:'tis so}", '{"a": "tis so"}'),
        (f"{{a:{QUOTE}x}}, b:1}}", '{"a": "x}, b:1"}'),
        (f"(a={QUOTE}f(x))", '{"a": "f(x)"}'),
        (f"{{a:{QUOTE}x", '{"a": "x"}'),
        (f"{{a:{QUOTE}}}", '{"a": ""}'),
        (f"{{a:{{c:[{QUOTE}{{x}}]}}}}", '{"a": {"c": ["{x}"]}}'),
        ('{"a": ["x\\', '{"a": ["x"]}'),
        ('{"a": "x <tool_call', '{"a": "x <tool_call"}'),
    ],
)
def test_a_text_without_its_last_mark_ends_where_the_call_does(
    arguments: str, read_as: str
) -> None:
    """The brackets before that are those of the call."""
    use = FreeTools({"f": {"a": ["string"], "b": ["string"]}})
    text = f"{BEGIN}call:f{arguments}{END} So.{BEGIN}call:f{{a:1}}{END}"
    expected = Answer("So.", "", (("f", read_as), ("f", '{"a": "1"}')))
    assert read("gemma4", [text], use=use) == expected
    assert read("gemma4", text, use=use) == expected


@pytest.mark.parametrize("value", ["}", "})]", "x}}}}y)", "<tool_call", "<", "<|", "{}"])
@pytest.mark.parametrize("quote", [QUOTE, '"', "'"])
def test_a_whole_text_keeps_all_its_brackets(value: str, quote: str) -> None:
    use = FreeTools({"f": {"a": ["string"]}})
    text = f"{BEGIN}call:f{{a:{quote}{value}{quote}}}{END}"
    assert read("gemma4", [text], use=use).calls == (("f", f'{{"a": "{value}"}}'),)
    assert read("gemma4", text, use=use).calls == (("f", f'{{"a": "{value}"}}'),)
