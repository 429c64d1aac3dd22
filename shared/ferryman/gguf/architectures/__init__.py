"""The architectures of llama.cpp that are read, by the name in `general.architecture`.

A reader gives the fields of the config that the model's Hugging Face folder has, and a table has
the names of its tensors. So a family reads both as it reads a folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ferryman.errors import ConfigError
from ferryman.gguf.architectures import granite, transformer
from ferryman.gguf.architectures.config_fields import Fields
from ferryman.gguf.architectures.tensor_names import NamedTensor, TensorNames, named_tensors
from ferryman.gguf.model_file import GgufFile


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """The config's fields of a model, and the tables of its tensors."""

    fields: Callable[[GgufFile], Fields]
    names: Callable[[GgufFile], TensorNames]


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(transformer.llama_fields, transformer.llama_names),
    "qwen2": GgufArchitecture(transformer.qwen2_fields, transformer.plain_names),
    "qwen3": GgufArchitecture(transformer.qwen3_fields, transformer.plain_names),
    "qwen2moe": GgufArchitecture(transformer.qwen2_moe_fields, transformer.qwen2_moe_names),
    "qwen3moe": GgufArchitecture(transformer.qwen3_moe_fields, transformer.qwen3_moe_names),
    "smollm3": GgufArchitecture(transformer.smollm3_fields, transformer.paired_names),
    "granite": GgufArchitecture(granite.granite_fields, transformer.paired_names),
    "granitemoe": GgufArchitecture(granite.granite_moe_fields, granite.granite_moe_names),
    "granitehybrid": GgufArchitecture(granite.hybrid_fields, granite.hybrid_names),
    "gemma2": GgufArchitecture(transformer.gemma2_fields, transformer.gemma_names),
    "gemma3": GgufArchitecture(transformer.gemma3_fields, transformer.gemma_names),
}


def config_of(model: GgufFile) -> Fields:
    """The fields of `config.json`. Raises ConfigError, by name, for an architecture or a key that
    is not read."""
    return _architecture(model).fields(model)


def tensors_of(model: GgufFile) -> dict[str, NamedTensor]:
    """The tensors by their names in a folder. Raises ConfigError for one that is not known."""
    return named_tensors(model, _architecture(model).names(model))


def _architecture(model: GgufFile) -> GgufArchitecture:
    name = model.metadata.architecture
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(name, ARCHITECTURES, 1)
        nearest = f"; the nearest is {near[0]}" if near else ""
        raise ConfigError(
            f"{model.metadata.file}: GGUF files of the architecture {name} are not read{nearest}. "
            f"Read are {', '.join(ARCHITECTURES)}; a folder of safetensors may be"
        )
    return ARCHITECTURES[name]
