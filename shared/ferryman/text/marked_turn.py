"""Conversations with the places that the caller marked, to be kept for a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ferryman.wire.public import ChatPrompt, ChatTurn


class TextBreakpoint(NamedTuple):
    """A place after so many characters of a turn's text, to be kept for so long."""

    num_chars: int
    ttl_seconds: int


@dataclass(frozen=True, slots=True)
class MarkedTurn(ChatTurn):
    """A turn with places that the caller marked, in order."""

    breakpoints: tuple[TextBreakpoint, ...] = ()


class ToolBreakpoint(NamedTuple):
    """The end of a tool's text, by the index of the tool, to be kept for so long."""

    tool_index: int
    ttl_seconds: int


@dataclass(frozen=True, slots=True)
class MarkedChat(ChatPrompt):
    """A conversation with tools that the caller marked, in order."""

    tool_breakpoints: tuple[ToolBreakpoint, ...] = ()


def marked(turn: ChatTurn, breakpoints: Iterable[TextBreakpoint]) -> ChatTurn:
    """The turn with its breakpoints; the same turn if there are none."""
    points = tuple(breakpoints)
    return MarkedTurn(turn.role, turn.content, turn.more, points) if points else turn


def ended(turn: ChatTurn, ttl_seconds: int) -> ChatTurn:
    """The turn with one more breakpoint at its end; the same turn if the mark is for no time."""
    if not ttl_seconds:
        return turn
    before = turn.breakpoints if isinstance(turn, MarkedTurn) else ()
    return marked(turn, (*before, TextBreakpoint(len(turn.content), ttl_seconds)))
