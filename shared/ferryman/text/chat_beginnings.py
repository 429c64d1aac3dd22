"""The beginnings of conversations: tools, then system messages, up to the first words of a user.

The next conversation of the same application begins alike, so its state is worth a snapshot before
any second conversation has come (others call this a cache breakpoint). Positions are hints: what is
found there is named by its tokens, as all cached state is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ferryman.cache.keys import TokenIds
from ferryman.errors import InvalidRequest
from ferryman.text.chat import Message

MAX_REMEMBERED = 64
MAX_CHARS = 1 << 19  # of a beginning that is looked at
# Begins with a character that nobody's first words begin with.
_OTHER_WORDS = {"role": "user", "content": "\N{REFERENCE MARK}"}
_OTHER_TOOL = {
    "type": "function",
    "function": {
        "name": "\N{REFERENCE MARK}",
        "description": "\N{REFERENCE MARK}",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ChatBeginnings:
    """Finds where conversations of one application part. `encode_chat` is the tokenizer's own; what
    it makes of a beginning is remembered, since many conversations have the same."""

    def __init__(self, encode_chat: Callable[..., TokenIds]) -> None:
        self._encode_chat = encode_chat
        self._remembered = lru_cache(maxsize=MAX_REMEMBERED)(self._with_other_words)

    def positions(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        token_ids: TokenIds,
        *,
        parse_special: bool,
    ) -> tuple[int, ...]:
        """The positions in `token_ids` [tokens], those of this conversation, up to which another
        one is the same: with the same tools and another system message, and with the same tools and
        system messages. None if it has neither."""
        num_leading = _num_leading(messages)
        has_tools = bool(variables.get("tools"))
        if not num_leading and not has_tools:
            return ()
        beginnings = [messages[:num_leading]]
        if has_tools and num_leading:
            beginnings.append([{**messages[0], "content": _OTHER_WORDS["content"]}])
        lengths = (
            self._length([leading, variables], token_ids, parse_special) for leading in beginnings
        )
        return tuple(sorted({length for length in lengths if length}))

    def shared_with_tools(
        self,
        num_tools: int,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        token_ids: TokenIds,
        *,
        parse_special: bool,
    ) -> int:
        """The position in `token_ids` [tokens] up to which another conversation is the same that
        has the first `num_tools` tools alone, or one more if those are all; 0 if it is not
        known."""
        tools = variables["tools"]
        others = tools[:num_tools] if num_tools < len(tools) else [*tools, _OTHER_TOOL]
        leading = messages[: _num_leading(messages)]
        return self._length([leading, {**variables, "tools": others}], token_ids, parse_special)

    def _length(self, beginning: list[Any], token_ids: TokenIds, parse_special: bool) -> int:
        """The tokens of a beginning; 0 for one that is too long to look at."""
        text = json.dumps(beginning)
        if len(text) > MAX_CHARS:
            return 0
        return common_length(token_ids, self._remembered(text, parse_special))

    def _with_other_words(self, beginning: str, parse_special: bool) -> TokenIds:
        """The tokens of a conversation that goes on with other words; none if the template takes no
        such conversation."""
        leading, variables = json.loads(beginning)
        try:
            return self._encode_chat(
                [*leading, _OTHER_WORDS], variables=variables, parse_special=parse_special
            )
        except InvalidRequest:
            return np.zeros(0, dtype="<u4")


def _num_leading(messages: Sequence[Message]) -> int:
    """The messages before the first one of a user."""
    roles = [message["role"] for message in messages]
    return roles.index("user") if "user" in roles else 0


def common_length(left: TokenIds, right: TokenIds) -> int:
    """The tokens that both begin with."""
    shorter = min(len(left), len(right))
    unlike = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(unlike[0]) if len(unlike) else shorter
