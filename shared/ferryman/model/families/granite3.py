"""Granite 3, dense or with experts: Llama with multipliers at its ends and residual paths."""

from __future__ import annotations

from functools import partial

from ferryman.model.config_fields import ConfigFields
from ferryman.model.config_readers import (
    check_activation,
    read_attention,
    read_mlp,
    read_rotary,
    read_trunk,
)
from ferryman.model.decoder import EndScales
from ferryman.model.family import Family
from ferryman.model.feed_forward_shapes import FeedForwardShape, MixtureShape, SoftmaxRouting
from ferryman.model.layers import FeedForward, load_gated_mlp
from ferryman.model.moe import load_experts
from ferryman.model.transformer import TransformerConfig, load_transformer
from ferryman.model.transformer_readers import read_experts
from ferryman.model.weights import Weights

WITH_EXPERTS = "GraniteMoeForCausalLM"


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    positions = read_rotary(fields, default_factor=1.0)
    attention = read_attention(fields, fields.positive("attention_multiplier", 1.0), positions)
    return TransformerConfig(
        trunk,
        attention=(attention,) * trunk.num_layers,
        feed_forwards=(_read_feed_forward(fields),) * trunk.num_layers,
        scales=EndScales(
            fields.positive("embedding_multiplier", 1.0), fields.positive("logits_scaling", 1.0)
        ),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
    )


def _read_feed_forward(fields: ConfigFields) -> FeedForwardShape:
    if WITH_EXPERTS not in fields.words("architectures"):
        return read_mlp(fields)
    experts = read_experts(fields, count="num_local_experts", inner_dim="intermediate_size")
    return MixtureShape(experts, SoftmaxRouting(shares_sum_to_one=True))


def _feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if isinstance(shape, MixtureShape):
        return load_experts(weights.under("block_sparse_moe"), shape.experts, hidden_dim)
    return load_gated_mlp(weights.under("mlp"), shape, hidden_dim)


FAMILY = Family(
    ("GraniteForCausalLM", WITH_EXPERTS),
    _read,
    partial(load_transformer, feed_forward=_feed_forward),
)
