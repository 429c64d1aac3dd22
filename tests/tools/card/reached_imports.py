"""The packages that some modules of this repository import, themselves or by others of it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
SHELVES = tuple(ROOT / name for name in ("services", "shared", "kernels", "."))


def outside_packages(modules: Iterable[str]) -> Mapping[str, str]:
    """Each package that is not ours and not Python's, by the name that is imported, and a module
    that imports it. Imports within functions count; those for types alone do not, nor those that
    stand in a `try` because they may fail."""
    packages: dict[str, str] = {}
    passed, waiting = set[str](), list(modules)
    while waiting:
        module = waiting.pop()
        if module in passed:
            continue
        passed.add(module)
        waiting += [parent for parent in _parents(module) if _file(parent)]
        path = _file(module)
        assert path is not None, f"{module} is no module of this repository"
        for name in _imports(ast.parse(path.read_text())):
            top = name.partition(".")[0]
            if _file(name):
                waiting.append(name)
            elif not _is_ours(top) and top not in sys.stdlib_module_names:
                packages.setdefault(top, module)
    return packages


def _parents(module: str) -> Iterator[str]:
    words = module.split(".")
    return (".".join(words[:end]) for end in range(1, len(words)))


def _file(module: str) -> Path | None:
    for shelf in SHELVES:
        place = shelf.joinpath(*module.split("."))
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path
    return None


def _is_ours(top: str) -> bool:
    return any((shelf / top).is_dir() or (shelf / f"{top}.py").is_file() for shelf in SHELVES)


def _imports(tree: ast.AST) -> Iterator[str]:
    """All names that may be modules: `from a import b` gives a and a.b."""
    for node in ast.iter_child_nodes(tree):
        if _may_be_left_out(node):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from _imports(node)


def _may_be_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if not isinstance(node, ast.Try):
        return False
    kinds = [ast.unparse(handler.type) for handler in node.handlers if handler.type]
    return any("ImportError" in kind or "ModuleNotFoundError" in kind for kind in kinds)
