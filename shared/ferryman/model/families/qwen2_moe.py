"""Qwen 1.5 and 2 with experts: the attention of Qwen 2, experts beside a gated one."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.families.qwen3_next import read_shared_moe
from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import (
    read_plain_mlp,
    read_rotary_attention,
    read_sparse_layers,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.config_fields import ConfigFields


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    return TransformerConfig(
        read_trunk(fields),
        attention=_attention(fields),
        feed_forwards=tuple(
            read_shared_moe(fields, shares_sum_to_one=fields.flag("norm_topk_prob", False))
            if is_sparse
            else read_plain_mlp(fields)
            for is_sparse in read_sparse_layers(fields)
        ),
    )


def _attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    """Without a list of types, windows are in every other layer below "max_window_layers"."""
    has_bias = fields.flag("qkv_bias", True)
    full = replace(read_rotary_attention(fields), has_bias=has_bias, has_out_bias=False)
    if not fields.flag("use_sliding_window", False):
        return (full,) * fields.whole("num_hidden_layers")
    last = fields.whole("max_window_layers", 28, least=0)
    return read_windows(fields, full, lambda layer: layer % 2 == 0 and layer < last)


FAMILY = Family(("Qwen2MoeForCausalLM",), _read, load_transformer)
