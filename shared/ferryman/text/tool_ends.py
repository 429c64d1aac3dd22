"""The ends of tools in a prompt's token ids, where the caller marked them.

How a template writes a tool, only the template knows. So the beginning of the conversation is
encoded once more with the tools up to the marked one: what both have in common ends where that tool
does. A template that says something of the later tools first (their number, their names in a list,
in an order of its own) has no such place; all tools end where the conversation's beginning does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ferryman.cache.keys import TokenIds
from ferryman.schedule.request import Pin
from ferryman.text.chat import Message
from ferryman.text.chat_beginnings import ChatBeginnings
from ferryman.text.marked_turn import MarkedChat
from ferryman.text.prompt_layout import PromptLayout

MAX_TOOL_BREAKPOINTS = 4  # as many as Anthropic takes; each is encoded once
# Characters that JSON, HTML or a template's own quotes write otherwise, and spaces that it strips.
_REWRITTEN = re.compile(r"[^ -~]|[\\\"'<>&]|  +|^ | $")


class ToolEnds:
    """The ends of `chat`'s marked tools. Its messages and `variables` were given to the template,
    and became `token_ids` [tokens]."""

    def __init__(
        self,
        beginnings: ChatBeginnings,
        chat: MarkedChat,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        token_ids: TokenIds,
    ) -> None:
        self._beginnings, self._chat = beginnings, chat
        self._messages, self._variables, self._token_ids = messages, variables, token_ids

    def pins(self, layout: PromptLayout, last_resort: int) -> Iterator[Pin]:
        """The place of each mark: the end of its tool, or `last_resort` where that is not found. A
        tool that does not stand before its place has none."""
        for index, ttl_seconds in self._chat.tool_breakpoints[-MAX_TOOL_BREAKPOINTS:]:
            words = _words_of(self._variables["tools"][index])
            for position in (self._end(index), last_resort):
                if layout.has_before(position, words):
                    yield Pin(position, ttl_seconds)
                    break

    def _end(self, index: int) -> int:
        return self._beginnings.shared_with_tools(
            index + 1,
            self._messages,
            self._variables,
            self._token_ids,
            parse_special=self._chat.parse_special,
        )


def _words_of(tool: Mapping[str, Any]) -> tuple[str, ...]:
    """The name of a tool, and the longest piece of its description that all templates write
    alike."""
    function = tool["function"]
    pieces = _REWRITTEN.split(str(function.get("description") or ""))
    return str(function["name"]), max(pieces, key=len)
