"""SmolLM 3: Llama without positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_mlp, read_trunk
from ferryman.model.readers.transformer_readers import (
    read_rotary_attention,
    read_turning_layers,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    return TransformerConfig(
        trunk,
        attention=_attention(fields),
        feed_forwards=(read_mlp(fields),) * trunk.num_layers,
    )


def _attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    full, turns = read_rotary_attention(fields), read_turning_layers(fields)
    layers = (full,) * len(turns)
    if fields.flag("use_sliding_window", False):
        layers = read_windows(fields, full, lambda layer: not turns[layer])
    return tuple(
        shape if has_positions else replace(shape, positions=NoPositions())
        for shape, has_positions in zip(layers, turns, strict=True)
    )


FAMILY = Family(("SmolLM3ForCausalLM",), _read, load_transformer)
