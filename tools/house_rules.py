"""House rules that a machine can check: names, sizes, comments, sentences. Prints violations.

python tools/house_rules.py                 all rules
python tools/house_rules.py --uncommented   functions of 25 lines and more without a comment
python tools/house_rules.py --relative      sentences that begin with a relative clause
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", bound=ast.AST)

REPOSITORY = Path(__file__).parent.parent
SOURCES = ("services", "shared", "kernels")
EVERYWHERE = (*SOURCES, "tests", "tools", "proto")
GENERATED = "wire/v1"
SMALL_LINES, LONG_LINES = 60, 25
# Words of the field that end like a gerund, and proper nouns.
NOUNS = frozenset({"drafting", "gating", "grouped_routing", "routing", "testing"})
# Adverbs and metaphors that once were module names.
BANNED = frozenset(
    """
    answers arrivals assembly asked attendance behind chains comebacks content desk door facts
    fields forms joined journey leash line orders others outlets pace parts places problems
    remembered residence room roster served shelf shell shown spare surroundings tables
    team verdict where
    """.split()
)
# A relative clause continues with a small letter or a name; a heading such as "Who | What" does
# not.
RELATIVE_OPENING = re.compile(r"(What|Whatever|Which|Whichever|Who|Whoever|Whose)\s+[a-z`]")


@dataclass(frozen=True, slots=True)
class Module:
    """One source file. `name` is dotted, as it is imported."""

    path: Path
    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


def modules(roots: Iterable[str]) -> Iterator[Module]:
    """Every Python file below `roots` that is not generated."""
    for root in roots:
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            if GENERATED not in path.as_posix():
                parts = path.relative_to(REPOSITORY).with_suffix("").parts
                parts = parts[1:] if root in SOURCES else parts
                name = ".".join(parts).removesuffix(".__init__")
                yield Module(path.relative_to(REPOSITORY), name, path.read_text())


def repeated_classes(found: Iterable[Module]) -> Mapping[str, list[str]]:
    """Class names that occur more than once, with their places."""
    places = defaultdict[str, list[str]](list)
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module.path}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def odd_module_names(found: Iterable[Module]) -> list[str]:
    """Modules whose name is a gerund, or a metaphor that was given up."""
    odd = []
    for module in found:
        word = module.path.stem
        is_gerund = word.endswith("ing") and word not in NOUNS
        if word in BANNED or is_gerund:
            odd.append(str(module.path))
    return odd


def lonely_files(found: Iterable[Module]) -> Mapping[str, str]:
    """Small files with one importer, in the same folder: file → importer.

    Entry points, families, formats of calls and kernels may have any size. A module that is pure by
    a contract of `pyproject.toml` may not move into an importer that is not.
    """
    pure = (REPOSITORY / "pyproject.toml").read_text()
    every = list(found)
    importers = defaultdict[str, set[Module]](set)
    for module in every:
        for name in _imported(module):
            importers[name].add(module)
    lonely = {}
    for module in every:
        is_free = (
            module.path.stem.startswith("__")
            or {"families", "tool_calls", "ferryman_kernels"} & set(module.path.parts)
            or '__name__ == "__main__"' in module.text
            or f'"{module.name}"' in pure
        )
        if module.num_lines >= SMALL_LINES or is_free or len(importers[module.name]) != 1:
            continue
        (importer,) = importers[module.name]
        is_command = importer.path.stem in ("__main__", "commands")
        if importer.path.parent == module.path.parent and not is_command:
            lonely[str(module.path)] = str(importer.path)
    return lonely


def _imported(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def import_circles(found: Iterable[Module]) -> list[str]:
    """Modules that import each other: such imports work in one order only."""
    every = {module.name: module for module in found}
    needs = {
        name: {each for each in _imported_at_once(module) if each in every and each != name}
        for name, module in every.items()
    }
    # Modules without remaining imports are removed; the rest are circles, and modules on top of
    # them.
    while free := [name for name, needed in needs.items() if not needed & needs.keys()]:
        for name in free:
            del needs[name]
    return sorted(needs)


def _imported_at_once(module: Module) -> Iterator[str]:
    """Names imported by the module's own body, not by a function when it is called."""
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def uncommented_functions(found: Iterable[Module]) -> list[str]:
    """Functions with a body of LONG_LINES and more, without the docstring, that hold no comment."""
    silent = []
    for module in found:
        lines = module.text.splitlines(keepends=True)
        comments = {token.start[0] for token in _comments(module)}
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            first = body[0].lineno if body else node.lineno
            last = node.end_lineno or first
            if last - first + 1 >= LONG_LINES and not comments & set(range(first, last + 1)):
                silent.append(f"{module.path}:{node.lineno} {node.name} ({len(lines[first:last])})")
    return silent


