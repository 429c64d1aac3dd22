"""Calls of a tool whose whole input is one free text: OpenAI's custom tools.

For a model such a tool is a function with one parameter. Where a request demands it under a grammar
of the input, the answer is that input and nothing else; a grammar of its JSON could not be made.
"""

from __future__ import annotations

import json
import re

from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Grammar
from ferryman.text.tool_calls.json_text import in_quotes

# Whole characters and escapes; the first half of a pair only with the second.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}'
    r"(?:\\u[0-9a-fA-F]{4}|(?=[^\\])|(?=\\[^u])))*"
)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def free_text_call(sink: DeltaSink, name: str, parameter: str) -> Grammar[None]:
    """The whole text is the value of the only parameter of a tool."""
    character = yield
    sink.begin_call(name)
    sink.arguments(opening(parameter))
    while character:
        sink.arguments(in_quotes(character))
        character = yield
    if not sink.is_cut:
        sink.arguments('"}')


def opening(parameter: str) -> str:
    """The JSON of arguments, up to the text of their only parameter."""
    return f'{{"{parameter}": "'


class FreeText:
    """The free text in the arguments of a call, as they come."""

    def __init__(self, parameter: str) -> None:
        self._parameter, self._opening = parameter, opening(parameter)
        self._arguments = self._waiting = ""
        self._pieces: list[str] = []
        self._is_open = False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._pieces)

    def feed(self, arguments: str) -> str:
        """The text that comes with more arguments. Arguments of another form have none before
        their end."""
        self._waiting += arguments
        if not self._is_open:
            self._arguments += arguments
            if not self._waiting.startswith(self._opening):
                return ""
            self._is_open, self._waiting = True, self._waiting[len(self._opening) :]
        end = _WHOLE.match(self._waiting)
        assert end is not None, "no text at all is whole, too"
        return self._more(_unescaped(end[0]), self._waiting[end.end() :])

    def end(self) -> str:
        """The text that is left. Where there is no such text, the arguments are shown."""
        if self._is_open:
            return ""
        return self._more(_other_form(self._arguments, self._parameter), "")

    def _more(self, text: str, waiting: str) -> str:
        self._waiting = waiting
        self._pieces.append(text)
        return text


def _unescaped(text: str) -> str:
    """The characters of a part of a JSON string; half a character is none, and is replaced."""
    value = str(json.loads(f'"{text}"'))
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _other_form(arguments: str, parameter: str) -> str:
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    if not parsed:
        return ""
    value = parsed.get(parameter) if isinstance(parsed, dict) else None
    text = value if isinstance(value, str) else arguments
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
