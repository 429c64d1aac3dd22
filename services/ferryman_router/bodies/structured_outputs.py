"""The form a body prescribes for its output: OpenAI's `response_format`, vLLM's other spellings.

response_format       {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": …}}
                      or {"type": "json_object" | "json_schema", "schema": …}
structured_outputs    one of json, json_object, regex, choice, grammar
guided_json, guided_regex, guided_choice, guided_grammar      the same, as vLLM spelt it before
json_schema, regex, ebnf                                      the same, as SGLang spells it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman_router.bodies.field_kinds import FieldKind, Record, Values, choice, record
from ferryman_router.bodies.place import BodyPlace

MAX_FORMAT_CHARS = 40
MADE: Mapping[str, Callable[[Any, str], OutputGrammar]]


def output_grammar(values: Values, prescribed: Sequence[GrammarField] = ()) -> OutputGrammar | None:
    """None for a free output; `prescribed` forms have fields of their own. Raises InvalidRequest,
    naming the field, for one that cannot be and for two at once."""
    named = [values[name] for name in NAMES if values.get(name) is not None]
    forms = [*prescribed, *(values.get("response_format") or ()), *_structured(values), *named]
    if len(forms) > 1:
        names = " and ".join(form.field for form in forms)
        raise InvalidRequest(f"{names} exclude each other", forms[1].field)
    return forms[0].grammar() if forms else None


@dataclass(frozen=True, slots=True)
class GrammarField:
    """A grammar by the name of the field that asks for it."""

    field: BodyPlace
    kind: str
    value: Any

    def grammar(self) -> OutputGrammar:
        """The grammar. Formats in a schema that have no effect are noted at their places."""
        try:
            grammar = MADE[self.kind](self.value, self.field)
        except InvalidRequest as error:
            raise InvalidRequest(f"{self.field}: {error}", self.field) from None
        note_formats(grammar.unknown_formats, self.field)
        return grammar


def form_of(kind: str) -> Callable[[Any, BodyPlace], GrammarField]:
    """The reader of a field whose value is a grammar of this kind."""
    return lambda value, place: GrammarField(place, kind, value)


def note_formats(formats: Iterable[tuple[str, str]], place: BodyPlace) -> None:
    """Notes the formats of a schema that hold nothing, each at its path from here."""
    for path, name in formats:
        place.field(path).note(f"format {name[:MAX_FORMAT_CHARS]} is not known")


def flat_format(wanted: Any, place: BodyPlace) -> list[GrammarField]:
    """A form whose schema stands next to its type; empty for a free output."""
    form = _FLAT_FORMAT.read({} if wanted is None else wanted, place)
    return _form(form["type"], [(place.field("schema"), form["schema"])], place)


def _read_response_format(value: Any, place: BodyPlace) -> list[GrammarField]:
    """The form in OpenAI's field, as a list of at most one. One without any type is a free output
    only if it says nothing else."""
    form = _RESPONSE_FORMAT.read(value, place)
    if form["type"] is None and any(item is not None for item in value.values()):
        message = f"{place}.type must be text, json_object or json_schema"
        raise InvalidRequest(message, f"{place}.type")
    nested = place.field("json_schema")
    schemas = [
        (nested.field("schema"), form["json_schema"]["schema"]),
        (place.field("schema"), form["schema"]),
    ]
    return _form(form["type"], schemas, place)


def _form(
    kind: str | None, schemas: Sequence[tuple[BodyPlace, Any]], place: BodyPlace
) -> list[GrammarField]:
    """The form of a type with the schemas that stand where one may: none is lost, whatever its
    type."""
    present = [(field, schema) for field, schema in schemas if schema is not None]
    if kind not in ("json_object", "json_schema"):
        for field, _ in present:
            field.note(f"{place}.type is text")
        return []
    if len(present) > 1 and present[0][1] != present[1][1]:
        raise InvalidRequest(
            f"{present[0][0]} and {present[1][0]} exclude each other", present[1][0]
        )
    if not present and kind == "json_object":
        return [GrammarField(place, "json_object", True)]
    field, schema = present[0] if present else schemas[0]
    return [GrammarField(field, "json", schema)]


def _structured(values: Values) -> list[GrammarField]:
    wanted: Values = values.get("structured_outputs") or {}
    forms = [form for form in wanted.values() if form is not None]
    return [form for form in forms if (form.kind, form.value) != ("json_object", False)]


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
RESPONSE_FORMAT = FieldKind({"type": "object"}, _read_response_format, ())


MADE = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
NAMES = "guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf".split()
# vLLM's options of a form that would change the answer.
NOT_IN_STRUCTURED_OUTPUTS = {
    "structural_tag": "send grammar",
    "whitespace_pattern": "white space is one space behind a comma and a colon",
    "disable_any_whitespace": "white space is one space behind a comma and a colon",
    "disable_additional_properties": "send additionalProperties in the schema",
}
STRUCTURED_OUTPUTS = Record(
    {kind: FieldKind({}, form_of(kind)) for kind in MADE}, NOT_IN_STRUCTURED_OUTPUTS
)
