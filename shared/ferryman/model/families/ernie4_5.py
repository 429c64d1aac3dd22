"""ERNIE 4.5, dense: Llama whose rotations join neighbouring channels."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import read_rotary_attention
from ferryman.model.shapes.attention_shapes import AttentionShape, RotaryPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape

DEFAULTS = {"tie_word_embeddings": True, "head_dim": 128}
"""The meaning of fields that a config leaves out."""


def _read(given: ConfigFields) -> TransformerConfig:
    fields = ConfigFields(given.source, {**DEFAULTS, **given.raw})
    check_activation(fields)
    trunk, has_bias = read_trunk(fields), fields.flag("use_bias", False)
    mlp = MlpShape(fields.whole("intermediate_size"), has_bias)
    return TransformerConfig(
        trunk,
        attention=(read_ernie_attention(fields, has_bias),) * trunk.num_layers,
        feed_forwards=(mlp,) * trunk.num_layers,
    )


def read_ernie_attention(fields: ConfigFields, has_bias: bool) -> AttentionShape:
    """Full attention whose rotations join neighbouring channels."""
    plain = read_rotary_attention(fields)
    if not isinstance(plain.positions, RotaryPositions):
        raise TypeError(plain.positions)
    positions = replace(plain.positions, is_interleaved=True)
    return replace(plain, has_bias=has_bias, has_out_bias=has_bias, positions=positions)


FAMILY = Family(("Ernie4_5ForCausalLM",), _read, load_transformer)
