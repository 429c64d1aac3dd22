"""Finds the family of a Hugging Face folder by its `config.json`, and reads its typed config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError
from ferryman.model.drafted import DraftedConfig
from ferryman.model.families import FAMILIES, Family
from ferryman.model.layers.mtp import HiddenShape, MtpSource
from ferryman.model.shapes.config_fields import ConfigFields, read_fields
from ferryman.model.shapes.model_shapes import ModelConfig
from ferryman.model.unsupported import unsupported
from ferryman.model.weights.named_weights import WeightFormat
from ferryman.model.weights.weight_formats import AS_STORED, read_format

SUPPORTED_ARCHITECTURES = tuple(name for family in FAMILIES for name in family.architectures)


def load_config(folder: Path | str) -> ModelConfig:
    """The config of the model in `folder`; raises ConfigError saying what is wrong with it."""
    fields = read_fields(Path(folder) / "config.json")
    family = _family_of(fields)
    read_format(fields, family.quantisations)
    for part in (fields, fields.inner("text_config")):
        _refuse_two_rotations(part)
    config: ModelConfig = family.read(fields)
    return config


def load_format(folder: Path | str, quantize: str = AS_STORED) -> WeightFormat:
    """The format of the weights in `folder`, or the one that `quantize` makes of them at load.

    Raises ConfigError, by name, for one that is not supported.
    """
    fields = read_fields(Path(folder) / "config.json")
    return read_format(fields, _family_of(fields).quantisations, quantize)


def family_of(folder: Path | str) -> Family[Any]:
    """The family of the model in `folder`; raises ConfigError for one that is not supported."""
    return _family_of(read_fields(Path(folder) / "config.json"))


def mtp_source(folder: Path | str) -> MtpSource[Any]:
    """The description of the model's layer for multi-token prediction.

    Raises ConfigError, by field or architecture, when it has none that is supported.
    """
    fields = read_fields(Path(folder) / "config.json")
    source = _family_of(fields).mtp
    if source is None:
        supported = [name for family in FAMILIES if family.mtp for name in family.architectures]
        raise ConfigError(
            f"{fields.source}: --draft mtp needs a model with a layer for multi-token prediction; "
            f"supported are {', '.join(supported)}"
        )
    source.check(fields)
    return source


def mtp_config(folder: Path | str) -> DraftedConfig:
    """The config of the model in `folder` with the state of its drafting layer. Raises as
    `mtp_source` does."""
    target: ModelConfig = load_config(folder)
    drafts = (mtp_source(folder).attention(target), HiddenShape(target.trunk.hidden_dim))
    return DraftedConfig(target.trunk, (*target.states, drafts))


def _refuse_two_rotations(fields: ConfigFields) -> None:
    """A folder that transformers 5 wrote has `rope_parameters`. Beside them `rope_scaling`, by
    which people lengthen a context, would have no effect here, and all of it elsewhere."""
    scaling, rope = fields.raw.get("rope_scaling"), fields.raw.get("rope_parameters")
    if not (isinstance(scaling, dict) and isinstance(rope, dict) and scaling and rope):
        return
    if any(isinstance(of_kind, dict) for of_kind in rope.values()):
        return  # each kind of layer has its own
    words = {"type": "rope_type"}
    if any(rope.get(words.get(name, name)) != value for name, value in scaling.items()):
        raise fields.refusal("rope_scaling", "left out beside rope_parameters, or the same")


def _family_of(fields: ConfigFields) -> Family[Any]:
    architectures = fields.words("architectures")
    text_type = fields.inner("text_config").raw.get("model_type")
    for family in FAMILIES:
        if family.text_type and family.text_type == text_type:
            return family
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    raise unsupported(fields, architectures)
