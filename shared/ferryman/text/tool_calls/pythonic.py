"""Gemma 3, Llama 4 and others: the whole answer is `[name(key="value"), …]`, as Python writes it,
or such a list in a fence of kind `tool_code`."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    Malformed,
    attempt,
    content,
    expect,
    skip_space,
)

MAX_CALL_CHARS = 1 << 16
FENCE = "```tool_code"


def pythonic(sink: DeltaSink) -> Grammar[None]:
    """Calls when the text begins with a list of them; otherwise content."""
    space = ""
    while (first := (yield)).isspace():
        space += first
    if first == "[":
        yield from attempt(sink, space + first, _calls(sink))
    elif first == "`":
        yield from attempt(sink, space + first, _fenced(sink))
    else:
        sink.content(space + first)
    if first:
        yield from content(sink)


def _fenced(sink: DeltaSink) -> Grammar[None]:
    yield from expect(FENCE[1:])
    yield from expect("[", (yield from skip_space()))
    yield from _calls(sink)
    yield from expect("```", (yield from skip_space()))


def _calls(sink: DeltaSink) -> Grammar[None]:
    """A list whose opening bracket was read. Python's text of a value is not JSON's, so all of it
    is read before anything is passed on."""
    text, depth, quote = ["["], 1, ""
    while depth:
        character = yield
        if not character or len(text) >= MAX_CALL_CHARS:
            raise Malformed
        text.append(character)
        if quote:
            if character == "\\":
                if not (escaped := (yield)):
                    raise Malformed
                text.append(escaped)
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
    # All of them are read before the first is passed on.
    for name, arguments in list(_read("".join(text))):
        sink.begin_call(name)
        sink.arguments(arguments)


def _read(text: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(text, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        if not calls:
            raise Malformed
        for call in calls:
            yield _read_call(call)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _read_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise Malformed
    arguments = {str(keyword.arg): _literal_value(keyword.value) for keyword in call.keywords}
    # Escapes of half characters stay escapes.
    return ast.unparse(call.func), json.dumps(arguments, allow_nan=False)


def _literal_value(node: ast.expr) -> Any:
    """Python's literals, and JSON's three words, which models mix in."""
    return ast.literal_eval(_JsonWords().visit(node))


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in ("true", "false", "null"):
            return node
        return ast.copy_location(ast.Constant(json.loads(node.id)), node)
