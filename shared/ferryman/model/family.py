"""What a model family is: a name on disk, a config, and a way from weights to a decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ferryman.cache.manifest import StateManifest
from ferryman.model.decoder import Decoder
from ferryman.model.fields import Fields
from ferryman.model.shapes import ModelConfig
from ferryman.model.weights import Weights

Config = TypeVar("Config", bound=ModelConfig)


@dataclass(frozen=True, slots=True)
class Family(Generic[Config]):
    """`architectures` are the names in config.json.

    `read` raises ConfigError, by field name, for what is not supported; `load` does for a tensor
    that is missing or has another shape than the config implies. `quantisations` are the values of
    `quant_method` that it can load.
    """

    architectures: tuple[str, ...]
    read: Callable[[Fields], Config]
    load: Callable[[Config, StateManifest, Weights], Decoder]
    quantisations: tuple[str, ...] = ()
