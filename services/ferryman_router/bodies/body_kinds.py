"""The kinds of bodies that ask for an answer, each with its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ferryman_router.bodies.anthropic_requests import message_body
from ferryman_router.bodies.openai_requests import ParsedRequest, chat_body, completion_body
from ferryman_router.bodies.responses_requests import response_body

BODY_KINDS: Mapping[str, Callable[[dict[str, Any]], ParsedRequest]] = {
    "chat": chat_body,
    "completion": completion_body,
    "response": response_body,
    "message": message_body,
}
