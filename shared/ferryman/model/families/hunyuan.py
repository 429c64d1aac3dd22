"""Hunyuan, dense: Llama with a norm on each head of q and k behind the rotation."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import read_plain_mlp, read_rotary_attention
from ferryman.model.shapes.attention_shapes import HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    for name, expected in {"use_qk_norm": True, "use_cla": False, "mlp_bias": False}.items():
        if fields.flag(name, expected) is not expected:
            raise fields.refusal(name, str(expected).lower())
    trunk = read_trunk(fields)
    attention = replace(read_rotary_attention(fields), head_norm=HeadNorm.ROTATED_HEAD)
    return TransformerConfig(
        trunk,
        attention=(attention,) * trunk.num_layers,
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
    )


FAMILY = Family(("HunYuanDenseV1ForCausalLM",), _read, load_transformer)
