"""Structured outputs at the HTTP door: every spelling reaches the workers as one value, and what
cannot be served is refused by name before any worker hears of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.harness.router import RouterCluster

from ferryman.errors import InvalidRequest
from ferryman.schedule.output_grammar import GrammarKind, OutputGrammar
from ferryman_router.bodies.field_table import BODIES
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.structured_outputs import output_grammar
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.intake.body_intake import LARGE_BYTES
from ferryman_router.intake.reader import BODY_KINDS

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}
AS_TEXT = json.dumps(SCHEMA, ensure_ascii=False)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "the ferry"}]
RULES = 'root ::= "a" | "b"'
SPELLINGS: list[tuple[dict[str, Any], OutputGrammar | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": None, "json_object": False}}, None),
    ({"response_format": {"type": "json_object"}}, OutputGrammar.json_object()),
    ({"response_format": {"type": "text", "json_schema": None}}, None),
    ({"response_format": {"type": None}}, None),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        OutputGrammar.json_schema(AS_TEXT),
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
        OutputGrammar.json_schema(AS_TEXT),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "schema": SCHEMA,
                "json_schema": {"name": None, "strict": None, "description": None, "schema": None},
            }
        },
        OutputGrammar.json_schema(AS_TEXT),
    ),
    (
        {"response_format": {"type": "json_object", "schema": None, "json_schema": None}},
        OutputGrammar.json_object(),
    ),
    (
        {
            "response_format": {
                "type": "json_object",
                "schema": SCHEMA,
                "json_schema": {"schema": dict(SCHEMA)},
            }
        },
        OutputGrammar.json_schema(AS_TEXT),
    ),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA, "json_schema": None}},
        OutputGrammar.json_schema(AS_TEXT),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        OutputGrammar.json_schema(AS_TEXT),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, OutputGrammar.json_schema(AS_TEXT)),
    ({"structured_outputs": {"json": AS_TEXT}}, OutputGrammar.json_schema(AS_TEXT)),
    ({"structured_outputs": {"json_object": True}}, OutputGrammar.json_object()),
    ({"structured_outputs": {"regex": "a+"}}, OutputGrammar(GrammarKind.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["a", "é"]}}, OutputGrammar.choice(["a", "é"])),
    ({"structured_outputs": {"grammar": RULES}}, OutputGrammar(GrammarKind.GRAMMAR, RULES)),
    ({"guided_json": SCHEMA}, OutputGrammar.json_schema(AS_TEXT)),
    ({"guided_regex": "a+"}, OutputGrammar.regex("a+")),
    ({"guided_choice": ["a"]}, OutputGrammar.choice(["a"])),
    ({"guided_grammar": RULES}, OutputGrammar.context_free(RULES)),
    ({"json_schema": AS_TEXT}, OutputGrammar.json_schema(AS_TEXT)),
    ({"regex": "a+"}, OutputGrammar.regex("a+")),
    ({"ebnf": RULES}, OutputGrammar.context_free(RULES)),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"schema": {}}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": []}},
        "response_format.json_schema",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "schema": {"type": "array"},
                "json_schema": {"schema": SCHEMA},
            }
        },
        "response_format.schema",
    ),
    (
        {"guided_json": {"properties": {"id": {"type": "integer", "maximum": 2**63 - 1}}}},
        "guided_json",
    ),
    ({"ebnf": 'start: %json {"const": -9223372036854775808}'}, "ebnf"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": 3}, "guided_json"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": {}}, "guided_grammar"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]
# Fine as JSON; the compiler refuses them, by the kind of grammar.
NOT_SERVED: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "a(?=b)"}, "regex"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "json_schema"),
    ({"guided_json": {"$ref": "#"}}, "json_schema"),
    ({"guided_grammar": "start: b"}, "grammar"),
]


@pytest.mark.parametrize(("fields", "expected"), SPELLINGS)
def test_every_spelling_becomes_one_value(
    fields: dict[str, Any], expected: OutputGrammar | None
) -> None:
    for kind, prompt in (("chat", {"messages": HELLO}), ("completion", {"prompt": "a"})):
        api, body = Api(kind), {**prompt, **fields}
        assert output_grammar(BODIES[api].read(body, BodyPlace.of_body())) == expected
        assert BODY_KINDS[api](body, BodyPlace.of_body()).sampling.params.grammar == expected


async def test_a_grammar_reaches_the_worker_as_it_was_sent(one_pair: RouterCluster) -> None:
    for fields, expected in SPELLINGS:
        response = await one_pair.post(CHAT, messages=HELLO, max_tokens=3, **fields)
        assert response.status_code == 200, response.text
        assert one_pair.prefills[0].orders[-1].request.sampling.grammar == expected


async def test_what_cannot_be_served_is_refused_by_name_and_no_worker_hears_of_it(
    one_pair: RouterCluster,
) -> None:
    for fields, param in REFUSED + NOT_SERVED:
        for path, prompt in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
            response = await one_pair.http.post(path, json={**prompt, "max_tokens": 3, **fields})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), (fields, error)
    assert one_pair.prefills[0].orders == []


async def test_a_large_body_brings_its_grammar_too(one_pair: RouterCluster) -> None:
    """It is read by another process, and what was read comes back as JSON."""
    response = await one_pair.http.post(
        TEXT,
        content=json.dumps({"prompt": [5], "max_tokens": 3, "guided_json": SCHEMA})
        + " " * LARGE_BYTES,
    )
    assert response.status_code == 200, response.text
    grammar = one_pair.prefills[0].orders[-1].request.sampling.grammar
    assert grammar == OutputGrammar.json_schema(AS_TEXT)


def test_two_at_once_are_named() -> None:
    body = {"prompt": "a", "guided_json": {}, "guided_regex": "a"}
    with pytest.raises(InvalidRequest, match="guided_json and guided_regex exclude"):
        output_grammar(BODIES[Api.COMPLETION].read(body, BodyPlace.of_body()))
