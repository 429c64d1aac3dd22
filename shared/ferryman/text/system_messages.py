"""System messages for templates that know one, at the head of a conversation.

Agents send several: instructions in pieces before the first turn, and reminders later. Templates
differ: some write each at its place, some refuse all but the first, some leave the others out in
silence, some gather them at the head, where a new one changes the prefix of all that follows. So a
template is tried with marked messages, once. One that writes them where they stand gets them as
they are. For the others those at the head become one, and a later one is said at its place by the
user, within the turn beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.text.chat import ChatTemplate, Message

ROLES = ("system", "developer")
_BETWEEN = "\n\n"
_MARKS = ("first-mark", "second-mark", "third-mark", "fourth-mark", "fifth-mark")


@dataclass(frozen=True, slots=True)
class SystemMessages:
    """The system messages that a template writes where they stand: one at the head, several there,
    and later ones."""

    takes_one: bool
    takes_several: bool
    takes_later: bool

    @classmethod
    def of(cls, template: ChatTemplate) -> SystemMessages:
        """Tries a template. One that does not even write what a user says tells nothing."""
        if not _writes(template, "user"):
            return cls(takes_one=True, takes_several=True, takes_later=True)
        takes_one = _writes(template, "system", "user")
        return cls(
            takes_one,
            takes_one and _writes(template, "system", "system", "user"),
            takes_one and _writes(template, "system", "user", "assistant", "system", "user"),
        )

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation as the template takes it; without such messages it is the same."""
        num_head = _num_leading(messages)
        head, rest = list(messages[:num_head]), list(messages[num_head:])
        if len(head) > 1 and not self.takes_several and all(map(_is_text, head)):
            text = _BETWEEN.join(message["content"] for message in head)
            head = [{**head[0], "content": text}]
        if not self.takes_one:
            head, rest = [], [*head, *rest]
        has_more = any(message.get("role") in ROLES for message in rest)
        if has_more and not self.takes_later:
            rest = _said_by_user(rest)
        return [*head, *rest]


def _writes(template: ChatTemplate, *roles: str) -> bool:
    """Whether a template writes messages of these roles, each once and in their order."""
    marks = _MARKS[: len(roles)]
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    try:
        rendered = template.render(messages)
    except InvalidRequest:
        return False
    places = [rendered.find(mark) for mark in marks]
    return places[0] >= 0 and places == sorted(places)


def _num_leading(messages: Sequence[Message]) -> int:
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            return index
    return len(messages)


def _said_by_user(messages: Sequence[Message]) -> list[Message]:
    """System messages as words of the user. Some templates refuse two turns of one role, so they
    are part of the turn beside them."""
    turns: list[Message] = []
    was_system = False
    for message in messages:
        is_system = message.get("role") in ROLES
        turn: Mapping[str, Any] = {**message, "role": "user"} if is_system else message
        last = turns[-1] if turns else {}
        are_one = is_system or was_system
        if are_one and turn.get("role") == last.get("role") == "user" and _are_texts(last, turn):
            turn = {**last, "content": last["content"] + _BETWEEN + turn["content"]}
            turns.pop()
        turns.append(turn)
        was_system = is_system
    return turns


def _are_texts(*messages: Message) -> bool:
    return all(map(_is_text, messages))


def _is_text(message: Message) -> bool:
    return isinstance(message.get("content"), str)
