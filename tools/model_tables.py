"""The tables of docs/models.md, from the families' own declarations and the published configs.

python tools/model_tables.py          writes them between their markers

A published config is a file in tests/model/published: a model's id, the source of the facts, and
the fields of its config.json. `unused` names the fields that this model's layers do not use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ferryman.cache.manifest import Kind
from ferryman.model.config import family_of, load_config
from ferryman.model.families import FAMILIES, Family
from ferryman.model.shapes.model_shapes import ModelConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs as a plain script

from tools.markdown_table import short_table

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "models.md"
PUBLISHED = REPOSITORY / "tests" / "model" / "published"

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PublishedConfig:
    """The config.json of a model on the Hugging Face hub."""

    model: str
    source: str
    unused: tuple[str, ...]
    config: dict[str, Any]

    def write(self, folder: Path) -> Path:
        """Writes config.json as it is published."""
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """A published config, its family, and the config that the family read from it."""

    published: PublishedConfig
    family: Family[Any]
    config: ModelConfig

    @property
    def kinds(self) -> set[Kind]:
        return {shape.kind for layer in self.config.states for shape in layer}

    @property
    def format(self) -> str:
        """The quantisation that the config names, or "plain"."""
        config = self.published.config
        text = config.get("text_config", {})
        found = config.get("quantization_config", text.get("quantization_config"))
        return str(found.get("quant_method")) if isinstance(found, dict) else "plain"


def published_configs() -> list[PublishedConfig]:
    """All of them, by the names of their files."""
    return [_published(path) for path in sorted(PUBLISHED.glob("*.json"))]


def _published(path: Path) -> PublishedConfig:
    raw = json.loads(path.read_text())
    if path.stem != raw["model"].replace("/", "--"):
        raise ValueError(f"{path.name} is the config of {raw['model']}")
    return PublishedConfig(raw["model"], raw["source"], tuple(raw["unused"]), raw["config"])


def read_configs() -> list[ReadConfig]:
    """Every published config, read. Raises ConfigError for one that is refused."""
    with TemporaryDirectory() as name:
        return [_read(each, Path(name)) for each in published_configs()]


def _read(published: PublishedConfig, folder: Path) -> ReadConfig:
    published.write(folder)
    return ReadConfig(published, family_of(folder), load_config(folder))


def family_rows(read: Iterable[ReadConfig]) -> list[Row]:
    """A row for each family: file, name, models, architectures, state, formats, configs read."""
    found = list(read)
    return sorted(
        _family_row(family, [e for e in found if e.family == family]) for family in FAMILIES
    )


def _family_row(family: Family[Any], read: list[ReadConfig]) -> Row:
    return (
        f"`{family.name}`",
        f"`{family.file}`",
        family.summary,
        ", ".join(f"`{name}`" for name in family.architectures),
        ", ".join(family.kinds),
        family.formats,
        str(len(read)),
    )


def published_rows(read: Iterable[ReadConfig]) -> list[Row]:
    """A row for each published config: its id, its format, its family, its source."""
    return [
        (
            f"`{each.published.model}`",
            each.format,
            f"`{each.family.name}`",
            each.published.source,
        )
        for each in read
    ]


def written(page: str) -> str:
    """The page with its tables as declared. Raises ValueError if a marker is missing."""
    read = read_configs()
    # For each table its head, its rows, and the column with long cells.
    tables: dict[str, tuple[Row, list[Row], int]] = {
        "families": (
            ("family", "file", "models", "architectures", "state", "formats", "configs read"),
            family_rows(read),
            3,
        ),
        "published": (("model", "format", "family", "source"), published_rows(read), 3),
    }
    for name, (head, rows, long) in tables.items():
        begin, end = f"<!-- models: {name} -->", "<!-- end of models -->"
        lines = short_table(head, rows, long=long)
        before, found_begin, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"the page has no place for the table of {name}")
        page = "\n".join([before + begin, *lines, end + after])
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
