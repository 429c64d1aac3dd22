"""JSON Schemas of callers: walked object by object, and checked for numbers that cannot be held.

A walk knows where schemas stand: a property may be called `format`, and a `const` may be an object
that looks like a schema. The library of grammars reads numbers as floats of 64 bits; an integer
beyond 2^53 would become its neighbour, and the smallest one of 64 bits ends the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ferryman.errors import InvalidRequest

Schema = dict[str, Any]

MAX_EXACT = 2**53
MAX_PATH_CHARS = 200
# The formats of strings that grammars know. Others say something about a value, and hold nothing.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
# As `json.dumps` writes: a model that may write any number of spaces writes them for ever.
JSON_STYLE: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
_NAMED = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
_LISTED = frozenset("allOf anyOf oneOf prefixItems items".split())
_SINGLE = frozenset(
    "items additionalItems additionalProperties unevaluatedItems unevaluatedProperties contains"
    " propertyNames not if then else".split()
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_VALUES = ("const", "enum")
_IN_LARK = re.compile(r"%json\s*")


def mapped(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """The schema with each of its objects changed, the inner ones first."""
    if not isinstance(schema, dict):
        return schema
    return change({name: _mapped_part(name, part, change) for name, part in schema.items()})


def _mapped_part(keyword: str, part: Any, change: Callable[[Schema], Schema]) -> Any:
    if keyword in _NAMED and isinstance(part, dict):
        return {name: mapped(inner, change) for name, inner in part.items()}
    if keyword in _LISTED and isinstance(part, list):
        return [mapped(inner, change) for inner in part]
    return mapped(part, change) if keyword in _SINGLE else part


def walked(schema: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All objects of a schema, each with its path in it: `properties.a.items`."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword, part in schema.items():
        place = _joined(path, keyword)
        if keyword in _NAMED and isinstance(part, dict):
            for name, inner in part.items():
                yield from walked(inner, _joined(place, name))
        elif keyword in _LISTED and isinstance(part, list):
            for index, inner in enumerate(part):
                yield from walked(inner, f"{place}[{index}]")
        elif keyword in _SINGLE:
            yield from walked(part, place)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def without_nulls(schema: Any) -> Any:
    """The schema without keywords that are null: they mean the same as none. A `const` may be
    null."""
    return mapped(schema, lambda inner: _without(inner, _is_null))


def _is_null(keyword: str, value: object) -> bool:
    return value is None and keyword != "const"


def fitted(schema: Any) -> Any:
    """The schema as grammars take it: without nulls, and without formats that are not known."""
    return mapped(schema, lambda inner: _without(inner, _has_no_effect))


def _has_no_effect(keyword: str, value: object) -> bool:
    return _is_null(keyword, value) or (keyword == "format" and _is_unknown_format(value))


def _is_unknown_format(value: object) -> bool:
    return isinstance(value, str) and value not in FORMATS


def _without(schema: Schema, is_left_out: Callable[[str, object], bool]) -> Schema:
    return {name: value for name, value in schema.items() if not is_left_out(name, value)}


def unknown_formats(schema: Any) -> Iterator[tuple[str, str]]:
    """The formats without effect, each with the path of the keyword. Those of numbers (`int32`)
    are none of JSON Schema's, and nobody expects an effect."""
    for path, inner in walked(schema):
        name = inner.get("format")
        if _is_unknown_format(name) and _may_be_text(inner.get("type")):
            yield _joined(path, "format"), str(name)


def _may_be_text(kind: object) -> bool:
    return kind is None or "string" in (kind if isinstance(kind, list) else [kind])


def check_numbers(schema: Any, param: str) -> None:
    """Raises InvalidRequest, naming the keyword, for a number that a grammar could not hold."""
    for path, inner in walked(schema):
        for keyword in _BOUNDS:
            _check_number(inner.get(keyword), _joined(path, keyword), param)
        for keyword in _VALUES:
            for value in _leaves(inner.get(keyword)):
                # A float stands for itself; an integer is not taken for its neighbour.
                if not isinstance(value, float):
                    _check_number(value, _joined(path, keyword), param)


def _check_number(value: object, path: str, param: str) -> None:
    if isinstance(value, int | float) and abs(value) > MAX_EXACT:
        message = (
            f"{path[-MAX_PATH_CHARS:]} is beyond 2^53, where numbers cannot be held exactly: leave"
            " it out, or ask for a string of digits"
        )
        raise InvalidRequest(message, param)


def _leaves(value: object) -> Iterator[object]:
    """The values in a value that are neither objects nor lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def with_references_under(schema: Any, pointer: str) -> Any:
    """The schema as a part of another one, at this JSON pointer: what its references name is there
    then."""

    def moved(inner: Schema) -> Schema:
        reference = inner.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            return {**inner, "$ref": f"#{pointer}{reference[1:]}"}
        return inner

    return mapped(schema, moved)


def schemas_in_lark(text: str) -> Iterator[Any]:
    """The JSON behind each `%json` of a grammar in Lark, wherever it stands. Text that is no JSON
    there is left to the reader of the grammar."""
    decoder = json.JSONDecoder()
    for mark in _IN_LARK.finditer(text):
        try:
            yield decoder.raw_decode(text, mark.end())[0]
        except ValueError:
            continue
        except RecursionError:
            raise InvalidRequest(
                "a schema in the grammar is nested too deeply", "grammar"
            ) from None
