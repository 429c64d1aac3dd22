"""The ids of calls, by which a client gives their results back, and those that a template takes.

Most templates take any id, or show none. Mistral's refuse all but nine characters. Kimi's show the
model the id in place of a name, `functions.name:0`, and the model writes its next ids like those
it sees. Clients send other ids, too: of a conversation that another model began, or with the dot
and the colon replaced, where a protocol has no such characters. So a template is tried, once, and
gets the ids that it takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from ferryman.errors import InvalidRequest
from ferryman.text.chat import ChatTemplate, Message
from ferryman.text.tool_calls import kimi_k2

_NUMBER = re.compile(r"[0-9]{1,9}$")
_NINE = re.compile(r"[A-Za-z0-9]{9}")


class CallSource(NamedTuple):
    """The origin of a call's id: hex digits that no other call has, the tool's name, and the
    number of the call in its conversation."""

    digest: str
    name: str
    number: int


def openai_id(source: CallSource) -> str:
    """The id where a template takes any."""
    return f"call_{source.digest:.24}"


def mistral_id(source: CallSource) -> str:
    """Nine characters."""
    return f"{source.digest:.9}"


def kimi_id(source: CallSource) -> str:
    """The tool's name and the number of the call."""
    return f"functions.{source.name}:{source.number}"


class FittedCalls(NamedTuple):
    """A conversation whose calls have the ids that its template takes, and the number of the next
    call in it."""

    messages: list[Message]
    next_number: int


@dataclass(frozen=True, slots=True)
class CallIds:
    """The ids that a template takes: `fit` makes one of a call's own id, of its tool's name and of
    the next number, and says which number is next then. None: it takes any."""

    fit: Callable[[str, str, int], tuple[str, int]] | None

    @classmethod
    def of(cls, template: ChatTemplate) -> CallIds:
        """Tries a template."""
        call_id = kimi_id(CallSource("", _NAME, 0))
        rendered = _rendered(template, call_id)
        if rendered is not None:
            is_shown = f"{kimi_k2.CALL}{call_id}{kimi_k2.ARGUMENTS}" in rendered
            return cls(_numbered if is_shown else None)
        return cls(None if _rendered(template, _SHORT_ID) is None else _of_nine_characters)

    def fitted(self, messages: Sequence[Message]) -> FittedCalls:
        """The same conversation with ids that the template takes."""
        if self.fit is None:
            return FittedCalls(list(messages), 0)
        fitted, by_id, number = list[Message](), dict[str, str](), 0
        for message in messages:
            calls = message.get("tool_calls")
            if isinstance(calls, list):
                renamed = list[Any]()
                for call in calls:
                    new, number = self._renamed(call, number, by_id)
                    renamed.append(new)
                message = {**message, "tool_calls": renamed}
            if message.get("tool_call_id") in by_id:
                message = {**message, "tool_call_id": by_id[message["tool_call_id"]]}
            fitted.append(message)
        return FittedCalls(fitted, number)

    def _renamed(self, call: Any, number: int, by_id: dict[str, str]) -> tuple[Any, int]:
        """A call with the id that fits, which is noted under its own."""
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if self.fit is None or not isinstance(name, str):
            return call, number
        call_id = str(call.get("id") or "")
        by_id[call_id], number = self.fit(call_id, name, number)
        return {**call, "id": by_id[call_id]}, number


_NAME, _SHORT_ID = "mark", "abcdef123"


def _rendered(template: ChatTemplate, call_id: str) -> str | None:
    """A conversation with one call; None where the template refuses it."""
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": {}}}
    messages: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "!", "name": _NAME, "tool_call_id": call_id},
    ]
    try:
        return template.render(messages)
    except InvalidRequest:
        return None


def _of_nine_characters(call_id: str, name: str, number: int) -> tuple[str, int]:
    is_fit = _NINE.fullmatch(call_id) is not None
    return call_id if is_fit else blake2b(call_id.encode()).hexdigest()[:9], number


def _numbered(call_id: str, name: str, number: int) -> tuple[str, int]:
    """The id that a call has, or had before a client replaced some of its characters; else one with
    the next number."""
    digits = _NUMBER.search(call_id)
    if digits is not None:
        canonical = kimi_id(CallSource("", name, int(digits[0])))
        if kimi_k2.plain(canonical) == kimi_k2.plain(call_id):
            return canonical, max(number, int(digits[0]) + 1)
    return kimi_id(CallSource("", name, number)), number + 1
