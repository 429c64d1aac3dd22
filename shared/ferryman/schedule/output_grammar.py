"""The form that a caller prescribes for an output: a JSON Schema, a regex, a choice, a grammar.

This module has only the text and bounds its length. `ferryman.grammar` compiles the text and checks
its content. vLLM calls this structured outputs (once: guided decoding), OpenAI `response_format`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.schedule.schemas.json_schema import check_numbers, schemas_in_lark, unknown_formats

MAX_GRAMMAR_BYTES = 64 << 10
MAX_EITHER_BYTES = 256 << 10
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 1024
MAX_ALTERNATIVES = 8


class GrammarKind(StrEnum):
    """The language that a grammar's text is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    EITHER = "either"


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """An output ends exactly where the grammar may end; only max_tokens and stop strings cut it.

    `text` is a JSON Schema (an object, as JSON), a regex that the whole output matches, a JSON list
    of strings, a context-free grammar (Lark as llguidance reads it, or GBNF), or a JSON list of
    other grammars, of which an output has one. Raises InvalidRequest, with the kind as `param`, for
    a text that is too long or no text of its kind.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        self._check_size()
        match self.kind:
            case GrammarKind.JSON_SCHEMA:
                _check_schema(_parsed(self.text, self.kind))
            case GrammarKind.CHOICE:
                _check_choices(_parsed(self.text, self.kind))
            case GrammarKind.GRAMMAR:
                for schema in schemas_in_lark(self.text):
                    _check_values(schema, self.kind)
            case GrammarKind.EITHER:
                _check_alternatives(_parsed(self.text, self.kind))

    def _check_size(self) -> None:
        try:
            num_bytes = len(self.text.encode())
        except (AttributeError, UnicodeEncodeError):
            raise InvalidRequest(f"the {self.kind} is no valid Unicode text", self.kind) from None
        most = MAX_EITHER_BYTES if self.kind is GrammarKind.EITHER else MAX_GRAMMAR_BYTES
        if not 0 < num_bytes <= most:
            message = f"the {self.kind} has 1 to {most} bytes"
            raise InvalidRequest(message, self.kind)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> OutputGrammar:
        """JSON that is valid under `schema`: an object, or the text of one."""
        text = schema if isinstance(schema, str) else _dumped(schema, GrammarKind.JSON_SCHEMA)
        return cls(GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def json_object(cls) -> OutputGrammar:
        """Any JSON object."""
        return cls(GrammarKind.JSON_SCHEMA, '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> OutputGrammar:
        """A text that `pattern` matches from end to end."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> OutputGrammar:
        """One of `options`, and nothing else."""
        return cls(GrammarKind.CHOICE, _dumped(list(options), GrammarKind.CHOICE))

    @classmethod
    def context_free(cls, grammar: str) -> OutputGrammar:
        """A text of the language that `grammar` describes, in Lark or GBNF."""
        return cls(GrammarKind.GRAMMAR, grammar)

    @classmethod
    def either(cls, alternatives: Sequence[OutputGrammar]) -> OutputGrammar:
        """A text of any of these grammars, none of which is itself such a choice."""
        texts = [{"kind": grammar.kind, "text": grammar.text} for grammar in alternatives]
        return cls(GrammarKind.EITHER, _dumped(texts, GrammarKind.EITHER))

    @property
    def unknown_formats(self) -> tuple[tuple[str, str], ...]:
        """The formats in JSON Schemas that hold nothing, each with the path of its keyword."""
        schemas = (
            json.loads(grammar.text)
            for grammar in self.alternatives
            if grammar.kind is GrammarKind.JSON_SCHEMA
        )
        return tuple(pair for schema in schemas for pair in unknown_formats(schema))

    @property
    def alternatives(self) -> tuple[OutputGrammar, ...]:
        """The grammars of which an output has one."""
        if self.kind is not GrammarKind.EITHER:
            return (self,)
        texts = json.loads(self.text)
        return tuple(OutputGrammar(GrammarKind(text["kind"]), text["text"]) for text in texts)


def _dumped(value: object, kind: GrammarKind) -> str:
    """The value as JSON, in its own order: properties are written in the order of the schema."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(f"the {kind} cannot be written as JSON", kind) from None


def _parsed(text: str, kind: GrammarKind) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"the {kind} is not valid JSON", kind) from None


def _check_schema(schema: object) -> None:
    kind = GrammarKind.JSON_SCHEMA
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the {kind} must be an object", kind)
    _check_values(schema, kind)


def _check_values(schema: object, kind: GrammarKind) -> None:
    check_depth(schema, kind)
    check_numbers(schema, kind)


def check_depth(schema: object, kind: GrammarKind) -> None:
    """Raises InvalidRequest for a schema that is too deep to walk through."""
    level: list[object] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise InvalidRequest(f"the {kind} is nested deeper than {MAX_SCHEMA_DEPTH} levels", kind)


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _check_choices(options: object) -> None:
    kind = GrammarKind.CHOICE
    if not isinstance(options, list) or not 1 <= len(options) <= MAX_CHOICES:
        raise InvalidRequest(f"a {kind} is a list of 1 to {MAX_CHOICES} strings", kind)
    if not all(isinstance(option, str) and option for option in options):
        raise InvalidRequest(f"every option of a {kind} is a string that is not empty", kind)


def _check_alternatives(texts: object) -> None:
    """Each of them is a grammar, and raises for what it is not."""
    kind, fields = GrammarKind.EITHER, {"kind", "text"}
    if not isinstance(texts, list) or not 2 <= len(texts) <= MAX_ALTERNATIVES:
        raise InvalidRequest(f"{kind} is a list of 2 to {MAX_ALTERNATIVES} grammars", kind)
    for text in texts:
        if not isinstance(text, dict) or text.keys() != fields or text["kind"] not in _SIMPLE:
            message = f"{kind} has objects of kind and text, the kind one of {', '.join(_SIMPLE)}"
            raise InvalidRequest(message, kind)
        OutputGrammar(GrammarKind(text["kind"]), text["text"])


_SIMPLE = tuple(kind.value for kind in GrammarKind if kind is not GrammarKind.EITHER)
