"""The table of all fields that a body may have.

A field is read, or is accepted without effect, or is refused with the reason; any other name is
passed over, and the answer names it and the nearest one. A line here gives the check of the name
and of the value, the default, the schema in `/openapi.json` and the row in docs/api.md
(`tools/api_tables.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ferryman.schedule.request import MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from ferryman_router.bodies import field_readers as readers
from ferryman_router.bodies.chat_messages import EFFORTS, MAX_DOCUMENTS
from ferryman_router.bodies.field_kinds import (
    ANY,
    FLAG,
    MAX_INT,
    OBJECT,
    SOME_OBJECT,
    TEXT,
    YES,
    FieldKind,
    Record,
    Shape,
    Values,
    choice,
    either,
    items,
    list_of,
    only,
    real,
    record,
    text,
    whole,
)
from ferryman_router.bodies.structured_outputs import RESPONSE_FORMAT, STRUCTURED_OUTPUTS, form_of
from ferryman_router.bodies.tool_fields import MAX_TOOLS, NAMED
from ferryman_router.bodies.unread_fields import (
    ALL,
    ANTHROPIC,
    BOTH,
    CHAT,
    COMPLETION,
    COUNT,
    DETOKENIZE,
    MESSAGES,
    NOT_OFFERED,
    OPENAI,
    RESPONSES,
    TOKENIZE_CHAT,
    TOKENIZE_TEXT,
    WITHOUT_EFFECT,
    Api,
    Apis,
    reasons,
)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the bodies `on` some endpoints. Its value goes to the object that `to` names, as
    the attribute with the field's name, or with the name after a point in `to`."""

    name: str
    kind: FieldKind
    on: Apis
    to: str = ""
    example: Any = None

    @property
    def schema(self) -> Shape:
        """The schema of a value that is not null."""
        example = self.kind.example if self.example is None else self.example
        return {**self.kind.schema, "examples": [example]}


TEMPLATE = CHAT | TOKENIZE_CHAT
PROMPTS = ALL | COUNT | TOKENIZE_CHAT | TOKENIZE_TEXT

MAX_CHOICES = 64
MAX_PRIORITY = MAX_INT
ANY_SEED = -1
TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": NAMED, "none": "none"}

# Fields with fields of their own.
STREAM_OPTIONS = record("include_obfuscation", include_usage=FLAG, continuous_usage_stats=FLAG)
TEXT_OPTIONS = record("verbosity", format=SOME_OBJECT)
REASONING = record("summary generate_summary", effort=choice(*EFFORTS))
THINKING = record(
    "display",
    type=choice("enabled", "disabled", "adaptive", missing=""),
    budget_tokens=whole(0, MAX_INT),
)
OUTPUT_CONFIG = record("format", effort=choice(*EFFORTS))
TOOL_CHOICE = record(
    "name", type=choice(*TOOL_CHOICES, default="auto"), disable_parallel_tool_use=FLAG
)
OURS = record(parse_special=FLAG)
DIAGNOSTICS = record(previous_message_id=TEXT)
CACHE_OPTIONS = record("mode ttl", comparison_response_id=replace(TEXT, default=None))

# Examples.
_A_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_A_FUNCTION = {"name": "f", "description": "does it", "parameters": _A_SCHEMA}
_A_THOUGHT = {"type": "enabled", "budget_tokens": 1024}
_AN_ANSWER = {"previous_message_id": "msg_a"}
_A_MESSAGE, _A_VARIABLE = {"role": "user", "content": "hello"}, {"enable_thinking": False}

# Kinds of odd fields.
_EITHER, _TOKEN_IDS = either("string", "array"), list_of({"type": "integer", "minimum": 0}, 1 << 19)
_OBJECTS, _STRINGS = list_of({"type": "object"}, MAX_TOOLS), list_of({"type": "string"}, 1024)
_MESSAGES = FieldKind({"type": "array", "items": {"type": "object"}, "minItems": 1}, items, ())
_LIMIT, _COUNT, _CHOICES = whole(1, MAX_INT), whole(0, MAX_LOGPROBS), whole(1, MAX_CHOICES)
_STOP = replace(_EITHER.at_most(MAX_STOP_STRINGS), check=readers.stop_strings, default=())
_STOP_IDS = replace(_TOKEN_IDS.at_most(MAX_STOP_TOKEN_IDS), check=readers.listed)
_ALLOWED = replace(_TOKEN_IDS.at_most(8192), check=readers.allowed_token_ids)
_SCHEMA, _GRAMMAR = either("object", "string"), FieldKind(TEXT.schema, example='root ::= "a"')

