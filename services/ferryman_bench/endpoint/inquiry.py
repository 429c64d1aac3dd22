"""A request to an endpoint, and its body for each of the two doors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

TOP_LOGPROBS = 5


class EndpointDoor(StrEnum):
    """The path of a request, below `/v1`."""

    CHAT = "chat/completions"
    TEXT = "completions"


class Delivery(StrEnum):
    """The form in which an answer is asked for: whole, streamed, or streamed and hung up on."""

    WHOLE = "whole"
    STREAMED = "streamed"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat, by its role: system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A conversation up to the message that is to be answered, in at most `max_tokens` tokens.

    `fields` are further fields of the body, such as a salt or tools.
    """

    messages: tuple[ChatMessage, ...]
    max_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)

    def with_fields(self, fields: Mapping[str, Any]) -> Inquiry:
        return Inquiry(self.messages, self.max_tokens, {**self.fields, **fields})

    @property
    def text(self) -> str:
        """The conversation as one text, for the door of plain completions."""
        return "\n".join(message.content for message in self.messages)


def body_of(inquiry: Inquiry, model: str, door: EndpointDoor) -> dict[str, Any]:
    """The body of a request that takes the likeliest token at each step."""
    body: dict[str, Any] = {"model": model, "max_tokens": inquiry.max_tokens, "temperature": 0}
    if door is EndpointDoor.CHAT:
        body["messages"] = [
            {"role": message.role, "content": message.content} for message in inquiry.messages
        ]
    else:
        body["prompt"] = inquiry.text
    return {**body, **inquiry.fields}


def logprob_fields(door: EndpointDoor) -> dict[str, Any]:
    """The fields that ask for log probabilities."""
    if door is EndpointDoor.CHAT:
        return {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
    return {"logprobs": TOP_LOGPROBS}


def stream_fields() -> dict[str, Any]:
    """The fields that ask for a stream with its usage at the end."""
    return {"stream": True, "stream_options": {"include_usage": True}}


def curl_command(url: str, body: Mapping[str, Any], headers: Sequence[str] = ()) -> str:
    """A command for a shell that sends `body` to `url`."""
    extra = "".join(f" -H {shlex.quote(header)}" for header in headers)
    sent = shlex.quote(json.dumps(body))
    return f"curl -s {url} -H 'content-type: application/json'{extra} -d {sent}"
