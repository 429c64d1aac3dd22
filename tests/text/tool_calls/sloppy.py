"""Answers as models really wrote them, by the public report that shows each: tags that are missing
or stray, values whose type stands in a schema, payloads that are empty, JSON that is nearly JSON.

A source is the repository and number of an issue or a pull request on GitHub; cases without one
are siblings of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ferryman.text.tool_calls.value_types import parameter_types

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
    "shell": {"type": "object", "properties": {"cmd": {"type": "string"}}},
    "get-weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "typed": {
        "type": "object",
        "properties": {
            "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "level": {"$ref": "#/$defs/Level"},
            "mode": {"enum": ["1", "auto"]},
            "tags": {"type": ["array", "null"], "items": {"type": "string"}},
            "is_deep": {"type": "boolean"},
            "ratio": {"oneOf": [{"const": 1}, {"type": "number"}]},
            "place": {"allOf": [{"$ref": "#/definitions/Place"}]},
            "version": {"anyOf": [{"type": "string"}, {"type": "number"}]},
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tree": {"$ref": "#/$defs/Tree"},
            "any": {},
            "plain": {"type": "string"},
        },
        "$defs": {
            "Level": {"enum": [1, 2, 3]},
            "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "array"}]},
        },
        "definitions": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
}
TYPES = {name: parameter_types(schema) for name, schema in TOOLS.items()}


class Sloppy(NamedTuple):
    """A text in a format, what it says, and where it was seen."""

    tools: str
    source: str
    text: str
    calls: tuple[tuple[str, str], ...]
    content: str = ""


A1 = ("f", '{"a": "1"}')
B2 = ("f", '{"b": "2"}')
_JSON_A1 = '{"name": "f", "arguments": {"a": "1"}}'
_JSON_B2 = '{"name": "f", "arguments": {"b": "2"}}'
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

HERMES = {
    "a tag within a string": Sloppy(
        "hermes",
        "vllm-project/vllm#45167",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> {\\"x\\""}}</tool_call>',
        (("f", '{"a": "</tool_call> {\\"x\\""}'),),
    ),
    "the first brace never closed": Sloppy(
        "hermes",
        "",
        '<tool_call>\n{"name": "f", "arguments": {"a": "1"}\n</tool_call> So.',
        (A1,),
        "So.",
    ),
    "braces to spare": Sloppy(
        "hermes",
        "ml-explore/mlx-lm#1264",
        f"<tool_call>\n{_JSON_A1}}}}}\n</tool_call>",
        (A1,),
    ),
    "two calls, one end": Sloppy(
        "hermes",
        "vllm-project/vllm#17790",
        f"<tool_call>\n{_JSON_A1}\n{_JSON_B2}\n</tool_call>",
        (A1, B2),
    ),
    "a call begins before the last one ended": Sloppy(
        "hermes",
        "minpeter/ai-sdk-tool-call-middleware#299",
        f"<tool_call>\n{_JSON_A1}\n<tool_call>\n{_JSON_B2}\n</tool_call>",
        (A1, B2),
    ),
    "the end twice": Sloppy(
        "hermes", "vortico/flama#259", f"<tool_call>{_JSON_A1}</tool_call></tool_call>\n", (A1,)
    ),
    "no beginning": Sloppy(
        "hermes", "NousResearch/hermes-agent#742", f"{_JSON_A1}</tool_call>", (A1,)
    ),
    "nothing but the object": Sloppy(
        "hermes", "NousResearch/hermes-agent#5867", f"\n{_JSON_A1}", (A1,)
    ),
    "a fence": Sloppy("hermes", "vllm-project/vllm#47878", f"```json\n{_JSON_A1}\n```", (A1,)),
    "a fence behind words": Sloppy(
        "hermes",
        "ardanlabs/kronk#950",
        f"I look.\n```json\n{_JSON_A1}\n{_JSON_B2}\n```\nThen I tell.",
        (A1, B2),
        "I look.Then I tell.",
    ),
    "a fence within the tags": Sloppy(
        "hermes",
        "",
        f"<tool_call>\n```json\n{_JSON_A1}\n```\n</tool_call>",
        (A1,),
    ),
    "a list within the tags": Sloppy(
        "hermes",
        "",
        f"<tool_call>[{_JSON_A1}, {_JSON_B2}]</tool_call>",
        (A1, B2),
    ),
    "the tags of another model": Sloppy(
        "hermes",
        "vllm-project/vllm#26561",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        (A1,),
    ),
    "no arguments": Sloppy(
        "hermes",
        "vllm-project/vllm#28806",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
        f"<tool_call>{_JSON_A1}</tool_call>",
        (("now", "{}"), A1),
    ),
    "an empty string of arguments": Sloppy(
        "hermes",
        "vllm-project/vllm#19419",
        '<tool_call>{"name": "now", "arguments": ""}</tool_call>',
        (("now", "{}"),),
    ),
    "a shell's braces": Sloppy(
        "hermes",
        "vllm-project/vllm#21544",
        '<tool_call>{"name": "shell", "arguments": {"cmd": "mkdir -p test/{test1,test2"}}'
        "</tool_call>",
        (("shell", '{"cmd": "mkdir -p test/{test1,test2"}'),),
    ),
    "a backslash that escapes nothing": Sloppy(
        "hermes",
        "ggml-org/llama.cpp#13825",
        '<tool_call>{"name": "shell", "arguments": {"cmd": "grep \'^\\*\\|\\d\' C:\\Users"}}'
        "</tool_call>",
        (("shell", '{"cmd": "grep \'^\\\\*\\\\|\\\\d\' C:\\\\Users"}'),),
    ),
    "an escape that breaks off": Sloppy(
        "hermes",
        "anthropics/claude-code#79339",
        '<tool_call>{"name": "f", "arguments": {"a": "\\u00e9\\u로"}}</tool_call>',
        (("f", '{"a": "\\u00e9\\\\u로"}'),),
    ),
    "single quotes and Python's words": Sloppy(
        "hermes",
        "NousResearch/atropos#479",
        "<tool_call>{'name': 'f', 'arguments': {'a': 'it\\'s \"so\"', 'c': [True, None]}}"
        "</tool_call>",
        (("f", '{"a": "it\'s \\"so\\"", "c": [true, null]}'),),
    ),
    "an apostrophe in a string": Sloppy(
        "hermes",
        "NousResearch/atropos#478",
        '<tool_call>{"name": "f", "arguments": {"a": "what\'s up"}}</tool_call>',
        (("f", '{"a": "what\'s up"}'),),
    ),
    "raw line breaks and tabs": Sloppy(
        "hermes",
        "minpeter/ai-sdk-tool-call-middleware#298",
        '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty"}}</tool_call>',
        (("f", '{"a": "x\\n\\ty"}'),),
    ),
    "a comma before the end": Sloppy(
        "hermes",
        "",
        '<tool_call>{"name": "f", "arguments": {"a": "1", "c": [1, ], }, }</tool_call>',
        (("f", '{"a": "1", "c": [1]}'),),
    ),
    "a function within the object": Sloppy(
        "hermes",
        "",
        '<tool_call>{"type": "function", "function": ' + _JSON_A1 + "}</tool_call>",
        (A1,),
    ),
    "text behind the calls": Sloppy(
        "hermes",
        "vllm-project/vllm#56265",
        f"Well. <tool_call>{_JSON_A1}</tool_call> It runs, 1 < 2.",
        (A1,),
        "Well.It runs, 1 < 2.",
    ),
}

TAGS = {
    "an integer or null": Sloppy(
        "qwen3_coder",
        "vllm-project/vllm#37831",
        "<tool_call>\n<function=typed>\n<parameter=count>\n5\n</parameter>\n</function>\n"
        "</tool_call>",
        (("typed", '{"count": 5}'),),
    ),
    "null for it": Sloppy(
        "qwen3_coder",
        "NVIDIA/Megatron-LM#7320",
        "<tool_call><function=typed><parameter=count>null</parameter><parameter=plain>null"
        "</parameter></function></tool_call>",
        (("typed", '{"count": null, "plain": "null"}'),),
    ),
    "a reference to an enum of numbers": Sloppy(
        "qwen3_coder",
        "vllm-project/vllm#37652",
        "<tool_call><function=typed><parameter=level>2</parameter></function></tool_call>",
        (("typed", '{"level": 2}'),),
    ),
    "an enum of texts": Sloppy(
        "qwen3_coder",
        "",
        "<tool_call><function=typed><parameter=mode>1</parameter></function></tool_call>",
        (("typed", '{"mode": "1"}'),),
    ),
    "a list or null": Sloppy(
        "qwen3_coder",
        "sgl-project/sglang#30832",
        '<tool_call><function=typed><parameter=tags>["markdown"]</parameter><parameter=is_deep>'
        "True</parameter></function></tool_call>",
        (("typed", '{"tags": ["markdown"], "is_deep": true}'),),
    ),
    "a list with Python's quotes": Sloppy(
        "qwen3_coder",
        "waybarrios/vllm-mlx#63",
        "<tool_call><function=typed><parameter=tags>['a', \"it's\"]</parameter><parameter=place>"
        "{'x': 14, 'y': None}</parameter></function></tool_call>",
        (("typed", '{"tags": ["a", "it\'s"], "place": {"x": 14, "y": null}}'),),
    ),
    "a list in a string": Sloppy(
        "qwen3_coder",
        "vllm-project/vllm#36032",
        '<tool_call><function=typed><parameter=tags>"[\\"a\\"]"</parameter></function></tool_call>',
        (("typed", '{"tags": ["a"]}'),),
    ),
    "a backslash in a list": Sloppy(
        "qwen3_coder",
        "Neroued/ninfer#101",
        "<tool_call><function=typed><parameter=tags>[\"grep -n '^\\*'\"]</parameter></function>"
        "</tool_call>",
        (("typed", '{"tags": ["grep -n \'^\\\\*\'"]}'),),
    ),
    "words in other cases": Sloppy(
        "qwen3_coder",
        "PrimeIntellect-ai/renderers#47",
        "<function=typed><parameter=is_deep>FALSE</parameter><parameter=count>3.0</parameter>"
        "<parameter=ratio>1.10</parameter><parameter=version>1.10</parameter></function>",
        (("typed", '{"is_deep": false, "count": 3, "ratio": 1.1, "version": "1.10"}'),),
    ),
    "text for what is no text": Sloppy(
        "qwen3_coder",
        "NVIDIA/Megatron-LM#7320",
        "<function=typed><parameter=is_deep>perhaps</parameter><parameter=count>two</parameter>"
        "</function>",
        (("typed", '{"is_deep": "perhaps", "count": "two"}'),),
    ),
    "quotes of a text that may be null": Sloppy(
        "qwen3_coder",
        "",
        '<function=typed><parameter=name>"use strict"</parameter><parameter=tree>[1]</parameter>'
        "<parameter=any>7</parameter></function>",
        (("typed", '{"name": "\\"use strict\\"", "tree": [1], "any": 7}'),),
    ),
    "spaces that mean something": Sloppy(
        "qwen3_coder",
        "vllm-project/vllm#48753",
        "<tool_call>\n<function=f>\n<parameter=a>\n    if x:\n        return 1\n\n</parameter>\n"
        "<parameter=b>  y </parameter>\n</function>\n</tool_call>",
        (("f", '{"a": "    if x:\\n        return 1\\n", "b": "  y "}'),),
    ),
    "no outer tag, its end": Sloppy(
        "qwen3_coder",
        "ollama/ollama#17742",
        "I run it.\n\n<function=shell>\n<parameter=cmd>\necho LEAK_TEST\n</parameter>\n"
        "</function>\n</tool_call>",
        (("shell", '{"cmd": "echo LEAK_TEST"}'),),
        "I run it.",
    ),
    "a value without its end, a parameter next": Sloppy(
        "qwen3_coder",
        "ollama/ollama#17914",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        (("f", '{"a": "1", "b": "2"}'),),
    ),
    "a value without its end, the function's next": Sloppy(
        "qwen3_coder",
        "ollama/ollama#17276",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=f>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        (A1, B2),
    ),
    "a value without any end": Sloppy(
        "qwen3_coder",
        "ollama/ollama#17914",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n",
        (A1,),
    ),
    "no end of the function": Sloppy(
        "qwen3_coder",
        "",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call> So.",
        (A1,),
        "So.",
    ),
    "a call begins before the last one ended": Sloppy(
        "qwen3_coder",
        "",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<tool_call>\n<function=f>\n"
        "<parameter=b>\n2\n</parameter>\n<function=now>\n</function>\n</tool_call>",
        (A1, B2, ("now", "{}")),
    ),
    "a name without its bracket": Sloppy(
        "qwen3_coder",
        "vllm-project/vllm#39771",
        "<tool_call>\n<function=f>\n<parameter=a\n1\n</parameter>\n</function>\n</tool_call>",
        (A1,),
    ),
    "a function's name without its bracket": Sloppy(
        "qwen3_coder",
        "ml-explore/mlx-lm#1881",
        "<tool_call>\n<function=f\n<parameter=a>1</parameter>\n</function>\n</tool_call>",
        (A1,),
    ),
    "no parameters, no ends": Sloppy(
        "qwen3_coder",
        "NVIDIA/TensorRT-LLM#19227",
        "<tool_call>\n<function=now>\n</tool_call>",
        (("now", "{}"),),
    ),
    "an end to spare": Sloppy(
        "qwen3_coder",
        "vortico/flama#259",
        "<tool_call>\n<function=f>\n<parameter=a>1</parameter></parameter>\n</function>\n"
        "</tool_call>\n</tool_call>",
        (A1,),
    ),
    "words between the tags": Sloppy(
        "qwen3_coder",
        "",
        "<tool_call>\n<function=f>\n<parameter=a>1</parameter> and <parameter=b>2</parameter>\n"
        "</function>\n</tool_call> So.",
        (("f", '{"a": "1", "b": "2"}'),),
        "andSo.",
    ),
    "JSON between the tags": Sloppy("qwen3_coder", "", f"<tool_call>{_JSON_A1}</tool_call>", (A1,)),
    "JSON behind the function": Sloppy(
        "qwen3_coder",
        "InternLM/lmdeploy#2737",
        '<tool_call><function=f>{"a": "1"}</function></tool_call>',
        (A1,),
    ),
    "markup in a value": Sloppy(
        "qwen3_coder",
        "",
        "<function=f><parameter=a>see <function=x> and <parameter=y></parameter></function>",
        (("f", '{"a": "see <function=x> and <parameter=y>"}'),),
    ),
    "a tag that is spoken of": Sloppy(
        "qwen3_coder",
        "lmstudio-ai/lmstudio-bug-tracker#1592",
        "Some models use `<function=...>`, others <tool_call>.",
        (),
        "Some models use `<function=...>`, others <tool_call>.",
    ),
}

MISTRAL = {
    "calls side by side": Sloppy(
        "mistral",
        "ml-explore/mlx-lm#1448",
        '[TOOL_CALLS]f[ARGS]{"a": "1"}[TOOL_CALLS]f[ARGS]{"b": "2"}\n\nI look.',
        (A1, B2),
        "I look.",
    ),
    "a list with ids": Sloppy(
        "mistral",
        "ml-explore/mlx-lm#1643",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "1"}, "id": "abcdefghi"}]',
        (A1,),
    ),
    "arguments in a string": Sloppy(
        "mistral",
        "ml-explore/mlx-lm#1394",
        '[TOOL_CALLS] [{"name": "f", "arguments": "{\\"a\\": \\"1\\"}"}]',
        (A1,),
    ),
    "an object instead of a list": Sloppy("mistral", "", f"[TOOL_CALLS]{_JSON_A1}", (A1,)),
    "objects behind commas": Sloppy(
        "mistral", "", f"[TOOL_CALLS] {_JSON_A1}, {_JSON_B2}", (A1, B2)
    ),
    "no mark": Sloppy(
        "mistral", "mistralai/mistral-common#73", f"[{_JSON_A1}, {_JSON_B2}]", (A1, B2)
    ),
    "a quote that is escaped as in code": Sloppy(
        "mistral",
        "ggml-org/llama.cpp#17928",
        '[TOOL_CALLS]f[ARGS]{"a": "r\'\\\'[^\\"]\\\'"}',
        (("f", '{"a": "r\'\'[^\\"]\'"}'),),
    ),
    "no arguments": Sloppy("mistral", "", "[TOOL_CALLS]now", (("now", "{}"),)),
    "no arguments behind the mark": Sloppy(
        "mistral", "", "[TOOL_CALLS]now[ARGS]", (("now", "{}"),)
    ),
    "the mark spoken of": Sloppy(
        "mistral",
        "",
        "[TOOL_CALLS] begins a call {see}",
        (),
        "[TOOL_CALLS] begins a call {see}",
    ),
}

LLAMA = {
    "a semicolon without a space": Sloppy(
        "llama3_json",
        "ai-dynamo/dynamo#9536",
        '{"name": "f", "parameters": {"a": "1"}};{"name": "f", "parameters": {"b": "2"}}',
        (A1, B2),
    ),
    "objects on lines": Sloppy(
        "llama3_json",
        "",
        '{"name": "f", "parameters": {"a": "1"}}\n{"name": "f", "parameters": {"b": "2"}}\n',
        (A1, B2),
    ),
    "objects within": Sloppy(
        "llama3_json",
        "raullenchai/Rapid-MLX#921",
        '<|python_tag|>{"name": "f", "parameters": {"a": {"x": {"y": 1}}}}',
        (("f", '{"a": {"x": {"y": 1}}}'),),
    ),
    "an answer about somebody": Sloppy(
        "llama3_json",
        "raullenchai/Rapid-MLX#703",
        '{"name": "Alice", "age": 7}',
        (),
        '{"name": "Alice", "age": 7}',
    ),
    "a type before the name": Sloppy(
        "llama3_json",
        "",
        '{"type": "function", "name": "f", "parameters": {"a": "1"}}',
        (A1,),
    ),
    "a tag with the name": Sloppy(
        "llama3_json",
        "raullenchai/Rapid-MLX#703",
        '<function=f>{"a": "1"}</function>',
        (A1,),
    ),
    "built-in code": Sloppy(
        "llama3_json",
        "unslothai/unsloth#5620",
        '<|python_tag|>foo.call(payload={"name": "f", "parameters": {}})',
        (),
        '<|python_tag|>foo.call(payload={"name": "f", "parameters": {}})',
    ),
    "a fence": Sloppy("llama3_json", "", f"```json\n{_JSON_A1}\n```", (A1,)),
}

GRANITE = {
    "braces to spare": Sloppy(
        "granite", "ml-explore/mlx-lm#1264", f"<tool_call>[{_JSON_A1}]}}}}", (A1,)
    ),
    "an object instead of a list": Sloppy("granite", "", f"<|tool_call|>{_JSON_A1}", (A1,)),
    "no mark": Sloppy("granite", "", f"[{_JSON_A1}]", (A1,)),
    "a colon and an escape in a string": Sloppy(
        "granite",
        "ggml-org/llama.cpp#16465",
        '<|tool_call|>[{"name": "f", "arguments": {"a": "x: \\u00e9"}}]',
        (("f", '{"a": "x: \\u00e9"}'),),
    ),
    "tags for its ends": Sloppy("granite", "", f"<tool_call>{_JSON_A1}</tool_call>", (A1,)),
}

DEEPSEEK = {
    "an end that is no string": Sloppy(
        "deepseek_v3",
        "vllm-project/vllm#48342",
        f'{CALLS}{CALL}function{SEPARATOR}f\n```json\n{{"a": 123}}\n```{CALL_END}{CALLS_END}',
        (("f", '{"a": 123}'),),
    ),
    "line breaks between the marks": Sloppy(
        "deepseek_v31",
        "raullenchai/Rapid-MLX#795",
        f'{CALLS}\n{CALL}function{SEPARATOR}f\n```json\n{{"a": "1"}}\n```{CALL_END}\n{CALLS_END}',
        (A1,),
    ),
    "text behind the calls": Sloppy(
        "deepseek_v3",
        "vllm-project/vllm#56263",
        f'{CALLS}{CALL}f{SEPARATOR}{{"a": "1"}}{CALL_END}{CALLS_END}So.',
        (A1,),
        "So.",
    ),
    "a call without its end": Sloppy(
        "deepseek_v3",
        "",
        f'{CALLS}{CALL}f{SEPARATOR}{{"a": "1"}}{CALL}f{SEPARATOR}{{"b": "2"}}{CALLS_END}',
        (A1, B2),
    ),
    "a fence without its end": Sloppy(
        "deepseek_v3",
        "",
        f'{CALL}function{SEPARATOR}f\n```json\n{{"a": "1"}}{CALL_END}{CALLS_END}',
        (A1,),
    ),
    "no fence": Sloppy(
        "deepseek_v3",
        "",
        f'{CALL}function{SEPARATOR}f\n{{"a": "1"}}{CALL_END}',
        (A1,),
    ),
    "no arguments": Sloppy(
        "deepseek_v3",
        "",
        f"{CALLS}{CALL}now{SEPARATOR}{CALL_END}{CALLS_END}",
        (("now", "{}"),),
    ),
    "raw line breaks": Sloppy(
        "deepseek_v3",
        "ai-dynamo/dynamo#4253",
        f'{CALL}f{SEPARATOR}{{\n  "a": "x\ny"\n}}{CALL_END}',
        (("f", '{"a": "x\\ny"}'),),
    ),
    "no call between the marks": Sloppy(
        "deepseek_v3",
        "",
        f"{CALLS}{CALL}I do not know.{CALL_END}{CALLS_END}",
        (),
        f"{CALLS}{CALL}I do not know.{CALL_END}{CALLS_END}",
    ),
}

HARMONY_START = "<|start|>assistant"
HARMONY = {
    "the recipient behind the role": Sloppy(
        "openai",
        "ggml-org/llama.cpp#15181",
        f"<|channel|>analysis<|message|><|end|>{HARMONY_START} to=functions.f<|channel|>commentary"
        ' <|constrain|>json<|message|>{ "a": "1" }<|call|>',
        (A1,),
    ),
    "the recipient first": Sloppy(
        "openai",
        "",
        ' to=functions.f<|channel|>commentary json<|message|>{"a": "1"}<|call|>',
        (A1,),
    ),
    "the channel of thoughts": Sloppy(
        "openai",
        "waybarrios/vllm-mlx#562",
        '<|channel|>analysis to=functions.f code<|message|>\n{"a": "1"}<|call|>',
        (A1,),
    ),
    "json glued to the name": Sloppy(
        "openai",
        "ggml-org/llama.cpp#15158",
        '<|channel|>commentary to=functions.shelljson<|message|>{"cmd": "ls"}<|call|>',
        (("shell", '{"cmd": "ls"}'),),
    ),
    "no namespace": Sloppy(
        "openai",
        "",
        '<|channel|>commentary to=f <|constrain|>json<|message|>{"a": "1"}<|call|>',
        (A1,),
    ),
    "no arguments": Sloppy(
        "openai",
        "",
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>",
        (("now", "{}"),),
    ),
    "messages without their ends": Sloppy(
        "openai",
        "",
        f'<|channel|>commentary to=functions.f<|message|>{{"a": "1"}}{HARMONY_START}'
        "<|channel|>final<|message|>So.",
        (A1,),
        "So.",
    ),
    "a call without its end": Sloppy(
        "openai",
        "lablup/mlxcel#658",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "1"}',
        (A1,),
    ),
    "spaces that are none of ASCII": Sloppy(
        "openai",
        "ggml-org/llama.cpp#15181",
        '<|channel|>commentary\u00a0to=functions.f\u00a0json<|message|>{"a": "1"}<|call|>',
        (A1,),
    ),
    "no channel": Sloppy("openai", "", f"{HARMONY_START}<|message|>Four.<|return|>", (), "Four."),
}

PYTHONIC = {
    "lists and objects within": Sloppy(
        "pythonic",
        "vllm-project/vllm#30722",
        "[f(a=['x', {'y': [1]}], b=\"]\")]",
        (("f", '{"a": ["x", {"y": [1]}], "b": "]"}'),),
    ),
    "no last bracket": Sloppy("pythonic", "vllm-project/vllm#30722", "[f(a='1')", (A1,)),
    "a negative number": Sloppy(
        "pythonic", "sgl-project/sglang#27910", "[f(a=-5)]", (("f", '{"a": -5}'),)
    ),
    "a line break in a string": Sloppy(
        "pythonic",
        "vllm-project/vllm#48171",
        "[shell(cmd='cat > f.py << EOF\nx\nEOF')]",
        (("shell", '{"cmd": "cat > f.py << EOF\\nx\\nEOF"}'),),
    ),
    "a string that ends in a backslash": Sloppy(
        "pythonic",
        "vllm-project/vllm#48171",
        "[f(a='pattern \\\\')]",
        (("f", '{"a": "pattern \\\\"}'),),
    ),
    "a tuple": Sloppy(
        "pythonic", "vllm-project/vllm#48171", "[f(a=(800, 600))]", (("f", '{"a": [800, 600]}'),)
    ),
    "a parameter that is a word of Python": Sloppy(
        "pythonic",
        "vllm-project/vllm#48171",
        "[f(from=1, a='2')]",
        (("f", '{"from": 1, "a": "2"}'),),
    ),
    "a hyphen in the name": Sloppy(
        "pythonic",
        "ogx-ai/ogx#1807",
        "[get-weather(city='Oslo'), now()]",
        (("get-weather", '{"city": "Oslo"}'), ("now", "{}")),
    ),
    "quotes and words of Python": Sloppy(
        "pythonic",
        "lablup/mlxcel#1306",
        "[f(a='O\\'Brien, \"x\"', b=None)]",
        (("f", '{"a": "O\'Brien, \\"x\\"", "b": null}'),),
    ),
    "lists on lines": Sloppy("pythonic", "", "[f(a='1')]\n[f(b='2')]\nSo.", (A1, B2), "So."),
    "calls on lines in a fence": Sloppy(
        "pythonic",
        "",
        "```tool_code\nf(a='1')\nf(b='2')\n```",
        (A1, B2),
    ),
    "a list that is none of calls": Sloppy(
        "pythonic", "", "[see(page=1)] tells more", (), "[see(page=1)] tells more"
    ),
}

SLOPPY = {
    f"{cases}, {name}": case
    for cases, group in {
        "hermes": HERMES,
        "tags": TAGS,
        "mistral": MISTRAL,
        "llama": LLAMA,
        "granite": GRANITE,
        "deepseek": DEEPSEEK,
        "harmony": HARMONY,
        "pythonic": PYTHONIC,
    }.items()
    for name, case in group.items()
}
