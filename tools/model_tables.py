"""The tables of docs/models.md, from the families' own declarations and the published configs.

python tools/model_tables.py          writes them between their markers, and published.json beside
                                       the families, by which a model that is not read is told the
                                       nearest that is

A published config is a file in tests/model/published: a model's id, the source of the facts, and
the fields of its config.json. `unused` names the fields that this model's layers do not use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.model.config import family_of, load_config
from ferryman.model.families import FAMILIES, Family
from ferryman.model.nearest_family import DOCUMENT as NEAREST
from ferryman.model.shapes.model_shapes import ModelConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs as a plain script

from tools.markdown_table import short_table

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "models.md"
PUBLISHED = REPOSITORY / "tests" / "model" / "published"
DIFFERENCES = REPOSITORY / "tests" / "model" / "differences.json"

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


def difference_rows() -> list[Row]:
    """A row for each family that transformers has too: configs, largest differences by dtype, and
    the share of positions that float32 was compared at."""
    figures = json.loads(DIFFERENCES.read_text())
    return [
        (
            f"`{name}`",
            ", ".join(next(family.kinds for family in FAMILIES if family.name == name)),
            str(row["configs"]),
            f"{row['float32']:.1e}",
            f"{row['float64']:.1e}",
            f"{row['compared']:.0%}",
        )
        for name, row in sorted(figures.items())
    ]


def published_document(read: Iterable[ReadConfig]) -> str:
    """For each family one published model, the values of "model_type", and the fields of its
    published configs: all, and those without which one is refused. A line a family."""
    by_family: dict[str, list[ReadConfig]] = {}
    for each in read:
        by_family.setdefault(each.family.name, []).append(each)
    lines = [
        f"  {json.dumps(name)}: {json.dumps(_document_of(configs))}"
        for name, configs in sorted(by_family.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _document_of(configs: list[ReadConfig]) -> dict[str, Any]:
    names = {name for each in configs for name in _names(each.published)}
    types = {part.get("model_type") for each in configs for part in _parts(each.published.config)}
    plainest = min(configs, key=lambda each: (len(each.published.model), each.published.model))
    return {
        "model": plainest.published.model,
        "types": sorted(str(word) for word in types if word),
        "fields": sorted(names),
        "required": [
            name
            for name in _required(plainest.published)
            if all(name in _names(each.published) for each in configs)
        ],
    }


def _parts(config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return config, config.get("text_config", {})


def _names(published: PublishedConfig) -> set[str]:
    """The fields of the config: `test_published.py` knows of each if a layer uses it."""
    names = {name for part in _parts(published.config) for name in part}
    return names - {"architectures", "text_config"}


def _required(published: PublishedConfig) -> list[str]:
    """The fields without which the config is refused."""
    required = []
    with TemporaryDirectory() as folder:
        for name in sorted(_names(published)):
            shorter = [
                {key: value for key, value in part.items() if key != name}
                for part in _parts(published.config)
            ]
            config = {**shorter[0], "text_config": shorter[1]} if shorter[1] else shorter[0]
            try:
                load_config(replace(published, config=config).write(Path(folder)))
            except ConfigError:
                required.append(name)
    return required


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
        "differences": (
            ("family", "state", "configs", "float32", "float64", "compared in float32"),
            difference_rows(),
            1,
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
    NEAREST.write_text(published_document(read_configs()))
