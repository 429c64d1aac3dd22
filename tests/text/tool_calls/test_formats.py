"""Every format reads the answers of its models, however they are cut, and never fails."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.tool_calls.samples import PARIS, SAMPLES, WEATHER, Answer, Sample, read

from ferryman.errors import ConfigError
from ferryman.text.tool_calls.format_table import REASONING_FORMATS, TOOL_FORMATS
from ferryman.text.tool_calls.formats import (
    FreeTools,
    NamedTool,
    NoTools,
    OutputSyntax,
    SomeTool,
    ToolUse,
)
from ferryman.text.tool_calls.thought import PromptTail

MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[", "]", "{", "}",
    '"name": "f"', '"arguments": ', '"a": 1', ", ", ":", '"', "\\", "\n", " ", "x", "é", "-", "1.",
    "<function=f>", "<parameter=a>", "</parameter>", "</function>", "f(a='b')", "(", ";", "`",
    "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json\n", "```",
    "<｜tool▁call▁end｜>",
    "<|channel|>", "analysis", "commentary to=functions.f", "<|message|>", "<|end|>", "<|start|>",
    "<|call|>", "<think>", "</think>", "<|tool_call|>", "null", "\\u12", "\\ud800", "tool_code",
    "True", "Here is my response:", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "call:f{", "a:", "<|channel>thought", "<channel|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<function_calls>", "</function_calls>",
    "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>",
    '<invoke name="f">', '<parameter name="a">', "</invoke>", "<｜DSML｜function_calls>",
    '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">',
    "</｜DSML｜parameter>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
ODD_TEXTS = st.lists(st.sampled_from(MARKS), max_size=24).map("".join)
USES: tuple[ToolUse, ...] = (FreeTools(WEATHER), NamedTool("f"), SomeTool())


def _cut(text: str, places: list[int]) -> list[str]:
    cuts = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(cuts)] or [text]


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_a_format_reads_what_its_models_write(sample: Sample) -> None:
    answer = read(
        sample.tools,
        [sample.text],
        reasoning=sample.reasoning_parser,
        prompt_tail=sample.prompt_tail,
    )
    assert answer == Answer(sample.content, sample.reasoning, sample.calls)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_one_character_at_a_time_says_the_same(sample: Sample) -> None:
    answer = read(
        sample.tools, sample.text, reasoning=sample.reasoning_parser, prompt_tail=sample.prompt_tail
    )
    assert answer == Answer(sample.content, sample.reasoning, sample.calls)


@given(
    tools=st.sampled_from(sorted(TOOL_FORMATS)),
    reasoning=st.sampled_from(["none", *REASONING_FORMATS]),
    use=st.sampled_from(USES),
    text=ODD_TEXTS | st.sampled_from([one.text for one in SAMPLES.values()]),
    places=st.lists(st.integers(0, 500), max_size=8),
)
def test_any_cutting_of_any_text_says_the_same(
    tools: str, reasoning: str, use: ToolUse, text: str, places: list[int]
) -> None:
    whole = read(tools, [text], use=use, reasoning=reasoning)
    assert read(tools, _cut(text, places), use=use, reasoning=reasoning) == whole
    for _, arguments in whole.calls:
        arguments.encode()  # nothing that cannot be sent


@given(
    tools=st.sampled_from(sorted(TOOL_FORMATS)), text=st.text(alphabet="abc \n.,!?é", max_size=40)
)
def test_a_text_without_marks_is_content_to_the_last_space(tools: str, text: str) -> None:
    assert read(tools, text) == Answer(text, "", ())


MALFORMED = {
    "no JSON": ("hermes", "<tool_call>not JSON</tool_call>"),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "a name that is a number": ("hermes", '<tool_call>{"name": 7}</tool_call>'),
    "half a character as a name": ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>'),
    "arguments that are a list": ("hermes", '<tool_call>{"arguments": [], "name": "f"}'),
    "a list without its end": ("pythonic", "[f(a=1), "),
    "no literal": ("pythonic", "[f(a=open('x'))]"),
    "positions": ("pythonic", "[f(1)]"),
    "text": ("pythonic", "[1, 2] are numbers"),
    "another tag": ("qwen3_coder", "<tool_call><other>"),
    "a set": ("llama3_json", "{1, 2}"),
    "no header": ("openai", "<b>bold</b>"),
}


@pytest.mark.parametrize(("tools", "text"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_call_that_is_none_is_content(tools: str, text: str) -> None:
    assert read(tools, text) == Answer(text, "", ())


def test_arguments_end_where_they_are_no_json_any_more() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, b}}</tool_call> So.'
    answer = read("hermes", text)
    assert answer.calls == (("f", '{"a": 1'),)
    assert answer.content == "b}}</tool_call> So."


def test_arguments_are_passed_on_while_they_come() -> None:
    parser = OutputSyntax.chosen("hermes", "none", "").parser(FreeTools({}), PromptTail())
    assert len(parser.feed('<tool_call>{"name": "f", "arguments": {"a": "lo')) == 2
    assert parser.feed("ng") != ()


def test_deep_nesting_is_no_call() -> None:
    text = '<tool_call>{"name": "f", "id": ' + "[" * 1000
    assert read("hermes", text) == Answer(text, "", ())


def test_raw_line_breaks_in_a_string_are_escaped() -> None:
    answer = read("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>')
    assert json.loads(answer.calls[0][1]) == {"a": "x\ny"}


def test_a_forced_call_is_its_json() -> None:
    named = read("none", '{"city": "Paris"}', use=NamedTool("get_weather"))
    some = read(
        "none", '[{"name": "get_weather", "parameters": {"city": "Paris"}}]', use=SomeTool()
    )
    assert named.calls == some.calls == (PARIS,)


TEMPLATES = {
    '<tool_call>\n{"name": <function-name>': ("hermes", None),
    "<tool_call>\n<function=example>": ("qwen3_coder", None),
    "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|> <think></think>": ("kimi_k2", "qwen3"),
    "<minimax:tool_call>\n<invoke name= </think>": ("minimax_m2", "qwen3"),
    "{% set word = '｜DSML｜' %}": ("deepseek_v32", None),
    "List of tools: <|tool_list_start|>[": ("lfm2", None),
    "<function_calls>": ("olmo3", None),
    "<|tool_call>call: <|channel>thought": ("gemma4", "gemma4"),
    "<seed:think> <seed:tool_call>\n<function=example>": ("seed_oss", "seed_oss"),
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> <think></think>": (
        "glm45",
        "qwen3",
    ),
    "[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK]": ("mistral", "mistral"),
    "<|python_tag|>": ("llama3_json", None),
    "<｜tool▁call▁begin｜> </think>": ("deepseek_v3", "qwen3"),
    "<|start|>assistant<|channel|>final": ("openai", "openai_gptoss"),
    "<|tool_call|> Here is my thought process:": ("granite", "granite"),
    "{{ messages }}": (None, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_tells_the_formats(template: str) -> None:
    tools, reasoning = TEMPLATES[template]
    chosen = OutputSyntax.chosen("auto", "auto", template)
    assert chosen.tools is (TOOL_FORMATS[tools] if tools else None)
    assert chosen.reasoning is (REASONING_FORMATS[reasoning] if reasoning else None)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--tool-parser hermse.*hermes"):
        OutputSyntax.chosen("hermse", "auto", "")


def test_without_tools_and_thoughts_there_is_nothing_to_read() -> None:
    syntax = OutputSyntax.chosen("hermes", "none", "")
    assert not syntax.reads(NoTools())
    assert syntax.reads(FreeTools({}))
    assert syntax.special(NoTools()) == frozenset()
    assert OutputSyntax.chosen("mistral", "none", "").special(FreeTools({}))
