"""One change of a file's text, made from a node of its syntax tree."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """Bytes `start` to `end` of `file` become `new`.

    `kind` is the operator's name. `first` and `last` are the lines whose execution matters, `body`
    the lines that only run when a check bites, or nothing. `function` is the qualified name of the
    function around it.
    """

    kind: str
    file: str
    function: str
    start: int
    end: int
    old: str
    new: str
    first: int
    last: int
    body: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """One line that does not name line numbers, which move."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        change = f"without `{old}`" if new in ("pass", "") else f"`{old}` is `{new}`"
        return f"{self.kind}: {self.file} {self.function}: {change}"

    def planted_in(self, text: str) -> str:
        """The file's text with the change. Raises ValueError if it is not the drawn one."""
        source = text.encode()
        if source[self.start : self.end] != self.old.encode():
            raise ValueError(f"{self.file} has changed since this was drawn: {self.name}")
        return (source[: self.start] + self.new.encode() + source[self.end :]).decode()


class Text:
    """A file's bytes, in which nodes are found: their columns count bytes."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """The node's first byte and the one after its last."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, start: int, end: int) -> str:
        return self._source[start:end].decode()

    def after(self, position: int, skipped: bytes) -> int:
        """The first position from `position` on whose byte is none of `skipped`."""
        while self._source[position : position + 1] and self._source[position] in skipped:
            position += 1
        return position
