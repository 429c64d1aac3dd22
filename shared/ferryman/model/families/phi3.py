"""Phi 3 and 4: Llama with q, k and v in one tensor, gate and up in another, and longrope."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import (
    has_short_window,
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.config_fields import ConfigFields


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        if fields.flag(name, False):
            raise fields.refusal(name, "false")
    trunk = read_trunk(fields)
    full = replace(read_rotary_attention(fields), has_bias=False, has_out_bias=False)
    has_window = has_short_window(fields)
    return TransformerConfig(
        trunk,
        attention=read_windows(fields, full, lambda _: has_window),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
    )


FAMILY = Family(("Phi3ForCausalLM",), _read, load_transformer)
