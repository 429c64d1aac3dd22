"""Seed-OSS: Llama with biases on q, k and v, and none where the heads are joined."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_mlp, read_trunk
from ferryman.model.readers.transformer_readers import read_rotary_attention
from ferryman.model.shapes.config_fields import ConfigFields


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    attention = replace(
        read_rotary_attention(fields),
        has_bias=fields.flag("attention_bias", True),
        has_out_bias=fields.flag("attention_out_bias", False),
    )
    return TransformerConfig(
        trunk,
        attention=(attention,) * trunk.num_layers,
        feed_forwards=(read_mlp(fields),) * trunk.num_layers,
    )


FAMILY = Family(("SeedOssForCausalLM",), _read, load_transformer)
