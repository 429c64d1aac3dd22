"""Llama: rotary grouped-query attention and a gated MLP in every layer. The plain case."""

from __future__ import annotations

from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import (
    check_activation,
    head_dim_of,
    read_attention,
    read_mlp,
    read_rotary,
    read_trunk,
)
from ferryman.model.shapes.config_fields import ConfigFields


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    positions = read_rotary(fields, default_factor=1.0)
    attention = read_attention(fields, head_dim_of(fields) ** -0.5, positions)
    return TransformerConfig(
        trunk,
        attention=(attention,) * trunk.num_layers,
        feed_forwards=(read_mlp(fields),) * trunk.num_layers,
    )


FAMILY = Family(("LlamaForCausalLM",), _read, load_transformer)
