"""Readers of the odd fields of a body: each takes a value and its name, and returns what it stands
for. InvalidRequest names the field that cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.errors import InvalidRequest
from ferryman.schedule.token_rules import MAX_BAD_WORDS
from ferryman.text.marked_turn import TextBreakpoint
from ferryman_router.bodies.field_kinds import (
    LIST,
    MAX_INT,
    TEXT,
    FieldKind,
    Record,
    choice,
    flag,
    items,
    mapping,
    record,
    text,
    whole,
)
from ferryman_router.bodies.place import BodyPlace

MAX_SALT_CHARS = 1024
MAX_WORD_CHARS = 256
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # thoughts are in the answer as they are

TOP_K, OUTPUT_LIMIT = whole(-1, MAX_INT, 0), whole(0, MAX_INT)
TRUNCATION = choice("auto", "disabled")
CLEAR_THINKING = "clear_thinking_20251015"
_CONTEXT_MANAGEMENT = record(edits=LIST)
_EDIT = record("type keep")


def top_k(value: Any, name: BodyPlace) -> int:
    """-1 is another spelling of "off"."""
    return max(0, int(TOP_K.check(value, name)))


def inverted(value: Any, name: str) -> bool:
    """The opposite of a flag."""
    return not flag(value, name)


def stop_strings(value: Any, name: str) -> tuple[str, ...]:
    """A string, or a list of strings."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequest(f"{name} must be a string or a list of strings", name)
    return tuple(stops)


def listed(value: Any, name: str) -> tuple[Any, ...]:
    """A list as a tuple, for an owner that checks the items."""
    return tuple(items(value, name))


def logit_bias(value: Any, name: str) -> tuple[tuple[int, Any], ...]:
    """Pairs of a token id and its bias; JSON's names of fields are texts."""
    biases = mapping(value, name)
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest("logit_bias has token ids for names", name)
    return tuple((int(key), bias) for key, bias in biases.items())


def allowed_token_ids(value: Any, name: str) -> tuple[Any, ...]:
    """At least one token id: an empty list would leave nothing to draw."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{name} must be a list of at least one token id", name)
    return tuple(value)


def bad_words(value: Any, name: str) -> tuple[str, ...]:
    """Texts, neither too many nor too long."""
    # Each may have two spellings.
    if len(items(value, name)) > MAX_BAD_WORDS // 2:
        raise InvalidRequest(f"{name} has at most {MAX_BAD_WORDS // 2} entries", name)
    for word in value:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_WORD_CHARS or not word.strip():
            raise InvalidRequest(f"a bad word is a text of 1 to {MAX_WORD_CHARS} characters", name)
    return tuple(value)


def cache_salt(value: Any, name: str) -> str:
    """A text that is not empty: an empty salt would separate nothing."""
    salt: str = text(value, name)
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in salt)
    if not 1 <= len(salt) <= MAX_SALT_CHARS or not is_unicode:
        raise InvalidRequest(f"{name} has 1 to {MAX_SALT_CHARS} characters of valid Unicode", name)
    return salt


def output_limit(value: Any, name: BodyPlace) -> int:
    """The most tokens of a response."""
    if not OUTPUT_LIMIT.check(value, name):
        raise InvalidRequest(f"{name} must be at least 1", name)
    return int(value)


def not_stored(value: Any, name: str) -> bool:
    """A flag that cannot be set."""
    if flag(value, name):
        raise InvalidRequest(f"{name} must be false: nothing is stored of a response", name)
    return False


def truncation(value: Any, name: BodyPlace) -> str:
    """`disabled`, the only way."""
    if TRUNCATION.check(value, name) == "auto":
        message = f"{name} must be disabled: no item is left out; send those that fit"
        raise InvalidRequest(message, name)
    return str(value)


def included(value: Any, name: str) -> list[str]:
    """The further parts of a response."""
    for part in items(value, name):
        if part not in (LOGPROBS, ENCRYPTED):
            raise InvalidRequest(f"{name} may have {LOGPROBS} and {ENCRYPTED}", name)
    return list(value)


def metadata(value: Any, name: str) -> dict[str, str]:
    """Texts that come back with the answer, and are bounded for that reason."""
    texts: dict[str, str] = mapping(value, name)
    are_short = all(
        len(key) <= MAX_KEY_CHARS and isinstance(word, str) and len(word) <= MAX_VALUE_CHARS
        for key, word in texts.items()
    )
    if len(texts) > MAX_METADATA or not are_short:
        message = (
            f"{name} has at most {MAX_METADATA} texts of at most {MAX_VALUE_CHARS} characters,"
            f" with names of at most {MAX_KEY_CHARS}"
        )
        raise InvalidRequest(message, name)
    return texts


def context_edits(value: Any, name: BodyPlace) -> dict[str, list[Any]]:
    """The edits that were applied: none. One that would leave something out is refused."""
    edits = name.field("edits")
    for index, edit in enumerate(_CONTEXT_MANAGEMENT.read(value, name)["edits"]):
        place = edits.item(index)
        kind, keep = (mapping(edit, place).get(field) for field in ("type", "keep"))
        if (kind, keep) != (CLEAR_THINKING, "all"):
            message = (
                f"{place} of type {str(kind)[:80]} is not offered: no block is left out; send those"
                f" that fit, or {CLEAR_THINKING} that keeps all"
            )
            raise InvalidRequest(message, place)
        _EDIT.read(edit, place)
    return {"applied_edits": []}


def token_ids_of(values: Sequence[object], name: str) -> TokenIds:
    """Token ids [tokens]."""
    for value in values:
        if type(value) is not int or not 0 <= value < 2**32:
            raise InvalidRequest(f"{name} must hold token ids: whole numbers from 0 on", name)
    return as_token_ids(np.array(values, dtype="<u4"))


# Texts in parts.


@dataclass(frozen=True, slots=True)
class TextPart:
    """A type of part whose `field` is its text."""

    record: Record
    field: str = "text"

    @classmethod
    def of(cls, field: str, without_effect: str = "") -> TextPart:
        return cls(record(f"type {without_effect}", **{field: TEXT}), field)

    def read(self, part: object, place: BodyPlace) -> str:
        return str(self.record.read(part, place)[self.field])


def joined_text(value: object, place: BodyPlace, parts: Mapping[str, TextPart]) -> str:
    """A string, or the texts of a list of parts. InvalidRequest names the part whose type is none
    of `parts`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{place} must be a string or a list of parts", place)
    return in_lines(_part(part, place.item(i), parts) for i, part in enumerate(value))


