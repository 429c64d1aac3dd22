"""Answers of models as they write them, and what is in them: content, thoughts, calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ferryman.text.tool_calls.deltas import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
)
from ferryman.text.tool_calls.formats import FreeTools, OutputSyntax, ToolUse
from ferryman.text.tool_calls.thought import ContinuedMessage, PromptTail
from ferryman.text.tool_calls.value_types import parameter_types

WEATHER: Mapping[str, Mapping[str, Any]] = {
    "get_weather": parameter_types(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "limits": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            },
        }
    )
}


class Answer(NamedTuple):
    """All of an answer: its text, its thoughts, and names with arguments."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    """A text, the parsers that read it, and what it says."""

    tools: str
    text: str
    content: str
    calls: tuple[tuple[str, str], ...]
    reasoning: str = ""
    reasoning_parser: str = "none"
    prompt_tail: str = ""


def gathered(deltas: Iterable[OutputDelta]) -> Answer:
    """The whole that deltas make up. A call has begun before its arguments come."""
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case CallStarted(index, name):
                assert index == len(calls), "calls come in order"
                calls.append((name, ""))
            case ArgumentsDelta(index, text):
                assert index == len(calls) - 1, "arguments are those of the latest call"
                calls[index] = (calls[index][0], calls[index][1] + text)
    return Answer(content, reasoning, tuple(calls))


FREE = FreeTools(WEATHER)


def read(
    tools: str,
    pieces: Iterable[str],
    *,
    use: ToolUse = FREE,
    reasoning: str = "none",
    prompt_tail: str = "",
    continued: ContinuedMessage | None = None,
    is_cut: bool = False,
) -> Answer:
    """The answer that comes in these pieces."""
    prompt = PromptTail(prompt_tail, continued)
    parser = OutputSyntax.chosen(tools, reasoning, "").parser(use, prompt)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return gathered([*deltas, *parser.flush(is_cut=is_cut)])


PARIS = ("get_weather", '{"city": "Paris"}')
OSLO = ("get_weather", '{"city": "Oslo", "days": 2}')
TEXT = " 1 < 2, and <tool> is no call.\n"
CALL_TOKEN = "<｜tool▁call▁begin｜>"
CALL_END_TOKEN = "<｜tool▁call▁end｜>"

SAMPLES: Mapping[str, Sample] = {
    "hermes, one call": Sample(
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        "</tool_call>",
        "Let me see.",
        (PARIS,),
    ),
    "hermes, two calls": Sample(
        "hermes",
        '<tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call>\n<tool_call>'
        '{"arguments": {"city": "Oslo", "days": 2}, "name": "get_weather"}</tool_call>\n',
        "",
        (PARIS, OSLO),
    ),
    "hermes, nothing but text": Sample("hermes", TEXT, TEXT, ()),
    "hermes, arguments in a string": Sample(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        "",
        (PARIS,),
    ),
    "hermes, no arguments, no last mark": Sample(
        "hermes", '<tool_call>{"name": "now", "id": [1, 2.5e3]}', "", (("now", "{}"),)
    ),
    "hermes, an answer that was cut off": Sample(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa',
        "",
        (("get_weather", '{"city": "Pa'),),
    ),
    "mistral, a list": Sample(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]',
        "",
        (PARIS, OSLO),
    ),
    "mistral, names outside": Sample(
        "mistral",
        'Sure.[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi'
        '[ARGS]{"city": "Oslo", "days": 2}',
        "Sure.",
        (PARIS, OSLO),
    ),
    "llama3_json, one call": Sample(
        "llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", (PARIS,)
    ),
    "llama3_json, two behind the tag": Sample(
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}',
        "",
        (PARIS, OSLO),
    ),
    "deepseek_v3, two calls": Sample(
        "deepseek_v3",
        f"Well.<｜tool▁calls▁begin｜>{CALL_TOKEN}function<｜tool▁sep｜>get_weather\n```json\n"
        f'{{"city": "Paris"}}\n```{CALL_END_TOKEN}\n{CALL_TOKEN}function<｜tool▁sep｜>get_weather\n'
        f'```json\n{{"city": "Oslo", "days": 2}}\n```{CALL_END_TOKEN}<｜tool▁calls▁end｜>',
        "Well.",
        (PARIS, OSLO),
    ),
    "deepseek_v3, as of V3.1": Sample(
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{CALL_TOKEN}get_weather<｜tool▁sep｜>"
        f'{{"city": "Paris"}}{CALL_END_TOKEN}<｜tool▁calls▁end｜>',
        "",
        (PARIS,),
    ),
    "granite": Sample(
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "",
        (PARIS,),
    ),
    "pythonic": Sample(
        "pythonic",
        "[get_weather(city='Paris'), get_weather(city=\"Oslo\", days=2)]",
        "",
        (PARIS, OSLO),
    ),
    "pythonic, words of JSON and of Python": Sample(
        "pythonic",
        "```tool_code\n[f(a=[True, false], b={'k': null}, c=-1.5, d=')]\\'')]\n```",
        "",
        (("f", '{"a": [true, false], "b": {"k": null}, "c": -1.5, "d": ")]\'"}'),),
    ),
    "qwen3_coder": Sample(
        "qwen3_coder",
        "Yes.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n"
        '<parameter=limits>\n{"high": null}\n</parameter>\n<parameter=other>\n7\n</parameter>\n'
        "</function>\n</tool_call>",
        "Yes.",
        (
            (
                "get_weather",
                '{"city": "Paris", "days": 2, "hourly": true, "limits": {"high": null}, '
                '"other": "7"}',
            ),
        ),
    ),
    "qwen3_coder, no arguments": Sample(
        "qwen3_coder", "<function=now>\n</function>", "", (("now", "{}"),)
    ),
    "minimax_m2, a thought that the prompt began, and two calls": Sample(
        "minimax_m2",
        "Paris?\n</think>\n\nYes.\n<minimax:tool_call>\n"
        '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        "Yes.",
        (PARIS, OSLO),
        "Paris?\n",
        "qwen3",
        "]~b]ai\n<think>\n",
    ),
    "deepseek_v32, two calls": Sample(
        "deepseek_v32",
        "Yes.\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2'
        "</｜DSML｜parameter>\n"
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Yes.",
        (PARIS, OSLO),
    ),
    "lfm2, words and two calls": Sample(
        "lfm2",
        'Yes.<|tool_call_start|>[get_weather(city="Paris"), get_weather(city="Oslo", days=2)]'
        "<|tool_call_end|>",
        "Yes.",
        (PARIS, OSLO),
    ),
    "olmo3, two calls": Sample(
        "olmo3",
        'Yes.<function_calls>get_weather(city="Paris")\nget_weather(city="Oslo", days=2)'
        "</function_calls>",
        "Yes.",
        (PARIS, OSLO),
    ),
    "gemma4, a thought and two calls": Sample(
        "gemma4",
        "<|channel>thought\nParis?<channel|>Yes."
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
        '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
        "Yes.",
        (PARIS, OSLO),
        "\nParis?",
        "gemma4",
    ),
    "gemma4, a thought that the prompt ended": Sample(
        "gemma4", "Four.", "Four.", (), "", "gemma4", "model\n<|channel>thought\n<channel|>"
    ),
    "seed_oss, a thought and two calls": Sample(
        "seed_oss",
        "<seed:think>Paris?</seed:think>\nYes.\n\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
        "<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
        "Yes.",
        (PARIS, OSLO),
        "Paris?",
        "seed_oss",
    ),
    "seed_oss, a thought of no tokens": Sample(
        "seed_oss",
        "None.</seed:cot_budget_reflect></seed:think>Four.",
        "Four.",
        (),
        "None.</seed:cot_budget_reflect>",
        "seed_oss",
        "assistant\n<seed:think><seed:cot_budget_reflect>",
    ),
    "glm45, a thought and two calls": Sample(
        "glm45",
        "<think>Paris?</think>\nYes.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
        "Paris</arg_value>\n</tool_call>\n<tool_call>get_weather<arg_key>city</arg_key><arg_value>"
        "Oslo</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
        "Yes.",
        (PARIS, OSLO),
        "Paris?",
        "qwen3",
    ),
    "kimi_k2, a thought and a call": Sample(
        "kimi_k2",
        "<think>Paris?</think>Well.<|tool_calls_section_begin|><|tool_call_begin|>functions."
        'get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        "Well.",
        (PARIS,),
        "Paris?",
        "qwen3",
    ),
    "openai, a thought, a preamble and a call": Sample(
        "openai",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>"
        "commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "I look.",
        (PARIS,),
        "Need the weather.",
        "openai_gptoss",
    ),
    "openai, an answer": Sample(
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Four.<|return|>",
        "Four.",
        (),
        "Hm.",
        "openai_gptoss",
    ),
    "a thought before a call": Sample(
        "hermes",
        "<think>\nParis?\n</think>\n\n<tool_call>"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
        "",
        (PARIS,),
        "\nParis?\n",
        "qwen3",
    ),
    "a thought that the prompt began": Sample(
        "hermes", "So.</think>\n\nFour.", "Four.", (), "So.", "qwen3", "assistant\n<think>\n"
    ),
    "a thought that the prompt ended": Sample(
        "hermes", "Four.", "Four.", (), "", "deepseek_r1", "<think>\n\n</think>\n\n"
    ),
    "a thought without its first mark": Sample(
        "hermes", "So.</think>Four.", "Four.", (), "So.", "deepseek_r1", "assistant\n"
    ),
    "a thought that was cut off": Sample("hermes", "<think>So", "", (), "So", "qwen3"),
    "a thought of Granite": Sample(
        "granite",
        "Here is my thought process: 2+2. Here is my response: 4",
        "4",
        (),
        " 2+2. ",
        "granite",
    ),
    "a thought of Mistral": Sample(
        "mistral", "[THINK]Hm.[/THINK]Four.", "Four.", (), "Hm.", "mistral"
    ),
}
