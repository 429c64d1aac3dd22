"""The form a body prescribes for its output: OpenAI's `response_format`, vLLM's other spellings.

response_format       {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": …}}
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
from ferryman_router.bodies.field_kinds import choice, mapping, record

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


def flat_format(wanted: Any, name: str) -> list[GrammarField]:
    """A form whose schema stands next to its type; empty for a free output."""
    form = _FLAT_FORMAT.read({} if wanted is None else wanted, name)
    match form["type"]:
        case "json_object":
            return [GrammarField(f"{name}.type", "json_object", True)]
        case "json_schema":
            return [GrammarField(f"{name}.schema", "json", form["schema"])]
    return []


def _response_format(body: Body) -> list[GrammarField]:
    wanted = body.get("response_format") or {}
    match wanted.get("type", "text" if not wanted else None):
        case "text":
            return []
        case "json_object":
            return [GrammarField("response_format", "json_object", True)]
        case "json_schema":
            field = "response_format.json_schema"
            form = wanted.get("json_schema")
            schema = None if form is None else mapping(form, field).get("schema")
            return [GrammarField(f"{field}.schema", "json", schema)]
    message = "response_format.type must be text, json_object or json_schema"
    raise InvalidRequest(message, "response_format.type")


def _structured_outputs(body: Body) -> list[GrammarField]:
    wanted = body.get("structured_outputs") or {}
    grammars = []
    for name, value in wanted.items():
        field = f"structured_outputs.{name}"
        if name not in MADE:
            names = ", ".join(MADE)
            raise InvalidRequest(f"{field[:99]} is not offered: send one of {names}", field[:99])
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


_FLAT_FORMAT = record(
    "schema", is_open=True, type=choice("text", "json_object", "json_schema", default="text")
)


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
