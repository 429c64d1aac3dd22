"""The input of a custom tool, as text into arguments and out of them, however it is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.tool_calls.samples import read

from ferryman.text.tool_calls.formats import FreeTextTool
from ferryman.text.tool_calls.free_text import FreeText

PATCH = FreeTextTool("apply_patch", "input")


def _fed(arguments: str, places: list[int]) -> tuple[list[str], str]:
    cuts = sorted({place % (len(arguments) + 1) for place in places} | {0, len(arguments)})
    reader = FreeText("input")
    deltas = [reader.feed(arguments[begin:end]) for begin, end in pairwise(cuts)]
    return [*deltas, reader.end()], reader.text


@given(
    text=st.text(st.characters(codec="utf-8") | st.sampled_from('"\\\n\u2028😀'), max_size=24),
    is_ascii=st.booleans(),
    places=st.lists(st.integers(0, 99), max_size=8),
)
def test_a_text_comes_back_from_its_arguments(text: str, is_ascii: bool, places: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    deltas, whole = _fed(arguments, places)
    assert "".join(deltas) == whole == text


@given(text=st.text(max_size=24), pieces=st.lists(st.text(max_size=5), max_size=5))
def test_an_answer_that_is_the_input_is_a_call_with_it(text: str, pieces: list[str]) -> None:
    text = "".join([text, *pieces])
    whole, cut = read("none", [text], use=PATCH), read("none", [*text], use=PATCH, is_cut=True)
    ((name, arguments),) = whole.calls
    assert (name, json.loads(arguments), whole.content) == ("apply_patch", {"input": text}, "")
    assert cut.calls == ((name, arguments.removesuffix('"}')),)


def test_a_text_is_passed_on_as_it_comes() -> None:
    reader = FreeText("input")
    told = [
        reader.feed(piece)
        for piece in ['{"inp', 'ut": "*** B', "egin\\", "n\\ud83d", "\\ude00+", '"}']
    ]
    assert told == ["", "*** B", "egin", "\n", "😀+", ""]
    assert (reader.end(), reader.text) == ("", "*** Begin\n😀+")


OTHERS = {
    "no arguments": ("{}", ""),
    "nothing": ("", ""),
    "another name first": ('{"x": 1, "input": "a"}', "a"),
    "another name": ('{"patch": "a"}', '{"patch": "a"}'),
    "an object": ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
    "a list": ("[1]", "[1]"),
    "half a character": ('{"input": "\\ud800x\\ud800\\n"}', "\ufffdx\ufffd\n"),
    "half a character elsewhere": ('{"a": 0, "input": "\\ud800"}', "\ufffd"),
    "cut before the text": ('{"inp', '{"inp'),
    "cut in the text": ('{"input": "a\\u00', "a"),
}


@pytest.mark.parametrize(("arguments", "text"), OTHERS.values(), ids=OTHERS.keys())
def test_arguments_of_another_form_are_shown(arguments: str, text: str) -> None:
    for places in ([], list(range(len(arguments)))):
        deltas, whole = _fed(arguments, places)
        assert "".join(deltas) == whole == text
        whole.encode()
