"""Granite 3, dense or with experts: Llama with multipliers at its ends and residual paths.

GraniteMoeShared has an MLP beside its experts that every token goes through.
"""

from __future__ import annotations

from functools import partial

from ferryman.model.families.granite import load_shared_mlp
from ferryman.model.family import Family
from ferryman.model.layers.decoder import EndScales
from ferryman.model.layers.decoder_layers import FeedForward, load_gated_mlp
from ferryman.model.layers.moe import ExpertsBesideShared, load_experts
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import (
    check_activation,
    read_attention,
    read_mlp,
    read_rotary,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import read_experts
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    MixtureShape,
    MlpShape,
    SoftmaxRouting,
)
from ferryman.model.weights.named_weights import Weights

WITH_EXPERTS = "GraniteMoeForCausalLM"
WITH_SHARED = "GraniteMoeSharedForCausalLM"


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
    names = fields.words("architectures")
    if WITH_EXPERTS not in names and WITH_SHARED not in names:
        return read_mlp(fields)
    experts = read_experts(fields, count="num_local_experts", inner_dim="intermediate_size")
    routing, shared_dim = SoftmaxRouting(shares_sum_to_one=True), 0
    if WITH_SHARED in names:
        shared_dim = fields.whole("shared_intermediate_size", 0, least=0)
    shared = MlpShape(shared_dim, has_bias=False) if shared_dim else None
    return MixtureShape(experts, routing, shared)


def _feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MixtureShape):
        return load_gated_mlp(weights.under("mlp"), shape, hidden_dim)
    routed = load_experts(weights.under("block_sparse_moe"), shape.experts, hidden_dim)
    if shape.shared is None:
        return routed
    shared = load_shared_mlp(weights.under("shared_mlp"), shape.shared, hidden_dim)
    return ExpertsBesideShared(routed, shared)


FAMILY = Family(
    ("GraniteForCausalLM", WITH_EXPERTS, WITH_SHARED),
    _read,
    partial(load_transformer, feed_forward=_feed_forward),
)
