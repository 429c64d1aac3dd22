"""The modules of this repository, parsed once, with their strings and comments."""

from __future__ import annotations

import ast
import gc
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", bound=ast.AST)

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("services", "shared", "kernels")
EVERYWHERE = (*SOURCES, "tests", "tools", "proto")
GENERATED = "wire/v1"


@dataclass(frozen=True)
class Module:
    """One source file. `name` is dotted, as it is imported."""

    path: Path
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> Sequence[ast.AST]:
        """All nodes of the tree: most rules look at all of them."""
        return tuple(ast.walk(self.tree))

    def nodes_of(self, kind: type[T]) -> Iterator[T]:
        return (node for node in self.nodes if isinstance(node, kind))

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @property
    def is_source(self) -> bool:
        return self.path.parts[0] in SOURCES

    @property
    def docstrings(self) -> Sequence[tuple[int, str]]:
        """Line and text, dedented, of every string that is a statement: of attributes too."""
        return [
            (node.lineno, re.sub(f"(?m)^ {{{node.col_offset}}}", "", node.value.value))
            for node in self.nodes_of(ast.Expr)
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]

    def comments(self) -> Iterator[tokenize.TokenInfo]:
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token

    @property
    def comment_blocks(self) -> Sequence[tuple[int, str]]:
        """First line and text of every comment; comments on lines of their own are joined."""
        blocks: list[tuple[int, list[str]]] = []
        before: tuple[int, int] | None = None
        for token in self.comments():
            line, column = token.start
            text = token.string.removeprefix("#").removeprefix(" ")
            is_alone = not token.line[:column].strip()
            if is_alone and before == (line - 1, column):
                blocks[-1][1].append(text)
            else:
                blocks.append((line, [text]))
            before = (line, column) if is_alone else None
        return [(line, "\n".join(texts)) for line, texts in blocks]


def modules(roots: Iterable[str]) -> Iterator[Module]:
    """Every Python file below `roots` that is not generated."""
    for root in roots:
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            if GENERATED not in path.as_posix():
                parts = path.relative_to(REPOSITORY).with_suffix("").parts
                parts = parts[1:] if root in SOURCES else parts
                name = ".".join(parts).removesuffix(".__init__")
                yield Module(path.relative_to(REPOSITORY), name, path.read_text())


def parsed(roots: Iterable[str]) -> Sequence[Module]:
    """All modules below `roots`, parsed.

    The collector of cyclic garbage pauses meanwhile: it would walk over the growing trees again and
    again, which takes twice as long as the parsing, and none of them is garbage.
    """
    every = list(modules(roots))
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for module in every:
            _ = module.nodes
    finally:
        if was_enabled:
            gc.enable()
    return every
