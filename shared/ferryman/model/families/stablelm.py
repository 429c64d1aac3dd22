"""StableLM: norms around the mean, partly rotary heads, attention and MLP in turn or side by side.

In StableLM 2 12B each head of q and of k has a norm of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.model.family import Family
from ferryman.model.layers.centred_norm import load_layer_norm
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import (
    check_activation,
    head_dim_of,
    read_attention,
    read_rotary,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import read_plain_mlp
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import NormPlaces

ROTARY_SHARE = 0.25
"""The part of a head that turns unless the config says so."""


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    trunk = read_trunk(fields, norm_eps="layer_norm_eps")
    is_side_by_side = fields.flag("use_parallel_residual", False)
    return TransformerConfig(
        trunk,
        attention=(_attention(fields),) * trunk.num_layers,
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
        norms=NormPlaces.SHARED if is_side_by_side else NormPlaces.BEFORE,
    )


def _attention(fields: ConfigFields) -> AttentionShape:
    positions = read_rotary(fields, ROTARY_SHARE)
    plain = read_attention(fields, head_dim_of(fields) ** -0.5, positions)
    has_norms = fields.flag("qk_layernorm", False)
    return replace(
        plain,
        has_bias=fields.flag("use_qkv_bias", False),
        has_out_bias=False,
        head_norm=HeadNorm.OWN_CENTRED if has_norms else HeadNorm.NONE,
    )


FAMILY = Family(
    ("StableLmForCausalLM",),
    _read,
    partial(load_transformer, load_norm=load_layer_norm),
)
