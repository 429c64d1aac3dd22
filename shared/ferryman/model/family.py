"""A model family: its names on disk, its config, and its loader from weights to a decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.mtp import MtpHead
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import ModelConfig, StateShape
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.weight_formats import LINEAR_METHODS

Config = TypeVar("Config", bound=ModelConfig)


@dataclass(frozen=True, slots=True)
class MtpSource(Generic[Config]):
    """The layer for multi-token prediction in a family's checkpoints.

    `check` raises ConfigError, by field name, for a config that declares none, or another one
    than `load` reads. `attention` is the shape that keeps the layer's state.
    """

    check: Callable[[ConfigFields], None]
    attention: Callable[[Config], StateShape]
    load: Callable[[Config, Weights, LayerPlace], MtpHead]


@dataclass(frozen=True, slots=True)
class Family(Generic[Config]):
    """`name` is the family's in tables and tests, `architectures` are the names in config.json.

    `read` raises ConfigError, by field name, for an unsupported config. `load` raises it for a
    tensor that is missing or has another shape than the config implies. `quantisations` are the
    values of `quant_method` that it can load. `mtp` is None if checkpoints cannot draft for
    themselves.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigFields], Config]
    load: Callable[[Config, StateManifest, Weights], Decoder]
    quantisations: tuple[str, ...] = LINEAR_METHODS
    mtp: MtpSource[Config] | None = None

    @property
    def file(self) -> str:
        """The name of the file that reads the family's configs."""
        return self.read.__module__.rpartition(".")[2]
