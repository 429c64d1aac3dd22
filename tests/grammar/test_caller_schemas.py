"""Schemas as clients send them: numbers that no grammar holds, nulls, and formats of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.grammar.walks import may_write

from ferryman.errors import InvalidRequest
from ferryman.grammar.compiler import GrammarCompiler
from ferryman.schedule.output_grammar import GrammarKind, OutputGrammar
from ferryman.schedule.schemas.json_schema import FORMATS, fitted, unknown_formats
from ferryman.text.tokenizer import Tokenizer

EXACT = 2**53


def writes(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: OutputGrammar
) -> Callable[[str], bool]:
    """Says whether an output may be a text."""
    compiled = compiler.compiled(grammar)
    return lambda text: may_write(compiled.matcher(), tokenizer, text)


UNHELD: dict[str, tuple[dict[str, Any], str]] = {
    "int64 as generators of schemas write it": (
        {"properties": {"id": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}}},
        "properties.id.minimum",
    ),
    "the neighbour": ({"type": "integer", "maximum": EXACT + 1}, "maximum"),
    "an exclusive bound below": ({"type": "integer", "exclusiveMinimum": -EXACT - 1}, "exclusiveM"),
    "a real number's bound": ({"type": "number", "maximum": 1e300}, "maximum"),
    "a step": ({"type": "integer", "multipleOf": 2**60}, "multipleOf"),
    "no type": ({"minimum": 10**20}, "minimum"),
    "the smallest of 64 bits": ({"const": -(2**63)}, "const"),
    "among others": ({"enum": ["a", [1, {"b": EXACT + 1}]]}, "enum"),
    "in a list of schemas": ({"items": {"anyOf": [{}, {"const": 2**64}]}}, "items.anyOf[1].const"),
    "in a definition": ({"$defs": {"Id": {"enum": [2**70]}}}, "$defs.Id.enum"),
    "under a condition": ({"if": {}, "then": {"minimum": 1e16}}, "then.minimum"),
    "of a name": ({"propertyNames": {"maximum": -1e17}}, "propertyNames.maximum"),
}


@pytest.mark.parametrize(("schema", "path"), UNHELD.values(), ids=UNHELD.keys())
def test_a_number_that_would_become_its_neighbour_is_refused_by_name(
    schema: dict[str, Any], path: str
) -> None:
    for given in (schema, json.dumps(schema)):
        with pytest.raises(InvalidRequest) as raised:
            OutputGrammar.json_schema(given)
        assert str(raised.value).startswith(path)
        assert raised.value.param == GrammarKind.JSON_SCHEMA
    with pytest.raises(InvalidRequest) as raised:
        OutputGrammar.context_free(f'start: "x" %json  {json.dumps(schema)}\n')
    assert str(raised.value).startswith(path)


HELD: tuple[dict[str, Any], ...] = (
    {"type": "integer", "minimum": 1 - EXACT, "maximum": EXACT - 1},  # zod's safe integers
    {"type": "integer", "maximum": EXACT},
    {"properties": {"maximum": {"type": "integer"}, "const": {}}},
    {"type": "integer", "default": 2**60, "examples": [2**62]},
    {"const": 1e300},
    {"enum": [True, False, None, 6.02e23, EXACT]},
)


@pytest.mark.parametrize("schema", HELD, ids=json.dumps)
def test_other_numbers_are_served(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    compiler.compiled(OutputGrammar.json_schema(schema))


def test_the_largest_bound_is_exact(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = OutputGrammar.json_schema({"type": "integer", "minimum": 7, "maximum": EXACT})
    writes_it = writes(compiler, tokenizer, grammar)
    assert (writes_it(str(EXACT)), writes_it(str(EXACT + 1)), writes_it("7")) == (True, False, True)


NULLS: dict[str, Any] = {
    "type": "object",
    "description": None,
    "properties": {
        "a": {"type": "integer", "enum": None, "minimum": None},
        "b": {"anyOf": [{"type": "string", "pattern": None}, {"const": None}], "default": None},
        "c": {"type": "array", "items": {"$ref": "#/$defs/C", "title": None}, "maxItems": None},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
    "patternProperties": None,
    "$defs": {"C": {"enum": [None, 1], "format": None, "if": None}},
}


def test_null_is_absent_at_each_depth(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    writes_it = writes(compiler, tokenizer, OutputGrammar.json_schema(NULLS))
    assert writes_it('{"a": 12, "b": null, "c": [null, 1]}')
    assert not writes_it('{"a": 12, "b": 3, "c": []}'), "a const of null is one"
    assert not writes_it('{"a": 12, "b": "x", "c": [2]}')


def test_an_unknown_format_holds_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "color", "maxLength": 7},
            "when": {"type": "string", "format": "date"},
            "id": {"type": ["integer", "null"], "format": "int64"},
        },
        "required": ["format", "when", "id"],
        "additionalProperties": False,
    }
    assert list(unknown_formats(schema)) == [("properties.format.format", "color")]
    writes_it = writes(compiler, tokenizer, OutputGrammar.json_schema(schema))
    assert writes_it('{"format": "teal", "when": "2026-11-27", "id": 3}')
    assert not writes_it('{"format": "far too long", "when": "2026-11-27", "id": 3}')
    assert not writes_it('{"format": "teal", "when": "today", "id": 3}'), "a known one holds"


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_known_format_holds(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    schema = {"type": "string", "format": name}
    assert fitted(schema) == schema
    writes_it = writes(compiler, tokenizer, OutputGrammar.json_schema(schema))
    assert not writes_it('"° no format has this °"')


EITHERS: dict[str, tuple[OutputGrammar, tuple[str, ...], tuple[str, ...]]] = {
    "two schemas that begin alike": (
        OutputGrammar.either(
            [
                OutputGrammar.json_schema(
                    {
                        "properties": {"name": {"const": "f"}, "b": {"type": "boolean"}},
                        "required": ["name", "b"],
                        "additionalProperties": False,
                        "type": "object",
                    }
                ),
                OutputGrammar.json_schema(
                    {
                        "properties": {"name": {"type": "string"}, "c": {"type": "integer"}},
                        "required": ["name", "c"],
                        "additionalProperties": False,
                        "type": "object",
                    }
                ),
            ]
        ),
        ('{"name": "f", "b": true}', '{"name": "f", "c": 1}', '{"name": "ferry", "c": 1}'),
        ('{"name": "ferry", "b": true}', '{"name": "f", "b": 1}', "{}"),
    ),
    "all other kinds": (
        OutputGrammar.either(
            [
                OutputGrammar.regex(r"a/\d+"),
                OutputGrammar.choice(["yes", 'no \\ "quoted"']),
                OutputGrammar.context_free('start: "<" inner ">"\ninner: /x*/'),
                OutputGrammar.context_free('root ::= "[" "y"* "]"'),
                OutputGrammar.json_schema({"const": 5}),
            ]
        ),
        ("a/07", "yes", 'no \\ "quoted"', "<xx>", "[yy]", "5"),
        ("a/", "no", "<x", "[x]", "6", "yes5", ""),
    ),
}


@pytest.mark.parametrize(("grammar", "right", "wrong"), EITHERS.values(), ids=EITHERS.keys())
def test_an_output_is_of_one_of_several_grammars(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    grammar: OutputGrammar,
    right: tuple[str, ...],
    wrong: tuple[str, ...],
) -> None:
    writes_it = writes(compiler, tokenizer, grammar)
    assert [writes_it(text) for text in right] == [True] * len(right)
    assert [writes_it(text) for text in wrong] == [False] * len(wrong)


NO_CHOICES: dict[str, object] = {
    "one": [{"kind": "regex", "text": "a"}],
    "no list": {"kind": "regex", "text": "a"},
    "another field": [{"kind": "regex", "text": "a", "x": 1}] * 2,
    "an unknown kind": [{"kind": "xml", "text": "a"}] * 2,
    "a kind that is a list": [{"kind": ["regex"], "text": "a"}] * 2,
    "within each other": [{"kind": "either", "text": "[]"}] * 2,
    "an empty one": [{"kind": "regex", "text": ""}] * 2,
    "a text that is none": [{"kind": "regex", "text": 5}] * 2,
    "too many": [{"kind": "regex", "text": "a"}] * 9,
}


@pytest.mark.parametrize("texts", NO_CHOICES.values(), ids=NO_CHOICES.keys())
def test_a_choice_of_grammars_that_is_none_is_refused(texts: object) -> None:
    with pytest.raises(InvalidRequest):
        OutputGrammar(GrammarKind.EITHER, json.dumps(texts))


def test_one_of_several_that_cannot_be_served_is_refused_as_it_is_alone(
    compiler: GrammarCompiler,
) -> None:
    for wrong, kind in (
        (OutputGrammar.json_schema({"$ref": "#"}), GrammarKind.JSON_SCHEMA),
        (OutputGrammar.regex("a(?=b)"), GrammarKind.REGEX),
    ):
        with pytest.raises(InvalidRequest) as alone:
            compiler.compiled(wrong)
        with pytest.raises(InvalidRequest) as among_others:
            compiler.compiled(OutputGrammar.either([OutputGrammar.regex("x"), wrong]))
        assert str(alone.value) == str(among_others.value)
        assert among_others.value.param == kind
