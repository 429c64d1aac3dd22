"""Our sources import what pip installs with them: tools of developers are not there."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from itertools import chain
from pathlib import Path

from tests.deploy.compose_file import ROOT

NAME = re.compile(r"[\w.-]+")
EXTRA = re.compile(r"extra\s*==\s*[\"']([\w-]+)[\"']")
# Each is asked for where it is used, by an error that says how to get it.
EXTRAS = ("bench", "nixl", "otel", "plot", "s3")
# Comes with torch for cards, and is imported by what runs on one; stubs are for type checkers.
APART = {"triton", "_typeshed"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def our_requirements() -> Iterator[str]:
    """The names of what pip installs with this tree and EXTRAS of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in chain(project["dependencies"], *(extras[name] for name in EXTRAS)):
        yield canonical(NAME.findall(line)[0])


def requirements(name: str) -> Iterator[str]:
    """The names of what a distribution needs, without its extras."""
    for line in requires(name) or ():
        if EXTRA.search(line) is None:
            yield canonical(NAME.findall(line)[0])


def brought() -> set[str]:
    """All that comes with us, and with what comes with us."""
    known, waiting = {"ferryman"}, list(our_requirements())
    while waiting:
        name = waiting.pop()
        if name not in known:
            known.add(name)
            try:
                waiting += requirements(name)
            except PackageNotFoundError:
                continue  # for another platform, or in none but one extra
    return known


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_every_import_is_of_what_is_installed_with_us() -> None:
    of_module, known = packages_distributions(), brought()
    for folder in ("services", "shared", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in set(imported(path)) - sys.stdlib_module_names - APART:
                ours = name.startswith("ferryman")
                homes = {canonical(each) for each in of_module.get(name, ())}
                assert ours or homes & known, f"{path} imports {name}"
