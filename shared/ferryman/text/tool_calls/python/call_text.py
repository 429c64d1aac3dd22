"""Calls as Python writes them: `name(key="value", …)`, alone or in a list."""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Iterator
from typing import Any

from ferryman.text.tool_calls.call_object import MAX_NAME_CHARS, TOOL_NAME
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Grammar, Malformed

MAX_CALL_CHARS = 1 << 16
_PAIRS = {"[": "]", "(": ")", "{": "}"}
_LAST_NAME = re.compile(TOOL_NAME.pattern + "$")
_STAND_IN = "f"  # a name that Python reads, for one that it may not
_KEYWORD = "_is_no_keyword_here"


class CallText:
    """A list of calls, or one call, as Python reads it. Python's text of a value is not JSON's, so
    all of it is read before anything is passed on.

    Names of functions and parameters need not be names of Python: others stand in for them.
    """

    def __init__(self, sink: DeltaSink, first: str) -> None:
        self._sink, self._written, self._names = sink, [first], list[str]()
        self._open = [_PAIRS[first]] if first in _PAIRS else list[str]()
        self.is_over = False

    def read(self) -> Grammar[None]:
        """Up to the bracket that ends it. Only the last bracket of a list may be missing, where
        the model ended by itself: then `is_over`."""
        while character := (yield):
            if len(self._written) >= MAX_CALL_CHARS:
                raise Malformed
            if character in "\"'":
                self._written.append(character)
                yield from self._string(character)
            elif self._takes(character):
                return
        if self._open != ["]"] or self._sink.is_cut:
            raise Malformed
        self._written.append("]")
        self.is_over = True

    def _takes(self, character: str) -> bool:
        """Whether that was the last character."""
        if character == "(" and ")" not in self._open:
            self._names.append(self._taken_word())
            self._written.append(_STAND_IN)
        elif character == "=" and keyword.iskeyword(self._last_word):
            self._written.append(self._taken_word() + _KEYWORD)
        self._written.append(character)
        if character in _PAIRS:
            self._open.append(_PAIRS[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()
            return not self._open
        elif character in "])}":
            raise Malformed
        return False

    @property
    def _last_word(self) -> str:
        word = _LAST_NAME.search("".join(self._written[-MAX_NAME_CHARS:]).rstrip())
        return word[0] if word else ""

    def _taken_word(self) -> str:
        """The word at the end, which is taken away. Raises Malformed if there is none."""
        end = "".join(self._written[-MAX_NAME_CHARS:])
        last = _LAST_NAME.search(end.rstrip())
        if last is None:
            raise Malformed
        self._written[-MAX_NAME_CHARS:] = end[: last.start()]
        return last[0]

    def _string(self, quote: str) -> Grammar[None]:
        """A string whose quote was read. A line break in it is an escape to Python."""
        while (character := (yield)) != quote:
            if not character or len(self._written) >= MAX_CALL_CHARS:
                raise Malformed
            self._written.append(_ESCAPES.get(character, character))
            if character == "\\":
                if not (escaped := (yield)):
                    raise Malformed
                self._written.append(escaped)
        self._written.append(quote)

    def values(self) -> list[tuple[str, str]]:
        """Names, and JSON of the arguments. Raises Malformed."""
        try:
            return list(zip(self._names, self._arguments(), strict=True))
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            raise Malformed from None

    def _arguments(self) -> Iterator[str]:
        tree = ast.parse("".join(self._written), mode="eval").body
        for call in tree.elts if isinstance(tree, ast.List) else [tree]:
            if not isinstance(call, ast.Call) or call.args:
                raise Malformed
            yield _read_arguments(call.keywords)


_ESCAPES = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}


def _read_arguments(arguments: list[ast.keyword]) -> str:
    if any(argument.arg is None for argument in arguments):
        raise Malformed
    values = {
        str(argument.arg).removesuffix(_KEYWORD): _literal_value(argument.value)
        for argument in arguments
    }
    # Escapes of half characters stay escapes.
    return json.dumps(values, allow_nan=False)


def _literal_value(node: ast.expr) -> Any:
    """Python's literals, and JSON's three words, which models mix in."""
    return ast.literal_eval(_JsonWords().visit(node))


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in ("true", "false", "null"):
            return node
        return ast.copy_location(ast.Constant(json.loads(node.id)), node)