_JSON, _REGEX = (replace(_SCHEMA, check=form_of("json")), replace(_GRAMMAR, check=form_of("regex")))
_OPTIONS = replace(_STRINGS, check=form_of("choice"), default=None)
_RULES = replace(_GRAMMAR, check=form_of("grammar"))
_SALT = {"type": "string", "minLength": 1, "maxLength": readers.MAX_SALT_CHARS}
_NOT_STORED = FieldKind({"const": False}, readers.not_stored, False, False)
_NO_ADDED = only(False, {"const": False}, "the chat template adds those tokens")
_NO_SUFFIX = "no format for the middle of a text is known here"
_INCLUDED = replace(_STRINGS.at_most(8), check=readers.included)
_HIDES = replace(FLAG, check=readers.inverted)
_EDITS = FieldKind(OBJECT.schema, readers.context_edits)
_TRUNCATION = FieldKind({"type": "string", "enum": ["disabled"]}, readers.truncation)

FIELDS = (
    # Prompts, and how they become tokens.
    Field("model", TEXT, PROMPTS | DETOKENIZE, example="ferryman-demo"),
    Field("messages", _MESSAGES, TEMPLATE | ANTHROPIC, example=[_A_MESSAGE]),
    Field("prompt", _EITHER, COMPLETION, example="hello"),
    Field("prompt", replace(_EITHER, check=text, default=""), TOKENIZE_TEXT, example="hello"),
    Field("input", _EITHER, RESPONSES, example="hello"),
    Field("instructions", replace(TEXT, default=None), RESPONSES),
    Field("system", _EITHER, ANTHROPIC, example="Be short."),
    Field("tokens", _TOKEN_IDS, DETOKENIZE, example=[7]),
    Field("truncate_prompt_tokens", whole(-1, MAX_INT, 0), ALL, "answer.truncate", 100),
    Field("add_special_tokens", YES, COMPLETION | TOKENIZE_TEXT),
    Field("add_special_tokens", _NO_ADDED, TEMPLATE),
    Field("suffix", only("", {"type": "string", "maxLength": 0}, _NO_SUFFIX), COMPLETION),
    Field("documents", _OBJECTS.at_most(MAX_DOCUMENTS), TEMPLATE, example=[{"text": "a"}]),
    Field("chat_template_kwargs", OBJECT, TEMPLATE | RESPONSES | ANTHROPIC, example=_A_VARIABLE),
    Field("reasoning_effort", choice(*EFFORTS), TEMPLATE, example="low"),
    Field("reasoning", REASONING.kind, RESPONSES, example={"effort": "low"}),
    Field("thinking", replace(THINKING.kind, default=None), ANTHROPIC, example=_A_THOUGHT),
    Field("context_management", _EDITS, ANTHROPIC, example={"edits": []}),
    Field("cache_control", readers.CACHE_CONTROL, ANTHROPIC),
    Field("diagnostics", replace(DIAGNOSTICS.kind, default=None), MESSAGES, "", _AN_ANSWER),
    Field("prompt_cache_options", replace(CACHE_OPTIONS.kind, default=None), RESPONSES, "", {}),
    Field("add_generation_prompt", replace(FLAG, default=None), TEMPLATE),
    Field("continue_final_message", FLAG, TEMPLATE),
    Field("ferryman", OURS.kind, PROMPTS, example={"parse_special": False}),
    # Tools.
    Field("tools", _OBJECTS, TEMPLATE, example=[{"type": "function", "function": _A_FUNCTION}]),
    Field("tools", _OBJECTS, RESPONSES, example=[{"type": "function", **_A_FUNCTION}]),
    Field("tools", _OBJECTS, ANTHROPIC, example=[{"name": "f", "input_schema": _A_SCHEMA}]),
    Field("tool_choice", either("string", "object"), TEMPLATE | RESPONSES, example="auto"),
    Field("tool_choice", TOOL_CHOICE.kind, ANTHROPIC, example={"type": "auto"}),
    Field("parallel_tool_calls", YES, TEMPLATE | RESPONSES),
    # How tokens are drawn.
    Field("temperature", real(0, 100, 1.0), ALL, to="sampling", example=0.5),
    Field("top_p", real(0, 1, 1.0, above=True), ALL, to="sampling", example=0.5),
    Field("top_k", replace(readers.TOP_K, check=readers.top_k), ALL, to="sampling", example=20),
    Field("min_p", real(0, 1, 0.0), ALL, to="sampling", example=0.1),
    Field("repetition_penalty", real(0, 100, 1.0, above=True), ALL, to="sampling", example=1.1),
    Field("presence_penalty", real(-2, 2, 0.0), ALL, to="sampling", example=0.5),
    Field("frequency_penalty", real(-2, 2, 0.0), ALL, to="sampling", example=0.5),
    Field("seed", whole(-(2**63), 2**63 - 1, ANY_SEED), ALL, to="sampling", example=7),
    Field("logit_bias", FieldKind(OBJECT.schema, readers.logit_bias, ()), ALL, "rules", {"7": 1.5}),
    Field("min_tokens", whole(0, MAX_INT, 0).unchecked(), ALL, to="rules", example=0),
    Field("allowed_token_ids", _ALLOWED, ALL, to="rules", example=[7]),
    Field("bad_words", replace(_STRINGS.at_most(64), check=readers.bad_words), ALL, example=["a"]),
    # Where an answer ends.
    Field("max_tokens", _LIMIT.unchecked(), OPENAI | MESSAGES, example=16),
    Field("max_completion_tokens", _LIMIT, CHAT, example=16),
    Field("max_output_tokens", replace(_LIMIT, check=readers.output_limit), RESPONSES, example=16),
    Field("stop", _STOP, BOTH, to="sampling", example=["end"]),
    Field("stop_sequences", _STOP, MESSAGES, to="sampling.stop", example=["end"]),
    Field("stop_token_ids", _STOP_IDS, ALL, to="sampling", example=[7]),
    Field("ignore_eos", FLAG, ALL, to="sampling"),
    # Its form.
    Field("response_format", RESPONSE_FORMAT, OPENAI, example={"type": "json_object"}),
    Field("structured_outputs", STRUCTURED_OUTPUTS.kind, ALL, example={"choice": ["a", "b"]}),
    Field("text", TEXT_OPTIONS.kind, RESPONSES, example={"format": {"type": "text"}}),
    Field("output_config", OUTPUT_CONFIG.kind, ANTHROPIC, example={"effort": "low"}),
    Field("guided_json", _JSON, OPENAI, example=_A_SCHEMA),
    Field("guided_regex", _REGEX, OPENAI, example="a"),
    Field("guided_choice", _OPTIONS, OPENAI, example=["a", "b"]),
    Field("guided_grammar", _RULES, OPENAI),
    Field("json_schema", _JSON, OPENAI, example=_A_SCHEMA),
    Field("regex", _REGEX, OPENAI, example="a"),
    Field("ebnf", _RULES, OPENAI),
    # How often it is given, and what is shown of it.
    Field("stream", FLAG, ALL),
    Field("stream_options", replace(STREAM_OPTIONS.kind, default=None), BOTH, "", {}),
    Field("n", replace(_CHOICES, default=1), OPENAI, to="answer.num_samples", example=1),
    Field("best_of", _CHOICES, COMPLETION, example=1),
    Field("echo", FLAG, COMPLETION, to="answer.echoes"),
    Field("logprobs", FLAG, CHAT),
    Field("logprobs", _COUNT, COMPLETION, example=2),
    Field("top_logprobs", replace(_COUNT, default=0), CHAT | RESPONSES, example=0),
    Field("prompt_logprobs", _COUNT, OPENAI, to="answer.num_prompt_logprobs", example=0),
    Field("include", _INCLUDED, RESPONSES, example=[readers.LOGPROBS]),
    Field("include_reasoning", YES, CHAT, to="answer.shows_thoughts"),
    Field("include_stop_str_in_output", FLAG, ALL, to="answer.includes_stop"),
    Field("skip_special_tokens", _HIDES, ALL, to="answer.shows_special"),
    Field("return_token_ids", FLAG, OPENAI, to="answer.returns_token_ids"),
    Field("return_tokens_as_token_ids", FLAG, OPENAI, to="answer.names_by_id"),
    Field("return_token_strs", FLAG, TOKENIZE_CHAT | TOKENIZE_TEXT),
    # How the cluster serves it.
    Field("priority", whole(-MAX_PRIORITY, MAX_PRIORITY, 0), ALL, to="answer", example=0),
    Field("cache_salt", FieldKind(_SALT, readers.cache_salt, "", "a"), ALL, to="answer"),
    Field("metadata", replace(OBJECT, check=readers.metadata), RESPONSES, example={"a": "b"}),
    Field("store", _NOT_STORED, RESPONSES),
    Field("background", _NOT_STORED, RESPONSES),
    Field("truncation", _TRUNCATION, RESPONSES, example="disabled"),
)


def _record(api: Api) -> Record:
    kinds = {field.name: field.kind for field in FIELDS if api in field.on}
    ignored = dict.fromkeys(reasons(WITHOUT_EFFECT, api), ANY)
    return Record(kinds | ignored, reasons(NOT_OFFERED, api))


def _places(api: Api, to: str) -> dict[str, str]:
    """Maps the attributes of a value to the fields that they come from."""
    fields = [field for field in FIELDS if api in field.on and field.to.partition(".")[0] == to]
    return {field.to.partition(".")[2] or field.name: field.name for field in fields}


BODIES: Mapping[Api, Record] = {api: _record(api) for api in Api}
_PLACES = {(api, to): _places(api, to) for api in Api for to in ("sampling", "rules", "answer")}


def attributes(api: Api, to: str, values: Values) -> Values:
    """The attributes of a value, `sampling`, `rules` or `answer`, that are fields of a body."""
    return {attribute: values[name] for attribute, name in _PLACES[api, to].items()}
