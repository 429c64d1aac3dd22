"""`cache_control`: the places of a conversation at which a caller wants its state to be kept.

Anthropic's blocks have it; clients of gateways put it on the parts of a chat too. Prefixes are kept
and found without it. A place that is marked is one more at which later prompts can resume, and the
usage of a message counts what was kept up to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ferryman.wire.public import ChatTurn
from ferryman_router.bodies.field_kinds import FieldKind, choice, record
from ferryman_router.bodies.place import BodyPlace

TTL_SECONDS = {"5m": 300, "1h": 3600}
_MARK = record("type", ttl=choice(*TTL_SECONDS, default="5m"))


class TextBreakpoint(NamedTuple):
    """A place after so many characters of a turn's text, to be kept for so long."""

    num_chars: int
    ttl_seconds: int


@dataclass(frozen=True, slots=True)
class MarkedTurn(ChatTurn):
    """A turn with places that the caller marked, in order."""

    breakpoints: tuple[TextBreakpoint, ...] = ()


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


def read_mark(value: Any, place: BodyPlace) -> int:
    """The seconds for which a mark wants its place to be kept. Raises InvalidRequest."""
    return TTL_SECONDS[_MARK.read(value, place)["ttl"]]


CACHE_CONTROL = FieldKind({"type": "object"}, read_mark, 0, {"type": "ephemeral", "ttl": "5m"})


def breakpoints_of(content: Any, place: BodyPlace) -> tuple[TextBreakpoint, ...]:
    """The marks of a content that has been read as text: a list of parts, joined in lines.

    Raises InvalidRequest for a mark that is none.
    """
    points, num_chars = list[TextBreakpoint](), 0
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if text := part.get("text"):
            num_chars += len(text) + (1 if num_chars else 0)
        if (mark := part.get("cache_control")) is not None:
            ttl = read_mark(mark, place.item(index).field("cache_control"))
            points.append(TextBreakpoint(num_chars, ttl))
    return tuple(points)
