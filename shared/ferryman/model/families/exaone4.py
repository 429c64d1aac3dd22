"""EXAONE 4: OLMo 2's places of norms, a norm on each head; with windows, no positions elsewhere."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import (
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import NormPlaces


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    return TransformerConfig(
        trunk,
        attention=_attention(fields, trunk.num_layers),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
        norms=NormPlaces.AFTER,
    )


def _attention(fields: ConfigFields, num_layers: int) -> tuple[AttentionShape, ...]:
    plain = replace(read_rotary_attention(fields), has_bias=False, has_out_bias=False)
    turning = replace(plain, head_norm=HeadNorm.EACH_HEAD)
    if fields.raw.get("sliding_window") is None:
        return (turning,) * num_layers
    layers = read_windows(fields, turning, lambda layer: not _is_full(fields, layer, num_layers))
    return tuple(
        shape if shape.window_len else replace(shape, positions=NoPositions()) for shape in layers
    )


def _is_full(fields: ConfigFields, layer: int, num_layers: int) -> bool:
    """Published configs give a period as letters, "LLLG", or as a number."""
    pattern = fields.raw.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.refusal("sliding_window_pattern", "a number, or letters L and G")
        return pattern[layer % len(pattern)] == "G" or layer == num_layers - 1
    return (layer + 1) % fields.whole("sliding_window_pattern", 4) == 0


FAMILY = Family(("Exaone4ForCausalLM",), _read, load_transformer)
