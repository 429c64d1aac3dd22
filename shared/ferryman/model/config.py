"""From `config.json` of a Hugging Face folder to its family and the family's typed config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError
from ferryman.model.families import FAMILIES
from ferryman.model.family import Family
from ferryman.model.fields import Fields, read_fields
from ferryman.model.shapes import ModelConfig

SUPPORTED_ARCHITECTURES = tuple(name for family in FAMILIES for name in family.architectures)


def load_config(folder: Path | str) -> ModelConfig:
    """The config of the model in `folder`; raises ConfigError saying what is wrong with it."""
    fields = read_fields(Path(folder) / "config.json")
    family = _family_of(fields)
    _check_quantisation(fields, family.quantisations)
    config: ModelConfig = family.read(fields)
    return config


def family_of(folder: Path | str) -> Family[Any]:
    """The family of the model in `folder`; raises ConfigError for one that is not supported."""
    return _family_of(read_fields(Path(folder) / "config.json"))


def _check_quantisation(fields: Fields, known: tuple[str, ...]) -> None:
    """Weights of an unknown format may have the names and shapes of plain ones."""
    found = fields.raw.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else found
    if found is not None and method not in known:
        named = f"absent, or quant_method {' or '.join(known)}" if known else "absent"
        raise fields.refusal("quantization_config", named)


def _family_of(fields: Fields) -> Family[Any]:
    architectures = fields.words("architectures")
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    raise ConfigError(
        f"{fields.source}: architecture {', '.join(architectures) or '(none)'} is not supported; "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )
