"""Values that a model writes as plain text, and the JSON that they are by their tool's schema.

A format with a tag for each argument has no types. The schema says them, in any of the ways that
JSON Schema has: a type, several, an enum, a reference, a choice of schemas. They are found once,
at the door, and travel as lists of names.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ferryman.text.tool_calls.grammar import Malformed
from ferryman.text.tool_calls.json_text import is_text, normalised

ALL_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
STRING = ("string",)
NO_STRINGS = tuple(kind for kind in ALL_TYPES if kind != "string")
# By the name of a tool: the types that each of its parameters may have.
Parameters = Mapping[str, Mapping[str, Sequence[str]]]
MAX_VALUE_CHARS = 1 << 20
MAX_SCHEMAS = 256  # that are looked at for one parameter
_UNREAD = object()
_CHOICES = ("anyOf", "oneOf")
# The types that a schema without one is about.
_OF_FIELDS = {
    **dict.fromkeys(("properties", "additionalProperties", "required"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("pattern", "format", "minLength", "maxLength"), "string"),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), "number"),
}


def parameter_types(schema: object) -> dict[str, list[str]]:
    """The types of each parameter, by the schema of a tool's parameters."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {
        str(name): sorted(_TypeReader(schema).types(value) or ALL_TYPES)
        for name, value in properties.items()
    }


class _TypeReader:
    """Finds the types that values of one parameter may have, in the document that has it."""

    def __init__(self, root: object) -> None:
        self._root, self._num_left = root, MAX_SCHEMAS
        self._open: set[str] = set()  # references that are being followed

    def types(self, schema: object) -> frozenset[str]:
        """All types where the schema does not say."""
        types, self._num_left = frozenset(ALL_TYPES), self._num_left - 1
        if not isinstance(schema, Mapping) or self._num_left < 0:
            return types
        for allowed in self._restrictions(schema):
            types &= allowed
        return types | {"null"} if schema.get("nullable") is True else types

    def _referred(self, reference: str) -> frozenset[str]:
        """The types of what a reference points to; one that leads back to itself adds none."""
        if reference in self._open:
            return frozenset()
        self._open.add(reference)
        types = self.types(_at(self._root, reference))
        self._open.remove(reference)
        return types

    def _restrictions(self, schema: Mapping[Any, Any]) -> list[frozenset[str]]:
        """The types by each keyword that says some."""
        named = schema.get("type")
        names = [named] if isinstance(named, str) else named
        restrictions = [_with_integers(names)] if isinstance(names, list) else []
        if isinstance(schema.get("$ref"), str):
            restrictions.append(self._referred(schema["$ref"]))
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            restrictions.append(_united(map(_types_of, schema["enum"])))
        if "const" in schema:
            restrictions.append(_types_of(schema["const"]))
        choices = [schema[word] for word in _CHOICES if isinstance(schema.get(word), list)]
        restrictions += [_united(map(self.types, choice)) for choice in choices if choice]
        if isinstance(schema.get("allOf"), list):
            restrictions += map(self.types, schema["allOf"])
        about = {kind for field, kind in _OF_FIELDS.items() if field in schema}
        return restrictions or ([_with_integers(sorted(about))] if about else [])


def _united(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*sets)


def _with_integers(names: Sequence[object]) -> frozenset[str]:
    """The names that are types; an integer is a number, too."""
    types = {name for name in names if name in ALL_TYPES and isinstance(name, str)}
    return frozenset(types | {"integer"} if "number" in types else types) or frozenset(ALL_TYPES)


def _at(root: object, reference: str) -> object:
    """The schema that a reference within its document points to."""
    value: object = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if reference.startswith("#/") else (root if reference == "#" else None)


def _types_of(value: object) -> frozenset[str]:
    """The types of a JSON value."""
    if value is None:
        return frozenset({"null"})
    names = {bool: "boolean", int: "integer", float: "number", list: "array", tuple: "array"}
    name = names.get(type(value), "object" if isinstance(value, dict) else "string")
    return frozenset({name})


def typed_value(text: str, types: Collection[str]) -> str:
    """JSON of a value. Text that is of no other type of these stays a string."""
    value = _read(text.strip(), types) if set(types) != {"string"} else None
    return json.dumps(text, ensure_ascii=False) if value is None else value


def _read(text: str, types: Collection[str]) -> str | None:
    """JSON of a text that is of one of the types, and no string."""
    if text.lower() in ("true", "false") and "boolean" in types:
        return text.lower()
    for read in (_json, _python, _nearly_json):
        value = read(text)
        if isinstance(value, str):
            # Quotes are part of a string; of another type they stand around its text.
            return _read(value, types) if "string" not in types and value != text else None
        if value is not _UNREAD and (encoded := _encoded(value, text, types)):
            return encoded
    return None


def _encoded(value: object, text: str, types: Collection[str]) -> str:
    """JSON of a value if it is of one of the types; empty if it is not."""
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    try:
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
        encoded = encoded if is_text(encoded) else json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        return ""
    if not _types_of(value) & set(types):
        return ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Where both may be, 1.10 is a string: as a number it would be another text.
    return "" if is_number and "string" in types and encoded != text else encoded


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _UNREAD


def _python(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return _UNREAD


def _nearly_json(text: str) -> object:
    try:
        return _json(normalised(text))
    except Malformed:
        return _UNREAD
