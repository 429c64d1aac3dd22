"""docs/operating.md against the settings classes: every name is there, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from ferryman.settings.declaration import leaves
from ferryman.settings.hostcache import HostCacheServiceSettings as HostCacheSettings
from ferryman.settings.router import RouterSettings
from ferryman.settings.workers import DecodeSettings, PrefillSettings

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
SEVERAL, WORKERS = "### Several services", "### Prefill and decode"
ROW = re.compile(r"^\| (`.+?) \| (.+?) \|")

KINDS: list[tuple[type[BaseModel], str]] = [
    (RouterSettings, "### Router"),
    (PrefillSettings, WORKERS),
    (DecodeSettings, WORKERS),
    (HostCacheSettings, "### Host-cache"),
]


def documented(title: str) -> dict[str, str]:
    """Names and defaults of one section's table."""
    section = DOCUMENT.read_text().partition(title)[2].partition("\n#")[0]
    rows = filter(None, map(ROW.match, section.splitlines()))
    return {row[1].strip("`"): row[2] for row in rows}


def defaults_of(kind: type[BaseModel]) -> dict[str, object]:
    """Names as in the environment, with their defaults, `...` where there is none."""
    found: dict[str, object] = {}
    for leaf in leaves(kind):
        found.setdefault(leaf.name.upper(), leaf.default)
    return found


@pytest.mark.parametrize(("kind", "title"), KINDS)
def test_every_setting_is_documented_with_its_default(kind: type[BaseModel], title: str) -> None:
    told = documented(SEVERAL) | documented(title)
    for name, default in defaults_of(kind).items():
        assert name in told, name
        if default is ...:
            assert told[name] == "required", name
        elif str(default) and "*" not in str(default):
            assert told[name].strip("`") == str(default), name


def test_no_setting_is_documented_where_it_does_not_exist() -> None:
    known: dict[str, set[str]] = {SEVERAL: set()}
    for kind, title in KINDS:
        names = set(defaults_of(kind))
        known.setdefault(title, set()).update(names)
        known[SEVERAL] |= names
    unknown = {title: set(documented(title)) - names for title, names in known.items()}
    assert unknown == {title: set() for title in known}


def test_a_name_stands_in_one_table_alone() -> None:
    names = [
        name for title in {SEVERAL, *(title for _, title in KINDS)} for name in documented(title)
    ]
    assert len(names) == len(set(names))
