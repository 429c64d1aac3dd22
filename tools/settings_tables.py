"""The tables of settings in docs/operating.md, from the settings' own declarations.

python tools/settings_tables.py          writes them between their markers
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from ferryman.settings.cluster import UpOptions
from ferryman.settings.declaration import Leaf, leaves
from ferryman.settings.names import SERVICES

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs as a plain script

from tools.markdown_table import short_table

PAGE = Path(__file__).parent.parent / "docs" / "operating.md"
HEAD = ("name", "default", "meaning")
# The names of the services in the tables; all kinds of worker have one name.
TITLES = {
    "router": "router",
    "prefill": "workers",
    "decode": "workers",
    "both": "workers",
    "hostcache": "host-cache",
}

Row = tuple[str, str, str]


def tables() -> dict[str, list[Row]]:
    """The rows of each table, by the name of its marker. Every setting occurs once."""
    found: dict[str, list[Row]] = {"several": [], **{title: [] for title in TITLES.values()}}
    for leaf, titles in _by_name().values():
        if len(titles) == 1:
            found[titles[0]].append(_row(leaf))
        else:
            found["several"].append(_row(leaf, titles))
    known = _by_name()
    alone = {leaf.name: leaf for leaf in leaves(UpOptions) if leaf.name not in known}
    return {**found, "cluster": [_row(leaf) for leaf in alone.values()]}


def _by_name() -> dict[str, tuple[Leaf, list[str]]]:
    """For each setting, its first declaration and the services that have it."""
    found: dict[str, tuple[Leaf, list[str]]] = {}
    for role, kind in SERVICES.items():
        for leaf in leaves(kind):
            first, titles = found.setdefault(leaf.name, (leaf, []))
            if leaf.path != first.path and role == next(iter(SERVICES)):
                # It stands for several members: what it means for one of them is not all.
                found[leaf.name] = (replace(first, meaning=str(leaf.field.description)), titles)
            if TITLES[role] not in titles:
                titles.append(TITLES[role])
    return found


def _row(leaf: Leaf, titles: list[str] | None = None) -> Row:
    whom = f" ({', '.join(titles)})" if titles and len(titles) < len(set(TITLES.values())) else ""
    default = "required" if leaf.default is ... else _shown(leaf.default)
    return f"`{leaf.name.upper()}`", default, leaf.meaning + whom


def _shown(value: Any) -> str:
    if isinstance(value, SecretStr) or str(value) == "":
        return "none"
    return f"`{value}`"


def written(page: str) -> str:
    """The page with its tables as declared. Raises ValueError if a marker is missing."""
    for name, found in tables().items():
        begin, end = f"<!-- settings: {name} -->", "<!-- end of settings -->"
        lines = short_table(HEAD, found, long=2)
        before, found_begin, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"the page has no place for the settings of {name}")
        page = "\n".join([before + begin, *lines, end + after])
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
