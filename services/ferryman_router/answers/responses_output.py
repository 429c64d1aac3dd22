"""Answers of `/v1/responses`: items, and the events that report them in order.

response.created, response.in_progress, then of each item output_item.added, its deltas, its done
events, output_item.done; at the end response.completed, response.incomplete or response.failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferryman.schedule.request import FinishReason
from ferryman.text.tool_calls.free_text import FreeText
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman_router.answers.chat_output import OutputReading
from ferryman_router.answers.errors import failure_fields
from ferryman_router.answers.logprobs import chat_logprobs
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
from ferryman_router.bodies.tool_fields import CUSTOM_INPUT, ToolSource
from ferryman_router.request.response import OutputFailed

# By the kind of an item: how its id begins, and the name of its deltas.
_PREFIXES = {PartKind.TEXT: "msg", PartKind.THOUGHT: "rs", PartKind.CALL: "fc"}
_TEXTS = {
    PartKind.TEXT: "output_text",
    PartKind.THOUGHT: "reasoning_text",
    PartKind.CALL: "function_call_arguments",
}


class ResponsesFormat(PartsFormat):
    """`/v1/responses`. `echo` repeats fields of the body."""

    def __init__(
        self, heading: ResponseHeader, echo: Mapping[str, Any], reading: OutputReading
    ) -> None:
        super().__init__(heading, reading)
        self._echo = echo
        self._items: list[dict[str, Any]] = []
        self._num_events = 0
        self._is_cut = False
        self._new: list[TokenChunk] = []  # their log probabilities were not shown yet
        self._logprobs: list[dict[str, Any]] = []  # of the message that is open
        self._free = FreeText(CUSTOM_INPUT)  # of the call that is open

    def first(self, index: int) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def tokens(self, index: int, chunk: TokenChunk) -> bytes:
        if self._heading.num_logprobs is not None:
            self._new.append(chunk)
        return super().tokens(index, chunk)

    def end(self, usage: dict[str, Any]) -> bytes:
        status = self._status
        return self._event(f"response.{status}", response=self._response(status, usage))

    def failure(self, broken: OutputFailed) -> bytes:
        # The client's type of an error has few codes; the others are in `reason`.
        error = failure_fields(broken) | {"code": "server_error"}
        response = self._response("failed") | {"error": error}
        return self._event("response.failed", response=response)

    @property
    def bytes_per_token(self) -> int:
        num_logprobs = self._heading.num_logprobs
        return 32 if num_logprobs is None else 200 * (1 + num_logprobs)

    def _whole(self, usage: dict[str, Any]) -> bytes:
        return as_json(self._response(self._status, usage))

    def _finish(self, end: GenerateFinished) -> None:
        self._is_cut = end.reason is FinishReason.LENGTH

    @property
    def _status(self) -> str:
        return "incomplete" if self._is_cut else "completed"

    def _told(self, event: PartEvent) -> bytes:
        match event:
            case PartBegun(part):
                return self._begun(part)
            case PartText(part, text) if self._is_custom(part):
                return self._free_delta(part, self._free.feed(text))
            case PartText(part, text):
                more = self._shown_logprobs(part)
                return self._of(part, f"{_TEXTS[part.kind]}.delta", delta=text, **more)
            case PartEnded(part, text):
                return self._ended(part, text)

    def _begun(self, part: OutputPart) -> bytes:
        self._logprobs, self._free = [], FreeText(CUSTOM_INPUT)
        added = self._event(
            "response.output_item.added",
            output_index=part.index,
            item=self._item(part, None, "in_progress"),
        )
        if part.kind is PartKind.CALL:
            return added
        return added + self._of(part, "content_part.added", part=self._content(part, ""))

    def _ended(self, part: OutputPart, text: str) -> bytes:
        rest = self._free_delta(part, self._free.end()) if self._is_custom(part) else b""
        item = self._item(part, text, self._status)
        self._items.append(item)
        # Events are numbered as they are made.
        rest += self._text_done(part, text)
        return rest + self._event("response.output_item.done", output_index=part.index, item=item)

    def _free_delta(self, part: OutputPart, text: str) -> bytes:
        """A piece of a custom tool's input, which stands in the call's arguments."""
        return self._of(part, "custom_tool_call_input.delta", delta=text) if text else b""

    def _text_done(self, part: OutputPart, text: str) -> bytes:
        name = f"{_TEXTS[part.kind]}.done"
        if self._is_custom(part):
            return self._of(part, "custom_tool_call_input.done", input=self._free.text)
        if part.kind is PartKind.CALL:
            called = self._source(part).get("name", part.name)
            return self._of(part, name, name=called, arguments=text)
        more = {"logprobs": self._logprobs} if part.kind is PartKind.TEXT else {}
        done = self._of(part, name, text=text, **more)
        return done + self._of(part, "content_part.done", part=self._content(part, text))

    def _of(self, part: OutputPart, name: str, /, **fields: Any) -> bytes:
        """An event of a part; only calls have no content to count."""
        place = {"item_id": self._item_id(part), "output_index": part.index}
        if part.kind is not PartKind.CALL:
            place["content_index"] = 0
        return self._event(f"response.{name}", **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        numbered = {"sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_event(name, numbered)

    def _item(self, part: OutputPart, text: str | None, status: str) -> dict[str, Any]:
        """An item; without a text it has only begun."""
        named = {"id": self._item_id(part), "status": status}
        if part.kind is PartKind.CALL:
            return self._call(part, text or "", named)
        content = [] if text is None else [self._content(part, text)]
        if part.kind is PartKind.THOUGHT:
            return {"type": "reasoning", **named, "summary": [], "content": content}
        return {"type": "message", **named, "role": "assistant", "content": content}

    def _call(self, part: OutputPart, text: str, named: Mapping[str, str]) -> dict[str, Any]:
        """A call in the words of the client's tool."""
        source = self._source(part)
        called = {"call_id": self._call_id(part), "name": source.get("name", part.name)}
        if "namespace" in source:
            called["namespace"] = source["namespace"]
        if self._is_custom(part):
            return {"type": "custom_tool_call", **named, **called, "input": self._free.text}
        return {"type": "function_call", **named, **called, "arguments": text}

    def _source(self, part: OutputPart) -> ToolSource:
        return self._reading.answer.tools.sources.get(part.name, {})

    def _is_custom(self, part: OutputPart) -> bool:
        return part.kind is PartKind.CALL and self._source(part).get("type") == "custom"

    def _item_id(self, part: OutputPart) -> str:
        return self._part_id("ctc" if self._is_custom(part) else _PREFIXES[part.kind], part)

    def _content(self, part: OutputPart, text: str) -> dict[str, Any]:
        if part.kind is PartKind.THOUGHT:
            return {"type": "reasoning_text", "text": text}
        details = {"annotations": [], "logprobs": self._logprobs}
        return {"type": "output_text", "text": text, **details}

    def _shown_logprobs(self, part: OutputPart) -> dict[str, Any]:
        """The log probabilities since the last text; those of thoughts and calls are not
        shown."""
        num_logprobs = self._heading.num_logprobs
        chunks, self._new = self._new, []
        if part.kind is not PartKind.TEXT:
            return {}
        logprobs = (
            chat_logprobs(chunks, self._heading.names, num_logprobs)
            if num_logprobs is not None
            else []
        )
        self._logprobs.extend(logprobs)
        return {"logprobs": logprobs}

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response as it is now."""
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._heading.answer_id,
            "object": "response",
            "created_at": self._heading.created,
            "status": status,
            "model": self._heading.model,
            **self._echo,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "output": list(self._items),
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": self._usage(usage) if usage is not None else None,
        }

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of a chat under the names of this endpoint."""
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": usage["total_tokens"],
            "ferryman": usage["ferryman"],
        }
