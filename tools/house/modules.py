"""Rules about modules: their names, their imports, and which folders they fill."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from tools.house.source import REPOSITORY, Module

SMALL_LINES = 60
MAX_MODULES = 16
# Words of the field that end like a gerund, and proper nouns.
NOUNS = frozenset({"drafting", "gating", "grouped_routing", "inkling", "routing"})
# Adverbs and metaphors that once were module names.
BANNED = frozenset(
    """
    answers arrivals assembly asked attendance behind chains comebacks content desk door facts
    fields forms joined journey leash line orders others outlets pace parts places problems
    remembered residence room roster served shelf shell shown spare surroundings tables
    team verdict where
    """.split()
)
# Lists of like things, of which nobody has to know more than one.
CATALOGUES = frozenset({"families", "layers"})
# Folders that stay in the repository: no service may need them.
NOT_INSTALLED = frozenset({"tests", "tools"})


def repeated_classes(modules: Iterable[Module]) -> Mapping[str, list[str]]:
    """Class names that occur more than once, with their places."""
    places = defaultdict[str, list[str]](list)
    for module in modules:
        for node in module.nodes_of(ast.ClassDef):
            places[node.name].append(f"{module.path}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def odd_module_names(modules: Iterable[Module]) -> list[str]:
    """Modules whose name is a gerund, or a metaphor that was given up."""
    odd = []
    for module in modules:
        word = module.path.stem
        is_gerund = word.endswith("ing") and word not in NOUNS
        if word in BANNED or is_gerund:
            odd.append(str(module.path))
    return odd


def full_folders(modules: Iterable[Module]) -> Mapping[str, int]:
    """Folders with more than MAX_MODULES modules directly in them, `__init__` not counted."""
    counts = Counter(
        module.path.parent
        for module in modules
        if module.path.stem != "__init__" and module.path.parent.name not in CATALOGUES
    )
    return {str(folder): count for folder, count in counts.items() if count > MAX_MODULES}


def lonely_files(modules: Iterable[Module]) -> Mapping[str, str]:
    """Small files with one importer, in the same folder: file → importer.

    Entry points, families, formats of calls and kernels may have any size. A module that is pure by
    a contract of `pyproject.toml` may not move into an importer that is not.
    """
    pure = (REPOSITORY / "pyproject.toml").read_text()
    every = list(modules)
    importers = defaultdict[str, set[Module]](set)
    for module in every:
        for name in imported(module.nodes):
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


def import_circles(modules: Iterable[Module]) -> list[str]:
    """Modules that import each other: such imports work in one order only.

    Imports in the module's own body count, not those that a function makes when it is called.
    """
    every = {module.name: module for module in modules}
    needs = {
        name: {other for other in imported(module.tree.body) if other in every and other != name}
        for name, module in every.items()
    }
    # Modules without remaining imports are removed; the rest are circles, and modules on top of
    # them.
    while free := [name for name, needed in needs.items() if not needed & needs.keys()]:
        for name in free:
            del needs[name]
    return sorted(needs)


def imports_of_developers(sources: Iterable[Module]) -> list[str]:
    """Sources that import what is not installed with them, function bodies included."""
    return [
        str(module.path)
        for module in sources
        if any(name.partition(".")[0] in NOT_INSTALLED for name in imported(module.nodes))
    ]


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names that imports among `nodes` mention: modules, and what is taken from them."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
