"""The types in a schema, and the JSON of a text that is of one of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.text.tool_calls.value_types import ALL_TYPES, parameter_types, typed_value


def _types(schema: Any, **more: Any) -> set[str]:
    return set(parameter_types({"properties": {"x": schema}, **more})["x"])


SCHEMAS: dict[str, tuple[Any, set[str]]] = {
    "a type": ({"type": "array"}, {"array"}),
    "several": ({"type": ["string", "null"]}, {"string", "null"}),
    "an integer is a number": ({"type": "number"}, {"number", "integer"}),
    "an enum": ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
    "an enum of one type of several": ({"type": ["string", "integer"], "enum": [1]}, {"integer"}),
    "a constant": ({"const": True}, {"boolean"}),
    "a choice": ({"oneOf": [{"type": "object"}, {"const": "a"}]}, {"object", "string"}),
    "all of": ({"allOf": [{"type": ["integer", "null"]}, {"minimum": 1}]}, {"integer"}),
    "nullable": ({"type": "boolean", "nullable": True}, {"boolean", "null"}),
    "fields without a type": ({"properties": {}}, {"object"}),
    "nothing": ({}, set(ALL_TYPES)),
    "true": (True, set(ALL_TYPES)),
    "a choice with anything": ({"anyOf": [{"type": "null"}, {}]}, set(ALL_TYPES)),
    "an unknown type": ({"type": "text"}, set(ALL_TYPES)),
    "what contradicts itself": ({"type": "string", "enum": [1]}, set(ALL_TYPES)),
    "a reference to nothing": ({"$ref": "#/$defs/None"}, set(ALL_TYPES)),
    "a reference elsewhere": ({"$ref": "https://example.com/x"}, set(ALL_TYPES)),
    "a reference to itself": ({"$ref": "#/properties/x"}, set(ALL_TYPES)),
}


@pytest.mark.parametrize(("schema", "types"), SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_schema_says_the_types_of_its_values(schema: Any, types: set[str]) -> None:
    assert _types(schema) == types


def test_references_are_followed_through_escapes_and_circles() -> None:
    definitions = {
        "a/b~c": {"$ref": "#/$defs/Loop"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/a~1b~0c"}, {"enum": [1, 2]}]},
    }
    assert _types({"$ref": "#/$defs/a~1b~0c"}, **{"$defs": definitions}) == {"integer"}


def test_references_that_multiply_end() -> None:
    names = [f"D{index}" for index in range(60)]
    everyone = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    assert _types(everyone, **{"$defs": dict.fromkeys(names, everyone)}) == set(ALL_TYPES)


def test_a_tool_without_properties_has_no_types() -> None:
    assert parameter_types({"type": "object"}) == parameter_types(None) == {}
    assert parameter_types({"properties": {"x": 7}}) == {"x": sorted(ALL_TYPES)}


VALUES = {
    "an integer": ("5", ["integer", "null"], "5"),
    "a whole number": ("5.0", ["integer"], "5"),
    "a fraction where none may be": ("5.5", ["integer"], '"5.5"'),
    "a large integer": ("123456789012345678901", ["integer"], "123456789012345678901"),
    "null": (" null\n", ["integer", "null"], "null"),
    "None": ("None", ["array", "null"], "null"),
    "a text that is a word": ("none", ["null", "string"], '"none"'),
    "True": ("True", ["boolean"], "true"),
    "a number in quotes": ('"5"', ["integer"], "5"),
    "a text in quotes": ('"a"', ["string", "null"], '"\\"a\\""'),
    "a version": ("1.10", ["number", "string"], '"1.10"'),
    "a list": ("[1, 'a', True]", ["array"], '[1, "a", true]'),
    "a set": ("{1, 2}", ["array", "object"], '"{1, 2}"'),
    "what is no number": ("NaN", ["number"], '"NaN"'),
    "too large": ("1e999", ["number"], '"1e999"'),
    "half a character": ('["\\ud800"]', ["array"], '["\\ud800"]'),
    "nothing": ("", ["integer"], '""'),
    "a comma to spare": ("[1,]", ["array"], "[1]"),
}


@pytest.mark.parametrize(("text", "types", "value"), VALUES.values(), ids=VALUES.keys())
def test_a_text_is_a_value_of_one_of_its_types(text: str, types: list[str], value: str) -> None:
    assert typed_value(text, types) == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(JSON)
def test_what_a_template_wrote_comes_back(value: Any) -> None:
    """A template writes such a value as JSON or as Python does."""
    for text in (json.dumps(value), repr(value)):
        assert json.loads(typed_value(text, [n for n in ALL_TYPES if n != "string"])) == value


@given(text=st.text(max_size=12), types=st.lists(st.sampled_from(ALL_TYPES)))
def test_any_text_is_some_value(text: str, types: list[str]) -> None:
    value = json.loads(typed_value(text, types))
    assert isinstance(value, str) is (value == text) or "string" not in types
