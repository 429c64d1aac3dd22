"""OLMo 2 and 3: norms behind attention and MLP, and on all heads of q and of k as one row.

OLMo 3 has windows in three of four layers; their positions are not scaled.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import (
    check_activation,
    head_dim_of,
    read_attention,
    read_rotary,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import FULL, WINDOW, read_plain_mlp, read_windows
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm, RotaryPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import NormPlaces
from ferryman.model.shapes.rotary import read_scaling, read_theta

WITH_WINDOWS = "Olmo3ForCausalLM"
PERIOD = 4


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
    scale = head_dim_of(fields) ** -0.5
    if WITH_WINDOWS not in fields.words("architectures"):
        shape = read_attention(fields, scale, read_rotary(fields, default_factor=1.0))
        return (replace(shape, head_norm=HeadNorm.ALL_HEADS),) * num_layers
    shape = read_attention(fields, scale, _positions(fields, FULL))
    full = replace(shape, head_norm=HeadNorm.ALL_HEADS)
    layers = read_windows(fields, full, lambda layer: (layer + 1) % PERIOD != 0)
    near = _positions(fields, WINDOW)
    return tuple(replace(each, positions=near) if each.window_len else each for each in layers)


def _positions(fields: ConfigFields, word: str) -> RotaryPositions:
    """Published configs have one `rope_scaling`, which is about full layers alone."""
    rope = fields.merged_with("rope_parameters").merged_with(word)
    if fields.raw.get("rope_parameters") is None and word == FULL:
        rope = fields.merged_with("rope_scaling")
    return RotaryPositions(read_theta(rope, 500_000.0), head_dim_of(fields), read_scaling(rope))


FAMILY = Family(("Olmo2ForCausalLM", WITH_WINDOWS), _read, load_transformer)
