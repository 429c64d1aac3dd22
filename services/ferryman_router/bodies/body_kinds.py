"""The kinds of bodies that ask for an answer, each with its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ferryman_router.bodies.anthropic_requests import message_body
from ferryman_router.bodies.openai_requests import chat_body, completion_body
from ferryman_router.bodies.parsed_request import ParsedRequest
from ferryman_router.bodies.responses_requests import response_body
from ferryman_router.bodies.unread_fields import Api

BODY_KINDS: Mapping[Api, Callable[[dict[str, Any]], ParsedRequest]] = {
    Api.CHAT: chat_body,
    Api.COMPLETION: completion_body,
    Api.RESPONSES: response_body,
    Api.MESSAGES: message_body,
}
