"""Calls that a request demands, in all three protocols: whole, streamed, cut, and their grammar."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.grammar.walks import may_write
from tests.harness.router import RouterCluster
from tests.router.protocols import PROTOCOLS, USER, Protocol, sent
from tests.router.tool_folders import says, tool_cluster

from ferryman.grammar.compiler import GrammarCompiler
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.text.tokenizer import Tokenizer
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.tool_fields import chosen_tools, forced_grammar

CALLS = '[{"name": "get_weather", "parameters": {"city": "Paris"}}]'
ARGUMENTS = '{"city": "Paris"}'


@pytest.fixture
async def calling(nats_url: str, tools_folder: Path) -> AsyncIterator[RouterCluster]:
    async with tool_cluster(nats_url, tools_folder, CALLS) as made:
        yield made


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS.keys())
async def test_a_cut_call_shows_nothing_of_its_form(
    calling: RouterCluster, protocol: Protocol
) -> None:
    num_tokens = len(calling.decodes[0].script) - 1
    for limit in range(1, num_tokens, 2):
        body = {**protocol.asks, **protocol.demands, protocol.limit: limit}
        whole = (await calling.post(protocol.path, **body)).json()
        text, calls = protocol.shown(whole)
        assert text == "", f"{limit} tokens"
        assert protocol.reason(whole)
        stream = await calling.post(protocol.path, **body, stream=True)
        text, streamed = protocol.streamed(sent(stream.text))
        assert text == ""
        assert [name for name, _ in streamed] == [name for name, _ in calls]
        for name, arguments in streamed:
            assert name == "get_weather"
            assert ARGUMENTS.startswith(arguments)
    body = {**protocol.asks, **protocol.demands, protocol.limit: num_tokens + 1}
    whole = (await calling.post(protocol.path, **body)).json()
    assert protocol.shown(whole) == ("", [("get_weather", ARGUMENTS)])
    assert not protocol.reason(whole)


FORMS: dict[str, dict[str, Any]] = {
    "chat": {"response_format": {"type": "json_object", "schema": {"required": ["x"]}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 7}}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
}


@pytest.mark.parametrize("name", PROTOCOLS)
async def test_a_demanded_call_comes_before_a_form_of_the_answer(
    calling: RouterCluster, name: str
) -> None:
    protocol = PROTOCOLS[name]
    body = {**protocol.asks, **protocol.demands, protocol.limit: 120}
    first = (await calling.post(protocol.path, **body)).json()
    both = (await calling.post(protocol.path, **body, **FORMS[name])).json()
    assert protocol.shown(both) == protocol.shown(first) == ("", [("get_weather", ARGUMENTS)])
    plain, beside = (order.request.sampling.grammar for order in calling.prefills[0].orders)
    assert plain == beside


def demanded(*functions: dict[str, Any], name: str = "") -> OutputGrammar:
    """The grammar of a call of one of these, or of the one that is named."""
    tools = tuple({"type": "function", "function": function} for function in functions)
    fields = chosen_tools(
        tools, "named" if name else "required", name, BodyPlace.of_body(), is_parallel=True
    )
    grammar = forced_grammar(fields)
    assert grammar is not None
    return grammar


PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
POINT = {"enum": ["origin"]}
TREE = {
    "type": "object",
    "properties": {
        "leaf": {"enum": [1]},
        "child": {"$ref": "#"},
        "at": {"$ref": "#/properties/leaf"},
        "$ref": {"const": "a name of a property"},
    },
}
DEFINED = (
    {
        "name": "go",
        "parameters": {"properties": {"to": {"$ref": "#/$defs/P"}}, "$defs": {"P": PLACE}},
    },
    {
        "name": "mark",
        "parameters": {
            "properties": {"to": {"$ref": "#/$defs/P"}, "old": {"$ref": "#/definitions/P"}},
            "$defs": {"P": POINT, "Q": {"$ref": "#/$defs/P"}},
            "definitions": {"P": {"const": 7}},
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.com/mark",
        },
    },
    {"name": "grow", "parameters": TREE},
    {"name": "stop"},
    {"name": "halt", "parameters": {"type": "object", "properties": {}}},
    {"name": "pass", "parameters": {"type": ["object", "null"]}},
    {"name": "any", "parameters": {"additionalProperties": {"type": "integer"}}},
)
RIGHT = {
    "go": '{"to": {"city": "Oslo"}}',
    "mark": '{"to": "origin", "old": 7}',
    "grow": '{"child": {"child": {"leaf": 1}, "at": 1}, "$ref": "a name of a property"}',
    "stop": "{}",
    "halt": "{}",
    "pass": "{}",
    "any": '{"x": 5}',
}
WRONG = {
    "go": '{"to": "origin"}',
    "mark": '{"to": {"city": "Oslo"}}',
    "grow": '{"child": {"leaf": 2}}',
    "stop": '{"reason": "done"}',
    "halt": '{"": 1}',
    "pass": "null",
    "any": '{"x": "y"}',
}


@pytest.fixture(scope="module")
def tokenizer(tools_folder: Path) -> Tokenizer:
    return Tokenizer.load(tools_folder)


@pytest.mark.parametrize("name", RIGHT)
def test_each_tool_has_its_own_schema_and_no_other_arguments(
    tokenizer: Tokenizer, name: str
) -> None:
    compiler = GrammarCompiler.for_tokenizer(tokenizer, tokenizer.vocab_size)
    some = compiler.compiled(demanded(*DEFINED))
    named = compiler.compiled(demanded(*DEFINED, name=name))
    for arguments, is_right in ((RIGHT[name], True), (WRONG[name], False)):
        call = f'[{{"name": "{name}", "parameters": {arguments}}}]'
        assert may_write(named.matcher(), tokenizer, arguments) == is_right, arguments
        assert may_write(some.matcher(), tokenizer, call) == is_right, call


def test_a_deep_schema_of_a_tool_is_refused() -> None:
    deep: Any = {}
    for _ in range(500):
        deep = {"not": deep}
    with pytest.raises(Exception, match="nested deeper"):
        demanded({"name": "f", "parameters": deep})


async def test_unknown_formats_of_demanded_tools_are_named(calling: RouterCluster) -> None:
    colour = {"type": "string", "format": "color"}
    parameters = {"type": "object", "properties": {"city": colour, "since": {"format": "date"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    body = {"messages": [USER], "tools": [tool], "max_tokens": 120}
    demanded = await calling.post("/v1/chat/completions", **body, tool_choice="required")
    assert demanded.status_code == 200, demanded.text
    assert demanded.json()["usage"]["ferryman"]["ignored"] == [
        "tools.get_weather.properties.city.format (format color is not known)"
    ]
    says(calling, "Sunny.")
    free = await calling.post("/v1/chat/completions", **body)
    assert "ignored" not in free.json()["usage"]["ferryman"], "no schema is held to there"
