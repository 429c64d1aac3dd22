"""Cohere Command R7B and A: attention and MLP side by side after one norm.

hidden += attention(norm(hidden)) + mlp(norm(hidden)),   the norm also subtracts the mean

Three of four layers have rotary positions and a window; the others have neither.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.model.family import Family
from ferryman.model.layers.centred_norm import load_centred_norm
from ferryman.model.layers.decoder import EndScales
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import (
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions, RotaryPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import NormPlaces

DEFAULT_LOGIT_SCALE = 0.0625


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    for name, expected in {"use_qk_norm": False, "use_gated_activation": True}.items():
        if fields.flag(name, expected) is not expected:
            raise fields.refusal(name, str(expected).lower())
    tied = ConfigFields(fields.source, {"tie_word_embeddings": True, **fields.raw})
    trunk = read_trunk(tied, norm_eps="layer_norm_eps")
    logit_scale = fields.positive("logit_scale", DEFAULT_LOGIT_SCALE)
    return TransformerConfig(
        trunk,
        attention=_attention(fields),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
        norms=NormPlaces.SHARED,
        scales=EndScales(logits_scaling=1.0 / logit_scale),
    )


def _attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    """Published configs name a period, "sliding_window_pattern", or the type of each layer."""
    period = fields.whole("sliding_window_pattern", 4)
    shape = read_rotary_attention(fields)
    full = replace(shape, positions=NoPositions())
    layers = read_windows(fields, full, lambda layer: (layer + 1) % period != 0)
    if not isinstance(shape.positions, RotaryPositions):
        raise TypeError(shape.positions)
    turning = replace(shape.positions, is_interleaved=True)
    return tuple(replace(each, positions=turning) if each.window_len else each for each in layers)


FAMILY = Family(
    ("Cohere2ForCausalLM",), _read, partial(load_transformer, load_norm=load_centred_norm)
)
