"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.model.family import Family
from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.expert_router import SharesOfChosen
from ferryman.model.layers.moe import load_mixture
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import (
    has_short_window,
    read_experts,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MixtureShape, SoftmaxRouting
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.named_weights import Weights


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    full = replace(read_rotary_attention(fields), has_bias=False, has_out_bias=False)
    has_window = has_short_window(fields)
    experts = read_experts(fields, count="num_local_experts", inner_dim="intermediate_size")
    return TransformerConfig(
        trunk,
        attention=read_windows(fields, full, lambda _: has_window),
        feed_forwards=(MixtureShape(experts, SoftmaxRouting(shares_sum_to_one=True)),)
        * trunk.num_layers,
    )


def _feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    """The experts as they are published: under "block_sparse_moe", each with w1, w3 and w2."""
    if not isinstance(shape, MixtureShape):
        raise TypeError(f"Mixtral has experts in every layer, not {shape}")
    experts = shape.experts
    found = weights.first_of("block_sparse_moe.gate.weight", "mlp.gate.weight")
    part = weights.under(found.removesuffix(".gate.weight"))
    score = make_linear(part.tensor("gate.weight", experts.num_experts, hidden_dim))
    router = SharesOfChosen(score, experts.experts_per_token)
    return load_mixture(part.under("experts"), experts, hidden_dim, router, ("w1", "w3", "w2"))


FAMILY = Family(
    ("MixtralForCausalLM",), _read, partial(load_transformer, feed_forward=_feed_forward)
)
