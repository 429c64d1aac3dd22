"""docs/operating.md against the settings classes: every name is there, with its default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_settings import BaseSettings

from ferryman_decode.service import DecodeSettings
from ferryman_hostcache.settings import Settings as HostCacheSettings
from ferryman_prefill.service import PrefillSettings
from ferryman_router.settings import RouterSettings

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
EVERY, WORKERS = "### Every service", "### Prefill and decode"
ROW = re.compile(r"^\| (`.+?) \| (.+?) \|")

SECTIONS = [
    pytest.param(RouterSettings, "### Router", id="router"),
    pytest.param(PrefillSettings, WORKERS, id="prefill"),
    pytest.param(DecodeSettings, WORKERS, id="decode"),
    pytest.param(HostCacheSettings, "### Host-cache", id="host-cache"),
]


def documented(title: str) -> dict[str, str]:
    """Names and defaults of one section's table; a row may name several."""
    section = DOCUMENT.read_text().partition(title)[2].partition("\n#")[0]
    found: dict[str, str] = {}
    for row in filter(None, map(ROW.match, section.splitlines())):
        names = re.findall(r"`(\w+)`", row[1])
        defaults = [part.strip() for part in row[2].split(",")] if len(names) > 1 else [row[2]]
        found |= dict(zip(names, defaults, strict=True))
    return found


def settings_of(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names as they stand in the environment, with their defaults, `...` where there is none."""
    for name, field in kind.model_fields.items():
        if isinstance(field.default, BaseModel):
            group = field.default
            for inner, value in settings_of(type(group), f"{prefix}{name.upper()}__"):
                attribute = inner.removeprefix(f"{prefix}{name.upper()}__").lower()
                yield inner, getattr(group, attribute, value)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings_of(field.annotation, f"{prefix}{name.upper()}__")
        else:
            yield prefix + name.upper(), ... if field.is_required() else field.default


@pytest.mark.parametrize(("kind", "title"), SECTIONS)
def test_every_setting_is_documented_with_its_default(kind: type[BaseSettings], title: str) -> None:
    told = documented(EVERY) | documented(title)
    for name, default in settings_of(kind):
        assert name in told, name
        if default is ...:
            assert told[name] == "required", name
        elif str(default) and "*" not in str(default):
            assert told[name].strip("`") == str(default), name


def test_no_setting_is_documented_that_does_not_exist() -> None:
    known = {name for param in SECTIONS for name, _ in settings_of(_kind_of(param.values))}
    titles = {EVERY, *(str(param.values[1]) for param in SECTIONS)}
    assert {name for title in titles for name in documented(title)} == known


def _kind_of(values: Any) -> type[BaseSettings]:
    kind: type[BaseSettings] = values[0]
    return kind
