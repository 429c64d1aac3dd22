"""Nothing in a body vanishes in silence: unknown names are noted in every object of it, and null is
the same as absent there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.router.recorded_agents import CHAT, MESSAGES, RESPONSES, RecordedCall, recorded_calls

from ferryman.errors import InvalidRequest
from ferryman_router.bodies.parsed_request import ParsedRequest
from ferryman_router.bodies.place import BodyPlace, BodyRules
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.intake.reader import BODY_KINDS

# The objects below these names are values of callers, in which nothing is a field.
VALUES = frozenset(
    "schema parameters input_schema json chat_template_kwargs arguments metadata logit_bias"
    " documents return".split()
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT = {"type": "text", "text": "a"}
CACHED = {**TEXT, "cache_control": {"type": "ephemeral"}}
BODIES: dict[str, tuple[Api, dict[str, Any]]] = {
    "chat": (
        Api.CHAT,
        {
            "messages": [
                {"role": "system", "content": [TEXT]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": [TEXT]},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stream": True,
            "stream_options": {"include_usage": True},
            "ferryman": {"parse_special": True},
        },
    ),
    "a form": (
        Api.CHAT,
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
            },
        },
    ),
    "completion": (Api.COMPLETION, {"prompt": "a", "structured_outputs": {"json": SCHEMA}}),
    "responses": (
        Api.RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "output_text", "text": "o"}],
                },
                {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
            ],
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "tools": [
                {"type": "function", **FUNCTION},
                {"type": "custom", "name": "g", "format": {"type": "text"}},
                {"type": "namespace", "name": "m", "tools": [{"type": "function", "name": "h"}]},
            ],
            "tool_choice": {"type": "function", "name": "h", "namespace": "m"},
        },
    ),
    "messages": (
        Api.MESSAGES,
        {
            "max_tokens": 3,
            "system": [CACHED],
            "messages": [
                {"role": "user", "content": [CACHED]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "tool_use", "id": "u", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "u", "content": [TEXT]}],
                },
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 1},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    ),
}
# Known objects whose own fields have no effect together with them.
WITHOUT_EFFECT = frozenset({"cache_control"})


def objects(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a body in which names are fields, with its place."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from objects(item, f"{path}[{index}]")
    if isinstance(value, dict):
        yield path, value
        for name, item in value.items():
            is_input = name == "input" and value.get("type") == "tool_use"
            if name not in VALUES | WITHOUT_EFFECT and not is_input:
                yield from objects(item, f"{path}.{name}" if path else name)


def parsed(api: Api, body: dict[str, Any]) -> ParsedRequest:
    return BODY_KINDS[api](body, BodyPlace.of_body())


@pytest.mark.parametrize(("api", "body"), BODIES.values(), ids=BODIES.keys())
def test_an_unknown_name_in_any_object_is_noted(api: Api, body: dict[str, Any]) -> None:
    num_objects = len(list(objects(body)))
    assert num_objects > 1
    for index in range(num_objects):
        changed = json.loads(json.dumps(body))
        path, inner = list(objects(changed))[index]
        inner["zzz"] = 1
        place = BodyPlace.of_body()
        BODY_KINDS[api](changed, place)
        assert [field.name for field in place.ignored.listed] == [f"{path}.zzz" if path else "zzz"]
        with pytest.raises(InvalidRequest, match="zzz is no known field"):
            BODY_KINDS[api](changed, BodyPlace.of_body(BodyRules(is_strict=True)))


@pytest.mark.parametrize(("api", "body"), BODIES.values(), ids=BODIES.keys())
def test_null_in_any_object_is_absent(api: Api, body: dict[str, Any]) -> None:
    """Also under a name that another object of the body knows, and has to have."""
    body = {**body, "seed": 7}
    expected = parsed(api, body)
    for index in range(len(list(objects(body)))):
        changed = json.loads(json.dumps(body))
        _, inner = list(objects(changed))[index]
        absent = [name for name in ("zzz", "strict", "cache_control", "name") if name not in inner]
        inner.update(dict.fromkeys(absent))
        place = BodyPlace.of_body(BodyRules(is_strict=True))
        assert BODY_KINDS[api](changed, place) == expected
        assert place.ignored.listed == ()


APIS = {CHAT: Api.CHAT, RESPONSES: Api.RESPONSES, MESSAGES: Api.MESSAGES}
RECORDED = [call for call in recorded_calls() if call.endpoint in APIS]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda call: call.name)
def test_nulls_in_what_agents_send_change_nothing(recorded: RecordedCall) -> None:
    api, body = APIS[recorded.endpoint], {**recorded.body, "seed": 7}
    changed = json.loads(json.dumps(body))
    for _, inner in list(objects(changed)):
        inner["zzz"] = None
    same = parsed(api, changed)
    assert replace(same, echo="") == replace(parsed(api, body), echo="")


NOTED: dict[str, tuple[Api, dict[str, Any], list[str]]] = {
    "a schema of a free text": (
        Api.CHAT,
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "text", "json_schema": {"schema": SCHEMA}},
        },
        ["response_format.json_schema.schema (response_format.type is text)"],
    ),
    "a schema of a response's free text": (
        Api.RESPONSES,
        {"input": "a", "text": {"format": {"type": "text", "schema": SCHEMA}}},
        ["text.format.schema (text.format.type is text)"],
    ),
    "a name of any tool": (
        Api.MESSAGES,
        {
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "name": "f"},
        },
        ["tool_choice.name (the type is any)"],
    ),
    "a format that is not known": (
        Api.MESSAGES,
        {
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "a"}],
            "output_config": {
                "format": {
                    "type": "json_schema",
                    "schema": {"items": {"anyOf": [{}, {"type": "string", "format": "isbn"}]}},
                }
            },
        },
        ["output_config.format.schema.items.anyOf[1].format (format isbn is not known)"],
    ),
    "one in a text of a schema": (
        Api.COMPLETION,
        {"prompt": "a", "guided_json": '{"type": "string", "format": "color"}'},
        ["guided_json.format (format color is not known)"],
    ),
}


@pytest.mark.parametrize(("api", "body", "noted"), NOTED.values(), ids=NOTED.keys())
def test_a_known_field_without_effect_is_noted(
    api: Api, body: dict[str, Any], noted: list[str]
) -> None:
    for is_strict in (False, True):
        place = BodyPlace.of_body(BodyRules(is_strict=is_strict))
        BODY_KINDS[api](body, place)
        assert [field.shown for field in place.ignored.listed] == noted
