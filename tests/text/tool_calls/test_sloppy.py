"""Answers as models really write them are read, whole and in every cut; nothing else is lost."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.tool_calls.samples import Answer, read
from tests.text.tool_calls.sloppy import A1, SLOPPY, TYPES, Sloppy
from tests.text.tool_calls.sloppy_gemma import SLOPPY_GEMMA
from tests.text.tool_calls.sloppy_kimi import ARGUMENTS, CALL, CALL_END, SECTION, SLOPPY_KIMI
from tests.text.tool_calls.sloppy_python import SLOPPY_PYTHON
from tests.text.tool_calls.sloppy_tags import SLOPPY_TAGS

from ferryman.text.tool_calls.format_table import REASONING_FORMATS, TOOL_FORMATS
from ferryman.text.tool_calls.formats import FreeTools

CASES = {**SLOPPY, **SLOPPY_GEMMA, **SLOPPY_KIMI, **SLOPPY_PYTHON, **SLOPPY_TAGS}
USE = FreeTools(TYPES)
CALL_A1 = '{"name": "f", "arguments": {"a": "1"}}'
PIECES = sorted(
    {
        *"{}[]()\"'\\`:,;=< >\n\u00a0x1é",
        *("<tool_call>", "</tool_call>", "<function=f>", "<function=f", "</function>", "</para"),
        *("<parameter=a>", "<parameter=tags>", "</parameter>", "[TOOL_CALLS]", "[ARGS]"),
        *("<|python_tag|>", "<|tool_call|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "function", "```"),
        *("```json\n", "```tool_code\n", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
        *("<|call|>", "assistant", "analysis", "to=functions.f", " to=", "<think>", "</think>"),
        *(SECTION, CALL, ARGUMENTS, CALL_END, "functions.f:0", "functions_f_2", "functions."),
        *("<|tool_call>", "<tool_call|>", '<|"|>', "call:f{", "a:"),
        *("<|tool_call_start|>", "<|tool_call_end|>", "<function_calls>", "</function_calls>"),
        *("<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"),
        *('<invoke name="f">', '<parameter name="a">', "</invoke>", "<｜DSML｜function_calls>"),
        *('<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">', "｜DSML｜"),
        *("</｜DSML｜invoke>", "</｜DSML｜parameter>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>a</arg_key>", "f"),
        *('{"name": "f", "arguments": ', '{"a": 1}', "f(a=1", "None", "\\u00", "[CALL_ID]"),
    }
)
ODD_TEXTS = st.lists(st.sampled_from(PIECES), max_size=16).map("".join)


def _cut(text: str, places: list[int]) -> list[str]:
    cuts = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(cuts)] or [text]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_call_is_read_as_it_was_really_written(case: Sloppy) -> None:
    expected = Answer(case.content, "", case.calls)
    assert read(case.tools, [case.text], use=USE) == expected
    assert read(case.tools, case.text, use=USE) == expected
    for place in range(1, len(case.text)):
        pieces = [case.text[:place], case.text[place:]]
        assert read(case.tools, pieces, use=USE) == expected, pieces
    for _, arguments in case.calls:
        json.loads(arguments)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_no_beginning_of_an_answer_vanishes(case: Sloppy) -> None:
    if case.tools == "openai":
        return  # headers are no text
    for end in range(len(case.text) + 1):
        for is_cut in (True, False):
            answer = read(case.tools, [case.text[:end]], use=USE, is_cut=is_cut)
            assert answer.calls or answer.content == case.text[:end]


@pytest.mark.parametrize("tools", sorted(TOOL_FORMATS))
@given(data=st.data())
def test_any_cut_of_any_text_says_the_same(tools: str, data: st.DataObject) -> None:
    seen = [case.text for case in CASES.values() if case.tools == tools]
    text = data.draw(ODD_TEXTS | st.sampled_from(seen or [""]) | _spoilt(seen))
    is_cut, reasoning = data.draw(st.booleans()), data.draw(st.sampled_from(_REASONING))
    places = data.draw(st.lists(st.integers(0, 999), max_size=8))
    whole = read(tools, [text], use=USE, reasoning=reasoning, is_cut=is_cut)
    assert whole == read(tools, _cut(text, places), use=USE, reasoning=reasoning, is_cut=is_cut)
    if not whole.calls and reasoning == "none" and tools != "openai":
        assert whole.content == text


_REASONING = ["none", *(name for name in REASONING_FORMATS if name != "openai_gptoss")]


def _spoilt(texts: list[str]) -> st.SearchStrategy[str]:
    """Texts without a stretch of theirs, or with another piece in their middle."""

    def spoil(text: str, begin: int, length: int, piece: str) -> str:
        begin %= len(text) + 1
        return text[:begin] + piece + text[begin + length :]

    return st.builds(
        spoil,
        st.sampled_from(texts or [""]),
        st.integers(0, 999),
        st.integers(0, 20),
        st.sampled_from(["", *PIECES]),
    )


@given(text=ODD_TEXTS)
def test_nothing_but_headers_is_left_out_of_harmony(text: str) -> None:
    answer = read("openai", [text], use=USE)
    if "<|message|>" not in text and not answer.calls:
        assert _without_ends(answer.content) == _without_ends(text)


def _without_ends(text: str) -> str:
    for end in ("<|end|>", "<|call|>", "<|return|>"):
        text = text.replace(end, "")
    return text


CUT = {
    "a value": ("qwen3_coder", "<function=f>\n<parameter=a>\nPar", ("f", '{"a": "Par')),
    "the tag behind a value": (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\nPar\n</param",
        ("f", '{"a": "Par'),
    ),
    "behind a value": (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\n1\n</parameter>\n",
        ("f", '{"a": "1"'),
    ),
    "a tag": ("qwen3_coder", "<function=f><parameter=a>1</parameter>\n</fu", ("f", '{"a": "1"')),
    "a parameter's name": ("qwen3_coder", "<function=f>\n<parameter=a", ("f", "")),
    "a typed value": ("qwen3_coder", "<function=typed><parameter=count>1", ("typed", '{"count": ')),
    "an escape": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "1\\u00',
        ("f", '{"a": "1'),
    ),
    "a word": (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": "1", "c": tr',
        ("f", '{"a": "1", "c": '),
    ),
    "the next call": ("llama3_json", '{"name": "f", "parameters": {"a": "1"}}; {"name": "f', A1),
    "the mark at the end": ("hermes", f"<tool_call>{CALL_A1}</tool_c", A1),
    "a mark of DeepSeek": (
        "deepseek_v3",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "1"}<｜tool▁call▁end｜',
        A1,
    ),
    "the end of a fence": ("hermes", f"```json\n{CALL_A1}\n``", A1),
    "a tag at the end": (
        "qwen3_coder",
        "<function=f><parameter=a>1</parameter></function></tool",
        A1,
    ),
    "a value of GLM": (
        "glm45",
        "<tool_call>f<arg_key>a</arg_key><arg_value>Par</arg_v",
        ("f", '{"a": "Par'),
    ),
    "behind a value of GLM": (
        "glm45",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>\n<arg_k",
        ("f", '{"a": "1"'),
    ),
    "a key of GLM": ("glm45", "<tool_call>f<arg_key>a</arg_k", ("f", "")),
    "a typed value of GLM": (
        "glm45",
        "<tool_call>typed<arg_key>count</arg_key><arg_value>1",
        ("typed", '{"count": '),
    ),
    "a value of MiniMax": (
        "minimax_m2",
        '<minimax:tool_call><invoke name="f"><parameter name="a">Par</parame',
        ("f", '{"a": "Par'),
    ),
    "a parameter of MiniMax": (
        "minimax_m2",
        '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter><parameter na',
        ("f", '{"a": "1"'),
    ),
    "an end of DeepSeek's": (
        "deepseek_v32",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DS",
        A1,
    ),
    "a text of Gemma": ("gemma4", '<|tool_call>call:f{a:<|"|>Par<|"', ("f", '{"a": "Par')),
    "a number of Gemma": ("gemma4", "<|tool_call>call:typed{count:1", ("typed", '{"count": ')),
    "an object of Kimi": (
        "kimi_k2",
        f'{SECTION}{CALL}functions.f:0{ARGUMENTS}{{"a": "Par',
        ("f", '{"a": "Par'),
    ),
    "a mark of Kimi": (
        "kimi_k2",
        f'{CALL}functions.f:0{ARGUMENTS}{{"a": "1"}}<|tool_call_e',
        A1,
    ),
    "an object": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1"', ("f", '{"a": "1"')),
}


@pytest.mark.parametrize(("tools", "text", "call"), CUT.values(), ids=CUT.keys())
def test_a_call_that_was_cut_off_stays_open(tools: str, text: str, call: tuple[str, str]) -> None:
    assert read(tools, text, use=USE, is_cut=True) == Answer("", "", (call,))


def test_a_list_that_was_cut_off_is_content() -> None:
    assert read("pythonic", "[f(a='1')", use=USE, is_cut=True) == Answer("[f(a='1')", "", ())
    assert read("mistral", "[TOOL_CALLS]now", use=USE, is_cut=True).calls == ()


def test_a_text_is_passed_on_while_it_comes_however_long_it_is() -> None:
    """A file of more than any buffer; it came as content before."""
    text = "line\n" * 40_000
    call = f"<function=f>\n<parameter=a>\n{text}</parameter>\n</function>"
    answer = read("qwen3_coder", [call], use=USE)
    assert json.loads(answer.calls[0][1]) == {"a": text.removesuffix("\n")}
    assert answer.content == ""


def test_a_thousand_calls_that_never_end_are_a_thousand() -> None:
    answer = read("qwen3_coder", ["<tool_call><function=now>" * 1000], use=USE)
    assert answer.calls == (("now", "{}"),) * 1000
    objects = '{"name": "now", "arguments": {}}' * 1000
    assert len(read("hermes", [f"<tool_call>{objects}"], use=USE).calls) == 1000


@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_the_beginning_of_a_mark_is_not_lost(reasoning: str) -> None:
    """The text ends where it still could be a mark of a thought."""
    for text in ("<", "<thi", "[", "Here is my", " \n<t"):
        answer = read("none", [text], reasoning=reasoning)
        assert answer.content + answer.reasoning == text


@pytest.mark.parametrize("tools", sorted(TOOL_FORMATS))
@pytest.mark.parametrize(
    "piece",
    ['{"function": ', "<tool_call>", "[f(a=", "<function=typed><parameter=tags>[", "[[", '"-'],
)
def test_a_text_that_never_closes_what_it_opens_is_no_error(tools: str, piece: str) -> None:
    text = f"<tool_call>{piece * 2000}"
    assert read(tools, [text], use=USE).reasoning == ""
    assert read(tools, [piece * 2000], use=USE).reasoning == ""
