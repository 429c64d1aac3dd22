"""The forms in which a caller may give a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.errors import InvalidRequest
from ferryman.wire.public import ChatPrompt, ChatTurn, Prompt, TextPrompt, TokenPrompt

Turns = Sequence[ChatTurn] | Sequence[Mapping[str, str]]
GivenPrompt = str | Sequence[int] | Turns | Prompt


def as_prompt(given: GivenPrompt) -> Prompt:
    """Text, token ids, or turns of a chat (as values or as OpenAI's messages)."""
    if isinstance(given, TextPrompt | ChatPrompt | TokenPrompt):
        return given
    if isinstance(given, str):
        return TextPrompt(given)
    items: list[Any] = list(given)
    if items and all(isinstance(item, ChatTurn | Mapping) for item in items):
        return ChatPrompt(tuple(_turn(item) for item in items))
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return TokenPrompt(_token_ids(items))
    raise InvalidRequest("a prompt is text, token ids, or a list of chat turns", "prompt")


def _turn(given: ChatTurn | Mapping[str, object]) -> ChatTurn:
    if isinstance(given, ChatTurn):
        return given
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not isinstance(content, str) or len(given) != 2:
        raise InvalidRequest("a chat turn has a role and a content, both text", "prompt")
    return ChatTurn(role, content)


def _token_ids(items: list[int]) -> TokenIds:
    if any(not 0 <= token_id < 2**31 for token_id in items):
        raise InvalidRequest("token ids are whole numbers from 0", "prompt")
    return as_token_ids(items)