def in_lines(texts: Iterable[str]) -> str:
    """Texts that belong together, each on a line of its own, as vLLM and llama.cpp join the parts
    of a content for templates that know texts alone. A client that cuts its text into parts does
    not end them with a break: without one their words would run together."""
    return "\n".join(filter(None, texts))


def _part(value: object, place: BodyPlace, parts: Mapping[str, TextPart]) -> str:
    kind = mapping(value, place).get("type")
    kind = "" if kind is None else text(kind, f"{place}.type")
    if kind not in parts:
        allowed = " or ".join(parts)
        raise InvalidRequest(f"{place} must be a part of type {allowed}: models read text", place)
    return parts[kind].read(value, place)


# Marks: `cache_control` of Anthropic's blocks and of parts of a chat, OpenAI's
# `prompt_cache_breakpoint` of parts. Prefixes are kept and found without. A place that is marked is
# one more to resume at, and usage counts what is kept up to it.

TTL_SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200}
_CONTROL = record("type", ttl=choice("5m", "1h", default="5m"))
_MARKS = {
    "cache_control": _CONTROL,
    "prompt_cache_breakpoint": record("mode", ttl=choice("30m", "12h", default="30m")),
}


def cache_mark(value: Any, place: BodyPlace) -> int:
    """The seconds for which a `cache_control` wants its place to be kept."""
    return TTL_SECONDS[_CONTROL.read(value, place)["ttl"]]


CACHE_CONTROL = FieldKind({"type": "object"}, cache_mark, 0, {"type": "ephemeral", "ttl": "5m"})


def breakpoints_of(content: Any, place: BodyPlace) -> tuple[TextBreakpoint, ...]:
    """The marks of a content that has been read as text: a list of parts, joined in lines."""
    points, num_chars = list[TextBreakpoint](), 0
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if text_of_part := part.get("text"):
            num_chars += len(text_of_part) + (1 if num_chars else 0)
        for name, mark in _MARKS.items():
            if (sent := part.get(name)) is not None:
                ttl = mark.read(sent, place.item(index).field(name))["ttl"]
                points.append(TextBreakpoint(num_chars, TTL_SECONDS[ttl]))
    return tuple(points)
