"""The mistakes that are drawn: each operator yields the edits of one node."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tools.mutation.edits import Edit, Text
from tools.mutation.equivalents import (
    WORDS,
    compares_instants,
    is_pace,
    is_shown_length,
    last_name,
)

KINDS = ("call", "wait", "release", "check", "off by one", "swapped", "negated", "keyword")
RELEASES = (
    "release", "free", "close", "aclose", "give_back", "discard", "remove", "cancel", "unlink",
    "abort", "end", "stop", "clear", "drop", "detach", "pop", "forget", "unsubscribe", "unregister",
    "withdraw", "delete", "kill", "terminate", "leave", "finish", "done", "set", "notify",
    "set_result", "set_exception", "shutdown", "unpin", "unlock", "munmap", "give_up",
)  # fmt: skip
NEIGHBOURS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
SYMMETRIC = {"max", "min", "isinstance", "zip", "gcd", "isclose", "hypot", "logical_or"}


@dataclass(frozen=True, slots=True)
class EditPlace:
    """Where a node stands. `optional`: what may be left out of a call of each name."""

    file: str
    function: str
    text: Text
    statement: ast.stmt
    optional: Mapping[str, frozenset[str]]

    def edit(self, kind: str, span: tuple[int, int], new: str, body: tuple[int, ...] = ()) -> Edit:
        first, last = self.statement.lineno, _header_end(self.statement)
        old = self.text.of(*span)
        return Edit(kind, self.file, self.function, *span, old, new, first, last, body)


def _header_end(statement: ast.stmt) -> int:
    """The last line of a statement without the block below it."""
    body: list[ast.stmt] = getattr(statement, "body", [])
    if body:
        return max(statement.lineno, body[0].lineno - 1)
    return statement.end_lineno or statement.lineno


def statement_edits(node: ast.stmt, place: EditPlace) -> Iterator[Edit]:
    """Calls, waits, releases and checks that are left out."""
    if isinstance(node, ast.Expr):
        waited = isinstance(node.value, ast.Await)
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not is_pace(call):
            kind = "release" if _releases(call) else "wait" if waited else "call"
            yield _left_out(kind, node, place)
    if isinstance(node, ast.If) and _is_check(node):
        lines = tuple(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        yield _left_out("check", node, place, lines)


def _left_out(kind: str, node: ast.stmt, place: EditPlace, body: tuple[int, ...] = ()) -> Edit:
    """The statement without a trace, but for its lines: those below keep their numbers."""
    span = place.text.span(node)
    return place.edit(kind, span, "pass" + "\n" * place.text.of(*span).count("\n"), body)


def _releases(call: ast.Call) -> bool:
    words = last_name(call.func).strip("_")
    return any(words == word or words.startswith(f"{word}_") for word in RELEASES)


def _is_check(node: ast.If) -> bool:
    """True for `if …: raise …` and an early return of nothing, or of a constant."""
    if node.orelse or len(node.body) != 1:
        return False
    only = node.body[0]
    if isinstance(only, ast.Return):
        return only.value is None or isinstance(only.value, ast.Constant)
    return isinstance(only, ast.Raise | ast.Continue)


def expression_edits(node: ast.AST, place: EditPlace) -> Iterator[Edit]:
    """Conditions, comparisons, slices and arguments that are mistaken."""
    if isinstance(node, ast.If | ast.IfExp):
        yield _negated(node.test, place)
    elif isinstance(node, ast.comprehension):
        yield from (_negated(test, place) for test in node.ifs)
    elif isinstance(node, ast.Compare):
        yield from _off_by_one(node, place)
    elif isinstance(node, ast.Slice):
        yield from _shifted(node, place)
    elif isinstance(node, ast.Call):
        yield from _swapped(node, place)
        yield from _without_keyword(node, place)


def _negated(test: ast.expr, place: EditPlace) -> Edit:
    span = place.text.span(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return place.edit("negated", span, f"({place.text.of(*place.text.span(test.operand))})")
    return place.edit("negated", span, f"(not ({place.text.of(*span)}))")


def _off_by_one(node: ast.Compare, place: EditPlace) -> Iterator[Edit]:
    if len(node.ops) != 1 or type(node.ops[0]) not in NEIGHBOURS or compares_instants(node):
        return
    left, right = (place.text.span(side) for side in (node.left, node.comparators[0]))
    between = place.text.of(left[1], right[0])
    old = {"<=": "<", "<": "<=", ">=": ">", ">": ">="}[NEIGHBOURS[type(node.ops[0])]]
    new = between.replace(old, NEIGHBOURS[type(node.ops[0])])
    sides = (place.text.of(*left), place.text.of(*right))
    yield place.edit("off by one", place.text.span(node), sides[0] + new + sides[1])


def _shifted(node: ast.Slice, place: EditPlace) -> Iterator[Edit]:
    for bound in (node.lower, node.upper):
        if bound is not None and not is_shown_length(bound):
            span = place.text.span(bound)
            yield place.edit("off by one", span, f"({place.text.of(*span)}) + 1")


def _swapped(node: ast.Call, place: EditPlace) -> Iterator[Edit]:
    if last_name(node.func) in SYMMETRIC:
        return
    for one, two in zip(node.args, node.args[1:], strict=False):
        if all(isinstance(side, ast.Name | ast.Attribute) for side in (one, two)):
            first, second = place.text.span(one), place.text.span(two)
            texts = place.text.of(*first), place.text.of(*second)
            if texts[0] != texts[1]:
                between = place.text.of(first[1], second[0])
                new = texts[1] + between + texts[0]
                yield place.edit("swapped", (first[0], second[1]), new)


def _without_keyword(node: ast.Call, place: EditPlace) -> Iterator[Edit]:
    optional = place.optional.get(last_name(node.func))
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in WORDS:
            continue
        if optional is None or keyword.arg in optional:
            start, end = place.text.span(keyword)
            yield place.edit("keyword", (start, place.text.after(end, b", \n")), "")
