"""The two shapes an answer may have, whole or in frames. Frames are built as bytes, by hand.

A frame of a token differs from the one before in its text only, so everything around the text is
made once per choice; encoding the text is all that a token costs here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Protocol

from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman_router.api.shown import chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"
_NOTHING_MORE = b',"logprobs":null,"finish_reason":null}]}\n\n'


@dataclass(frozen=True, slots=True)
class Heading:
    """What every frame of an answer repeats. `num_logprobs` None: none are shown."""

    answer_id: str
    model: str
    created: int
    num_logprobs: int | None
    tokenizer: Tokenizer


class Form(Protocol):
    """How one kind of answer looks; `index` is the choice."""

    def first(self, index: int) -> bytes: ...

    def tokens(self, index: int, chunk: TokenChunk) -> bytes: ...

    def last(self, index: int, end: GenerateFinished) -> bytes: ...

    def usage(self, usage: dict[str, Any]) -> bytes: ...

    def choice(
        self, index: int, chunks: Sequence[TokenChunk], end: GenerateFinished
    ) -> dict[str, Any]: ...

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes: ...


class ChatForm:
    """`/v1/chat/completions`."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._common = _common(heading, "chat.completion.chunk")
        self._before = self._open(0) + b'"delta":{"content":'  # a chat has one choice

    def first(self, index: int) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""}'
        return self._open(index) + delta + _NOTHING_MORE

    def tokens(self, index: int, chunk: TokenChunk) -> bytes:
        shown = self._heading.num_logprobs
        if shown is None:
            if not chunk.text:
                return b""
            return self._before + _text(chunk.text) + b"}" + _NOTHING_MORE
        found = chat_logprobs([chunk], self._heading.tokenizer, shown)
        more = b'},"logprobs":' + _json(found) + b',"finish_reason":null}]}\n\n'
        return self._before + _text(chunk.text) + more

    def last(self, index: int, end: GenerateFinished) -> bytes:
        held = self._before + _text(end.text) + b"}" + _NOTHING_MORE if end.text else b""
        reason = b'"delta":{},"logprobs":null,"finish_reason":"' + end.reason.encode()
        return held + self._open(index) + reason + b'"}]}\n\n'

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._common + b'[],"usage":' + _json(usage) + b"}\n\n"

    def choice(
        self, index: int, chunks: Sequence[TokenChunk], end: GenerateFinished
    ) -> dict[str, Any]:
        shown, tokenizer = self._heading.num_logprobs, self._heading.tokenizer
        return {
            "index": index,
            "message": {"role": "assistant", "content": _whole_text(chunks, end)},
            "logprobs": None if shown is None else chat_logprobs(chunks, tokenizer, shown),
            "finish_reason": str(end.reason),
        }

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        return _whole(self._heading, "chat.completion", choices, usage)

    def _open(self, index: int) -> bytes:
        return self._common + b'[{"index":%d,' % index


class CompletionForm:
    """`/v1/completions`; its frames of logprobs count the characters of each choice."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._common = _common(heading, "text_completion")
        self._text_offsets: dict[int, int] = {}

    def first(self, index: int) -> bytes:
        return b""

    def tokens(self, index: int, chunk: TokenChunk) -> bytes:
        shown = self._heading.num_logprobs
        if shown is None:
            return self._open(index) + _text(chunk.text) + _NOTHING_MORE if chunk.text else b""
        offset = self._text_offsets.get(index, 0)
        found = completion_logprobs([chunk], self._heading.tokenizer, shown, offset)
        self._text_offsets[index] = offset + sum(map(len, found["tokens"]))
        more = b',"logprobs":' + _json(found) + b',"finish_reason":null}]}\n\n'
        return self._open(index) + _text(chunk.text) + more

    def last(self, index: int, end: GenerateFinished) -> bytes:
        reason = b',"logprobs":null,"finish_reason":"' + end.reason.encode() + b'"}]}\n\n'
        return self._open(index) + _text(end.text) + reason

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._common + b'[],"usage":' + _json(usage) + b"}\n\n"

    def choice(
        self, index: int, chunks: Sequence[TokenChunk], end: GenerateFinished
    ) -> dict[str, Any]:
        shown, tokenizer = self._heading.num_logprobs, self._heading.tokenizer
        return {
            "index": index,
            "text": _whole_text(chunks, end),
            "logprobs": None if shown is None else completion_logprobs(chunks, tokenizer, shown),
            "finish_reason": str(end.reason),
        }

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        return _whole(self._heading, "text_completion", choices, usage)

    def _open(self, index: int) -> bytes:
        return self._common + b'[{"index":%d,"text":' % index


def _common(heading: Heading, kind: str) -> bytes:
    named = {
        "id": heading.answer_id,
        "object": kind,
        "created": heading.created,
        "model": heading.model,
    }
    return b"data: " + _json(named)[:-1] + b',"choices":'


def _whole(
    heading: Heading, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any]
) -> bytes:
    named = {"id": heading.answer_id, "object": kind, "created": heading.created}
    return _json({**named, "model": heading.model, "choices": choices, "usage": usage})


def _whole_text(chunks: Sequence[TokenChunk], end: GenerateFinished) -> str:
    return "".join([chunk.text for chunk in chunks]) + end.text


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _text(text: str) -> bytes:
    encoded: bytes = encode_basestring(text).encode()
    return encoded
