"""The shapes that `ferryman bench` knows: published architectures with random weights.

Those with experts have the proportions of their big sisters at about 150 M active parameters.
llama.cpp wants twice as many channels in a Mamba layer as in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ferryman.errors import ConfigError

VOCAB_SIZE = 16_384
LAYERS = 16
MAX_POSITIONS = 65_536


@dataclass(frozen=True, slots=True)
class ModelShape:
    """transformers' name of an architecture, and its fields of `config.json`."""

    model_type: str
    fields: Mapping[str, Any]


def _shape(model_type: str, fields: Mapping[str, Any]) -> ModelShape:
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
    }
    return ModelShape(model_type, MappingProxyType({**common, **fields}))


_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.246,
    "logits_scaling": 3.0,
    "tie_word_embeddings": True,
}
_MAMBA = {"mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1}
# Three Mamba layers for each attention layer.
_LAYER_TYPES = ["attention" if i % 4 == 3 else "mamba" for i in range(LAYERS)]
# The published model does not round the ends of its ramp; llama.cpp does.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": True,
}

SHAPES: Mapping[str, ModelShape] = {
    # Granite 4 H in its published structure, 139.6 M parameters.
    "granite-100m": _shape(
        "granitemoehybrid",
        {
            **_MULTIPLIERS,
            **_MAMBA,
            "num_hidden_layers": LAYERS,
            "layer_types": _LAYER_TYPES,
            "num_local_experts": 0,
            "shared_intermediate_size": 2048,
        },
    ),
    # Granite 3: attention in every layer.
    "granite-dense-100m": _shape(
        "granite",
        {**_MULTIPLIERS, "num_hidden_layers": LAYERS, "intermediate_size": 2048},
    ),
    # Granite 4 H tiny: of 64 experts each token goes to 6, beside a shared one twice as wide.
    "granite-tiny-150m": _shape(
        "granitemoehybrid",
        {
            **_MULTIPLIERS,
            **_MAMBA,
            "num_hidden_layers": LAYERS,
            "layer_types": _LAYER_TYPES,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "intermediate_size": 256,
            "shared_intermediate_size": 512,
        },
    ),
    "bamba-100m": _shape(
        "bamba",
        {
            **_MAMBA,
            "num_hidden_layers": LAYERS,
            "attn_layer_indices": [3, 7, 11, 15],
            "intermediate_size": 2048,
            "tie_word_embeddings": True,
        },
    ),
    # Qwen3-Next: three delta nets for each attention; of 128 experts each token goes to 10.
    "qwen3-next-150m": _shape(
        "qwen3_next",
        {
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 12,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 192,
            "shared_expert_intermediate_size": 192,
            "intermediate_size": 192,
        },
    ),
    # gpt-oss: windows of 128 in every other layer; of 32 experts each token goes to 4.
    "gpt-oss-150m": _shape(
        "gpt_oss",
        {
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 768,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rope_parameters": YARN,
        },
    ),
}


def shape_named(name: str) -> ModelShape:
    """The shape. Raises ConfigError for an unknown name."""
    shape = SHAPES.get(name)
    if shape is None:
        raise ConfigError(f"--model-shape {name}: known are {', '.join(SHAPES)}")
    return shape
