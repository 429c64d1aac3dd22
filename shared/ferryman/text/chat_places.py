"""The places of a chat in its token ids: where its messages begin, where state is worth keeping.

That is after the tools, after the system messages, before the latest turns of the user, and where
the caller marked a place, a tool's end too: there other prompts are likely to part from this one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ferryman.cache.keys import TokenIds
from ferryman.schedule.request import Pin
from ferryman.text.chat import Message
from ferryman.text.located_prompt import AFTER, LocatedPrompt, NamedPlace
from ferryman.text.marked_turn import MarkedChat, MarkedTurn
from ferryman.text.prompt_layout import MAX_MESSAGES, PromptLayout
from ferryman.text.tokenizer import Tokenizer
from ferryman.text.tool_ends import ToolEnds
from ferryman.wire.public import ChatPrompt, ChatTurn

MAX_TURNS = 3  # turns of the user before which state is kept: the latest ones
MAX_BREAKPOINTS = 32
TOOLS = "tools"
# A role of the caller's own making is no word for a log.
_UNNAMED = re.compile(r"[^a-z_]")


def located_chat(
    tokenizer: Tokenizer,
    chat: ChatPrompt,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    token_ids: TokenIds,
) -> LocatedPrompt:
    """The `token_ids` of a chat, whose turns were given to the template as `messages`."""
    beginnings = tokenizer.chat_beginnings.positions(
        messages, variables, token_ids, parse_special=chat.parse_special
    )
    if tokenizer.pieces is None:  # the text of a token depends on others: no place can be told
        return LocatedPrompt(token_ids, beginnings)
    layout = PromptLayout(tokenizer.pieces, token_ids, messages)
    marks = tuple(_breakpoints(layout, chat.turns))
    if isinstance(chat, MarkedChat):
        ends = ToolEnds(tokenizer.chat_beginnings, chat, messages, variables, token_ids)
        marks = tuple(sorted((*ends.pins(layout, last_resort=max(beginnings, default=0)), *marks)))
    # A worker takes no more; the latest have all that is before them.
    marks = marks[-MAX_BREAKPOINTS:]
    forks = {*beginnings, *_later_turns(layout, messages), *(mark.position for mark in marks)}
    places = islice(_places(layout, messages, bool(variables.get(TOOLS))), MAX_MESSAGES)
    return LocatedPrompt(
        token_ids, tuple(sorted(fork for fork in forks if fork)), tuple(places), marks
    )


def _later_turns(layout: PromptLayout, messages: Sequence[Message]) -> Iterator[int]:
    """The beginnings of the user's latest turns: a conversation that goes on otherwise, or that a
    template writes otherwise once it has gone on, parts there. The first turn is no such one."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"][1:]
    begins = (layout.begin(index) for index in users[-MAX_TURNS:])
    return (begin for begin in begins if begin is not None)


def _breakpoints(layout: PromptLayout, turns: Sequence[ChatTurn]) -> Iterator[Pin]:
    for index, turn in enumerate(turns):
        for mark in turn.breakpoints if isinstance(turn, MarkedTurn) else ():
            position = layout.after(index, mark.num_chars)
            if position is not None:
                yield Pin(position, mark.ttl_seconds)


def _places(
    layout: PromptLayout, messages: Sequence[Message], has_tools: bool
) -> Iterator[NamedPlace]:
    """The messages that have a place, by role and number, and the tools around the first."""
    if has_tools:
        yield NamedPlace(0, TOOLS)
    numbers, end = Counter[str](), None
    for index, message in enumerate(messages):
        role = _UNNAMED.sub("", str(message["role"]))[:16]
        begin, name = layout.begin(index), f"{role}[{numbers[role]}]"
        numbers[role] += 1
        if begin is None:
            continue
        yield NamedPlace(begin, name)
        end = layout.end(index)
        if has_tools and index == 0 and role == "system" and end is not None:
            yield NamedPlace(end, TOOLS)
    if end is not None:
        yield NamedPlace(end, AFTER)