def relative_openings(found: Iterable[Module]) -> list[str]:
    """Sentences of docstrings and comments that begin with a relative clause: place and text.

    A question may begin with the same words.
    """
    return [
        f"{module.path}:{line} {sentence}"
        for module in found
        for line, text in sorted(_docstrings(module) + _comment_blocks(module))
        for sentence in _sentences(text)
        if RELATIVE_OPENING.match(sentence) and not sentence.endswith("?")
    ]


def timed_simple_queues(found: Iterable[Module]) -> list[str]:
    """Places that wait for something with a timeout in a module with a SimpleQueue.

    CPython 3.11 computes the rest of the time again after a lock that was free; below zero it waits
    for ever, and no later `put` is due. A Queue checks.
    """
    return [
        f"{module.path}:{node.lineno}"
        for module in found
        if "SimpleQueue" in {node.attr for node in _nodes(module, ast.Attribute)}
        for node in _nodes(module, ast.Call)
        if isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and any(keyword.arg == "timeout" for keyword in node.keywords)
    ]


def _nodes(module: Module, kind: type[T]) -> Iterator[T]:
    return (node for node in ast.walk(module.tree) if isinstance(node, kind))


def _sentences(text: str) -> Iterator[str]:
    """The sentences of every paragraph. Indented lines are formulas or tables, and divide it."""
    lines = ["" if line.startswith(" ") else line for line in text.splitlines()]
    for paragraph in re.split(r"\n{2,}", "\n".join(lines)):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))


def _docstrings(module: Module) -> list[tuple[int, str]]:
    """Line and text, dedented, of every string that is a statement: of attributes too."""
    return [
        (node.lineno, re.sub(f"(?m)^ {{{node.col_offset}}}", "", node.value.value))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def _comment_blocks(module: Module) -> list[tuple[int, str]]:
    """First line and text of every comment; comments on lines of their own are joined."""
    blocks: list[tuple[int, list[str]]] = []
    before: tuple[int, int] | None = None
    for token in _comments(module):
        line, column = token.start
        text = token.string.removeprefix("#").removeprefix(" ")
        is_alone = not token.line[:column].strip()
        if is_alone and before == (line - 1, column):
            blocks[-1][1].append(text)
        else:
            blocks.append((line, [text]))
        before = (line, column) if is_alone else None
    return [(line, "\n".join(texts)) for line, texts in blocks]


def _comments(module: Module) -> Iterator[tokenize.TokenInfo]:
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token


def main() -> int:
    sources = list(modules(SOURCES))
    if "--uncommented" in sys.argv[1:]:
        print("\n".join(uncommented_functions(sources)))
        return 0
    if "--relative" in sys.argv[1:]:
        print("\n".join(relative_openings(modules(EVERYWHERE))))
        return 0
    broken = [
        *(
            f"class {name}: {', '.join(at)}"
            for name, at in repeated_classes(modules(EVERYWHERE)).items()
        ),
        *(f"module {path}: no noun of the field" for path in odd_module_names(sources)),
        *(f"module {name}: imports in a circle" for name in import_circles(sources)),
        *(
            f"{place}: a SimpleQueue must not wait with a timeout"
            for place in timed_simple_queues(sources)
        ),
        *(f"file {path}: belongs to {to}" for path, to in lonely_files(sources).items()),
    ]
    print("\n".join(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
