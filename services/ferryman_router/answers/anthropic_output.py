"""Answers of `/v1/messages`: content blocks, and the events that report them in order.

message_start, ping, then of each block content_block_start, its deltas, content_block_stop; at the
end message_delta with the reason and the usage, and message_stop; or error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.schedule.request import FinishReason, Pin
from ferryman.text.tool_calls.kimi_k2 import plain
from ferryman.wire.public import GenerateFinished
from ferryman_router.answers.chat_output import OutputReading
from ferryman_router.answers.errors import anthropic_error, failure_fields
from ferryman_router.answers.output_parts import (
    OutputPart,
    PartBegun,
    PartEnded,
    PartEvent,
    PartKind,
    PartsFormat,
    PartText,
)
from ferryman_router.answers.response_format import as_json, named_event
from ferryman_router.answers.response_header import ResponseHeader
from ferryman_router.request.response import OutputFailed

SHORT_SECONDS = 300  # of the two times that a place may be kept for

# By the kind of a block: the type of its deltas, and the field with their text.
_DELTAS = {
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.THOUGHT: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}


@dataclass(frozen=True, slots=True)
class CacheWrites:
    """The places of a prompt that its caller marked, rising: usage counts what is kept up to the
    last of them. A page that ends behind a place is not kept for it."""

    breakpoints: Sequence[Pin]
    page_size: Callable[[], int]

    def counts(self, cached: int, written: int) -> dict[str, int]:
        """The tokens written to be kept for an hour and for five minutes, by Anthropic's names, if
        so many were cached and as many behind them computed and kept."""
        page_size = max(1, self.page_size())
        hour = max((p.position for p in self.breakpoints if p.seconds > SHORT_SECONDS), default=0)
        last = max((place.position for place in self.breakpoints), default=0)
        ends = [min(cached + written, end // page_size * page_size) for end in (hour, last)]
        of_hour, of_all = (max(0, end - cached) for end in ends)
        return {
            "ephemeral_5m_input_tokens": of_all - of_hour,
            "ephemeral_1h_input_tokens": of_hour,
        }


@dataclass(frozen=True, slots=True)
class MessageFields:
    """The fields of a message besides its content: `echo` answers fields of the body at the end of
    the message, `diagnostics` is known from the beginning, `writes` counts for the usage."""

    echo: Mapping[str, Any]
    diagnostics: Mapping[str, Any]
    writes: CacheWrites


class MessagesFormat(PartsFormat):
    """`/v1/messages`."""

    def __init__(
        self,
        heading: ResponseHeader,
        prompt_len: int,
        fields: MessageFields,
        reading: OutputReading,
    ) -> None:
        super().__init__(heading, reading)
        self._prompt_len, self._fields = prompt_len, fields
        self._blocks: list[dict[str, Any]] = []
        self._end: GenerateFinished | None = None

    def first(self, index: int) -> bytes:
        # How much of the prompt was cached is sent at the end, when it is known.
        usage = {"input_tokens": self._prompt_len, "output_tokens": 0}
        return named_event("message_start", {"message": self._message(usage)}) + named_event(
            "ping", {}
        )

    def end(self, usage: dict[str, Any]) -> bytes:
        fields = {"delta": self._stopped, "usage": self._usage(usage), **self._fields.echo}
        return named_event("message_delta", fields) + named_event("message_stop", {})

    def failure(self, broken: OutputFailed) -> bytes:
        error = anthropic_error(broken.error)["error"]
        return named_event("error", {"error": failure_fields(broken) | error})

    @property
    def bytes_per_token(self) -> int:
        return 32

    def _whole(self, usage: dict[str, Any]) -> bytes:
        return as_json({**self._message(self._usage(usage)), **self._fields.echo})

    def _finish(self, end: GenerateFinished) -> None:
        self._end = end

    @property
    def _stopped(self) -> dict[str, str | None]:
        """The reason of the end, and the stop sequence if it was one."""
        if self._end is None:
            return {"stop_reason": None, "stop_sequence": None}
        sequence = self._end.matched_stop or None
        if self._end.reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._parser.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _told(self, event: PartEvent) -> bytes:
        match event:
            case PartBegun(part):
                begun = {"index": part.index, "content_block": self._block(part, "")}
                return named_event("content_block_start", begun)
            case PartText(part, text):
                kind, field = _DELTAS[part.kind]
                delta = {"type": kind, field: text}
                return named_event("content_block_delta", {"index": part.index, "delta": delta})
            case PartEnded(part, text):
                self._blocks.append(self._block(part, text))
                return named_event("content_block_stop", {"index": part.index})

    def _block(self, part: OutputPart, text: str) -> dict[str, Any]:
        match part.kind:
            case PartKind.TEXT:
                return {"type": "text", "text": text}
            case PartKind.THOUGHT:
                return {"type": "thinking", "thinking": text, "signature": ""}
            case PartKind.CALL:
                # Anthropic's ids have no other characters; its clients check them.
                named = {"id": plain(self._call_id(part)), "name": part.name}
                return {"type": "tool_use", **named, "input": _input(text)}

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._heading.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._heading.model,
            "content": list(self._blocks),
            **self._stopped,
            **self._fields.diagnostics,
            "usage": usage,
        }

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of a chat under the names of this endpoint, which counts neither cached tokens
        nor those that it was asked to keep as input."""
        of_prompt = usage["prompt_tokens_details"]
        cached, written = of_prompt["cached_tokens"], of_prompt["cache_write_tokens"]
        created = self._fields.writes.counts(cached, written)
        num_created = sum(created.values())
        return {
            "input_tokens": usage["prompt_tokens"] - cached - num_created,
            "cache_creation_input_tokens": num_created,
            "cache_read_input_tokens": cached,
            "cache_creation": created,
            "output_tokens": usage["completion_tokens"],
            "ferryman": usage["ferryman"],
        }


def _input(arguments: str) -> dict[str, Any]:
    """The object that a call's arguments are; arguments that were cut off are none."""
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
