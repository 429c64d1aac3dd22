"""The form a body prescribes for its output: OpenAI's `response_format`, vLLM's other spellings.

response_format       {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": …}}
                      or {"type": "json_object" | "json_schema", "schema": …}
structured_outputs    one of json, json_object, regex, choice, grammar
guided_json, guided_regex, guided_choice, guided_grammar      the same, as vLLM spelt it before
json_schema, regex, ebnf                                      the same, as SGLang spells it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman_router.bodies.field_kinds import ANY, FieldKind, Record, Values, choice, record
from ferryman_router.bodies.place import BodyPlace

Body = Mapping[str, Any]
MADE: Mapping[str, Callable[[Any, str], OutputGrammar]]


def output_grammar(body: Body, prescribed: Sequence[GrammarField] = ()) -> OutputGrammar | None:
    """None for a free output; `prescribed` forms have fields of their own. Raises InvalidRequest,
    naming the field, for one that cannot be and for two at once."""
    forms = [*prescribed, *_response_format(body), *_structured_outputs(body), *_by_one_name(body)]
    if len(forms) > 1:
        names = " and ".join(form.field for form in forms)
        raise InvalidRequest(f"{names} exclude each other", forms[1].field)
    return forms[0].grammar() if forms else None


@dataclass(frozen=True, slots=True)
class GrammarField:
    """A grammar by the name of the field that asks for it."""

    field: str
    kind: str
    value: Any

    def grammar(self) -> OutputGrammar:
        try:
            return MADE[self.kind](self.value, self.field)
        except InvalidRequest as error:
            raise InvalidRequest(f"{self.field}: {error}", self.field) from None


def flat_format(wanted: Any, place: BodyPlace) -> list[GrammarField]:
    """A form whose schema stands next to its type; empty for a free output."""
    form = _FLAT_FORMAT.read({} if wanted is None else wanted, place)
    match form["type"]:
        case "json_object" if form["schema"] is None:
            return [GrammarField(f"{place}.type", "json_object", True)]
        case "json_object" | "json_schema":
            return [GrammarField(f"{place}.schema", "json", form["schema"])]
    return []


def _read_response_format(value: Any, place: BodyPlace) -> Values:
    """The fields of OpenAI's form. One without any type is a free output only if it says nothing
    else."""
    form = _RESPONSE_FORMAT.read(value, place)
    if form["type"] is None and any(item is not None for item in value.values()):
        message = f"{place}.type must be text, json_object or json_schema"
        raise InvalidRequest(message, f"{place}.type")
    return form


def _response_format(body: Body) -> list[GrammarField]:
    form = body.get("response_format") or {"type": None}
    match form["type"]:
        case "json_object" if form["schema"] is None:
            return [GrammarField("response_format", "json_object", True)]
        case "json_object":
            return [GrammarField("response_format.schema", "json", form["schema"])]
        case "json_schema":
            schema, field = form["json_schema"]["schema"], "response_format.json_schema.schema"
            if schema is None and form["schema"] is not None:
                schema, field = form["schema"], "response_format.schema"
            return [GrammarField(field, "json", schema)]
    return []


def _structured_outputs(body: Body) -> list[GrammarField]:
    wanted = body.get("structured_outputs") or {}
    grammars = []
    for name in MADE:
        field, value = f"structured_outputs.{name}", wanted.get(name)
        if value is not None and (name, value) != ("json_object", False):
            grammars.append(GrammarField(field, name, value))
    return grammars


def _by_one_name(body: Body) -> list[GrammarField]:
    return [
        GrammarField(name, kind, body[name])
        for name, kind in NAMES.items()
        if body.get(name) is not None
    ]


def _json(value: Any, field: str) -> OutputGrammar:
    if not isinstance(value, dict | str):
        raise InvalidRequest("must be a JSON Schema", field)
    return OutputGrammar.json_schema(value)


def _json_object(value: Any, field: str) -> OutputGrammar:
    if value is not True:
        raise InvalidRequest("must be true or false", field)
    return OutputGrammar.json_object()


def _regex(value: Any, field: str) -> OutputGrammar:
    return OutputGrammar.regex(_text(value, field))


def _choice(value: Any, field: str) -> OutputGrammar:
    if not isinstance(value, list):
        raise InvalidRequest("must be a list of strings", field)
    return OutputGrammar.choice(value)


def _grammar(value: Any, field: str) -> OutputGrammar:
    return OutputGrammar.context_free(_text(value, field))


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest("must be a string", field)
    return value


_TYPES = ("text", "json_object", "json_schema")
_FLAT_FORMAT = record("schema name description strict", type=choice(*_TYPES, default="text"))
_SCHEMA_FORMAT = record("schema name description strict")
_RESPONSE_FORMAT = record("schema", type=choice(*_TYPES), json_schema=_SCHEMA_FORMAT.kind)
RESPONSE_FORMAT = FieldKind({"type": "object"}, _read_response_format)


MADE = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
# vLLM's options of a form that would change the answer.
NOT_IN_STRUCTURED_OUTPUTS = {
    "structural_tag": "send grammar",
    "whitespace_pattern": "white space is one space behind a comma and a colon",
    "disable_any_whitespace": "white space is one space behind a comma and a colon",
    "disable_additional_properties": "send additionalProperties in the schema",
}
STRUCTURED_OUTPUTS = Record(dict.fromkeys(MADE, ANY), NOT_IN_STRUCTURED_OUTPUTS)
