"""Tests that speak of what a defect changes: one that names a field rather notices its loss.

Hundreds of tests reach a line of the wiring, and few ask about it. Words are those of the code:
each counts by how few tests have it, in the test's own text more than elsewhere in its file.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

WORD = re.compile(r"[a-z]{4,}")
SHARE_OF_FILE = 0.3


def words_of(code: str) -> frozenset[str]:
    """The words in names of a piece of code: `num_tokens` has `tokens`."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", code).lower()
    return frozenset(WORD.findall(spaced.replace("_", " ")))


class TestWords:
    """The words of each test function and of each file, as asked for."""

    __test__ = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, tuple[frozenset[str], dict[str, frozenset[str]]]] = {}

    def affinities(self, tests: Iterable[str], code: str) -> Mapping[str, float]:
        """Test → how much of what `code` names it names too."""
        wanted = words_of(code)
        of_test = {name: self._words(name) for name in tests}
        own = {name: wanted & words[0] for name, words in of_test.items()}
        others = {name: wanted & words[1] for name, words in of_test.items()}
        num_with = Counter(word for words in others.values() for word in words)
        return {
            name: sum(1 / num_with[word] for word in own[name])
            + SHARE_OF_FILE * sum(1 / num_with[word] for word in others[name])
            for name in of_test
        }

    def _words(self, test: str) -> tuple[frozenset[str], frozenset[str]]:
        file, *names = test.split("[", 1)[0].split("::")
        if file not in self._files:
            self._files[file] = self._read(file)
        in_file, functions = self._files[file]
        return functions.get(names[-1], frozenset()), in_file

    def _read(self, file: str) -> tuple[frozenset[str], dict[str, frozenset[str]]]:
        text = (self._root / file).read_text()
        lines = text.splitlines()
        functions = {
            node.name: words_of("\n".join(lines[_start(node) - 1 : node.end_lineno]))
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        return words_of(text), functions


def _start(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
