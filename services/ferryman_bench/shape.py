"""The shapes that `ferryman bench` knows: published architectures with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ferryman.errors import ConfigError

Fields = Mapping[str, Any]

# Granite 4 H in its published structure, 139.6 M parameters: three Mamba layers for each attention
# layer.
GRANITE_100M: Fields = MappingProxyType(
    {
        "vocab_size": 16_384,
        "hidden_size": 768,
        "num_hidden_layers": 16,
        "layer_types": ["attention" if i % 4 == 3 else "mamba" for i in range(16)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "shared_intermediate_size": 2048,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.246,
        "logits_scaling": 3.0,
    }
)
SHAPES = {"granite-100m": GRANITE_100M}


def shape_named(name: str) -> Fields:
    """The fields of `config.json`. Raises ConfigError for an unknown name."""
    shape = SHAPES.get(name)
    if shape is None:
        raise ConfigError(f"--model-shape {name}: known are {', '.join(SHAPES)}")
    return shape
