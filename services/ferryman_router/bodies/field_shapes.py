"""The JSON Schema of each field that a body may have, with an example, for `/openapi.json`.

The names are those of `api_fields`, the limits those by which the fields are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferryman.schedule.request import MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from ferryman_router.bodies.answer_fields import MAX_CHOICES, MAX_PRIORITY, MAX_SALT_CHARS
from ferryman_router.bodies.template_fields import EFFORTS, MAX_DOCUMENTS
from ferryman_router.bodies.tool_fields import MAX_TOOLS

Shape = Mapping[str, Any]

_MAX_INT = 2**31 - 1


def _whole(low: int, high: int, example: int) -> Shape:
    return {"type": "integer", "minimum": low, "maximum": high, "examples": [example]}


def _real(low: float, high: float, example: float) -> Shape:
    return {"type": "number", "minimum": low, "maximum": high, "examples": [example]}


def _object(example: Mapping[str, Any]) -> Shape:
    return {"type": "object", "examples": [example]}


def _list(items: Shape, most: int, example: list[Any]) -> Shape:
    return {"type": "array", "items": items, "maxItems": most, "examples": [example]}


def _either(*types: str, example: Any) -> Shape:
    return {"type": list(types), "examples": [example]}


_FLAG: Shape = {"type": "boolean", "examples": [False]}
_TEXT: Shape = {"type": "string", "examples": ["a"]}
_ANYTHING: Shape = {}
_TOKEN_ID: Shape = {"type": "integer", "minimum": 0}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FUNCTION = {"name": "f", "description": "does it", "parameters": _SCHEMA}
_USER = {"role": "user", "content": "hello"}
_STOP: Shape = {**_either("string", "array", example=["end"]), "maxItems": MAX_STOP_STRINGS}

SHAPES: Mapping[str, Shape] = {
    "model": {**_TEXT, "examples": ["ferryman-demo"]},
    "messages": {
        "type": "array",
        "items": {"type": "object"},
        "minItems": 1,
        "examples": [[_USER]],
    },
    "prompt": _either("string", "array", example="hello"),
    "input": _either("string", "array", example="hello"),
    "instructions": _TEXT,
    "system": _either("string", "array", example="Be short."),
    "max_tokens": _whole(1, _MAX_INT, 16),
    "max_completion_tokens": _whole(1, _MAX_INT, 16),
    "max_output_tokens": _whole(1, _MAX_INT, 16),
    "temperature": _real(0, 100, 0.5),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "examples": [0.5]},
    "top_k": _whole(-1, _MAX_INT, 20),
    "min_p": _real(0, 1, 0.1),
    "repetition_penalty": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 100,
        "examples": [1.1],
    },
    "presence_penalty": _real(-2, 2, 0.5),
    "frequency_penalty": _real(-2, 2, 0.5),
    "seed": _whole(-(2**63), 2**63 - 1, 7),
    "stop": _STOP,
    "stop_sequences": _STOP,
    "stop_token_ids": _list(_TOKEN_ID, MAX_STOP_TOKEN_IDS, [7]),
    "ignore_eos": _FLAG,
    "logprobs": _whole(0, MAX_LOGPROBS, 2),
    "top_logprobs": _whole(0, MAX_LOGPROBS, 0),
    "prompt_logprobs": _whole(0, MAX_LOGPROBS, 0),
    "stream": _FLAG,
    "stream_options": _object({}),
    "tools": _list({"type": "object"}, MAX_TOOLS, [{"type": "function", "function": _FUNCTION}]),
    "tool_choice": _either("string", "object", example="auto"),
    "parallel_tool_calls": _FLAG,
    "response_format": _object({"type": "json_object"}),
    "structured_outputs": _object({"choice": ["a", "b"]}),
    "guided_json": _either("object", "string", example=_SCHEMA),
    "guided_regex": _TEXT,
    "guided_choice": _list({"type": "string"}, 1024, ["a", "b"]),
    "guided_grammar": {**_TEXT, "examples": ['root ::= "a"']},
    "json_schema": _either("object", "string", example=_SCHEMA),
    "regex": _TEXT,
    "ebnf": {**_TEXT, "examples": ['root ::= "a"']},
    "n": _whole(1, MAX_CHOICES, 1),
    "best_of": _whole(1, MAX_CHOICES, 1),
    "echo": _FLAG,
    "suffix": {"type": "string", "maxLength": 0, "examples": [""]},
    "logit_bias": _object({"7": 1.5}),
    "min_tokens": _whole(0, _MAX_INT, 0),
    "allowed_token_ids": _list(_TOKEN_ID, 8192, [7]),
    "bad_words": _list({"type": "string"}, 64, ["a"]),
    "truncate_prompt_tokens": _whole(-1, _MAX_INT, 100),
    "include_stop_str_in_output": _FLAG,
    "skip_special_tokens": _FLAG,
    "return_token_ids": _FLAG,
    "return_tokens_as_token_ids": _FLAG,
    "add_special_tokens": _FLAG,
    "add_generation_prompt": _FLAG,
    "continue_final_message": _FLAG,
    "documents": _list({"type": "object"}, MAX_DOCUMENTS, [{"text": "a"}]),
    "chat_template_kwargs": _object({"enable_thinking": False}),
    "reasoning_effort": {"type": "string", "enum": list(EFFORTS), "examples": ["low"]},
    "include_reasoning": _FLAG,
    "priority": _whole(-MAX_PRIORITY, MAX_PRIORITY, 0),
    "cache_salt": {**_TEXT, "minLength": 1, "maxLength": MAX_SALT_CHARS},
    "ferryman": _object({"parse_special": False}),
    "include": _list({"type": "string"}, 8, ["message.output_text.logprobs"]),
    "text": _object({"format": {"type": "text"}}),
    "reasoning": _object({"effort": "low"}),
    "metadata": _object({"a": "b"}),
    "store": {"const": False, "examples": [False]},
    "background": {"const": False, "examples": [False]},
    "truncation": {"type": "string", "enum": ["disabled"], "examples": ["disabled"]},
    "thinking": _object({"type": "enabled", "budget_tokens": 1024}),
    "output_config": _object({"effort": "low"}),
    "return_token_strs": _FLAG,
    "tokens": _list(_TOKEN_ID, 1 << 19, [7]),
}
# Where a field of one name has another form.
OF_CHAT: Mapping[str, Shape] = {
    "logprobs": _FLAG,
    "add_special_tokens": {"const": False, "examples": [False]},
}
OF_RESPONSES: Mapping[str, Shape] = {
    "tools": _list({"type": "object"}, MAX_TOOLS, [{"type": "function", **_FUNCTION}])
}
OF_MESSAGES: Mapping[str, Shape] = {
    "tools": _list({"type": "object"}, MAX_TOOLS, [{"name": "f", "input_schema": _SCHEMA}]),
    "tool_choice": _object({"type": "auto"}),
    "metadata": _ANYTHING,
}


def body_schema(
    names: frozenset[str],
    required: tuple[str, ...],
    without_effect: Mapping[str, str],
    others: Mapping[str, Shape],
) -> dict[str, Any]:
    """The schema of a body with these fields; any field may be null, which is leaving it out."""
    properties: dict[str, Any] = {}
    for name in sorted(names):
        if name in without_effect:
            properties[name] = {"description": f"Without effect: {without_effect[name]}."}
        else:
            properties[name] = _nullable(others.get(name) or SHAPES[name])
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _nullable(shape: Shape) -> Shape:
    return {"anyOf": [shape, {"type": "null"}]} if shape else {}
