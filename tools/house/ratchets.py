"""Exceptions to rules that are counted, and may only become fewer: `ratchets.toml` has the numbers.

A table of the file is a rule; its keys are folders, packages or pages, its numbers how many
exceptions each may have. A key that is not listed may have none.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.house.code import pronoun_locals
from tools.house.modules import MAX_MODULES, full_folders
from tools.house.sentences import MAX_COLUMNS, bare_openings, long_lines
from tools.house.source import REPOSITORY, Module

Counts = Mapping[str, Mapping[str, int]]

LISTED = Path(__file__).with_name("ratchets.toml")
# Each rule, and what its numbers count.
RULES = {
    "modules": f"modules directly in a folder that has more than {MAX_MODULES}",
    "locals": "local variables named by a pronoun, a package",
    "openings": "docstrings that begin without a subject, a package",
    "lines": f"lines of Markdown longer than {MAX_COLUMNS} characters, a page",
}


def listed() -> Counts:
    """The numbers that are allowed."""
    return tomllib.loads(LISTED.read_text())


def counted(modules: Iterable[Module], root: Path = REPOSITORY) -> Counts:
    """The numbers of today, of sources and of pages below `root`."""
    sources = [module for module in modules if module.is_source]
    return {
        "modules": full_folders(sources),
        "locals": Counter(package(module) for module, _ in pronoun_locals(sources)),
        "openings": Counter(package(module) for module, _ in bare_openings(sources)),
        "lines": long_lines(root),
    }


def package(module: Module) -> str:
    """The service, or the package inside `ferryman`, that a module belongs to."""
    parts = module.path.parts[1:-1]
    return ".".join(parts[:2] if parts[0] == "ferryman" else parts[:1])


def breaches(today: Counts, allowed: Counts) -> list[str]:
    """Numbers that have risen, and entries of the list that nothing needs any more."""
    risen = [
        f"{rule}: {key} has {count}, and {allowed[rule].get(key, 0)} are allowed ({RULES[rule]})"
        for rule, counts in today.items()
        for key, count in counts.items()
        if count > allowed[rule].get(key, 0)
    ]
    idle = [
        f"{rule}: {key} has none any more: take it out of {LISTED.name} ({RULES[rule]})"
        for rule, counts in allowed.items()
        for key in counts
        if key not in today[rule]
    ]
    return risen + idle


def written(today: Counts) -> str:
    """The text of `ratchets.toml` for these numbers."""
    tables = [
        "\n".join(
            [f"[{rule}]  # {RULES[rule]}", *(f'"{key}" = {counts[key]}' for key in sorted(counts))]
        )
        for rule, counts in today.items()
    ]
    return "\n\n".join(["# Made by `python tools/house_rules.py --ratchets`.", *tables])
