"""Hunyuan, dense or with experts, and Hy3: Llama with a norm on each head of q and k.

In Hunyuan it comes behind the rotation, in Hy3 before it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.expert_router import RouterNames, WideScores, shares_of_chosen
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import ExpertsBesideShared, load_grouped_mixture, load_mixture
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    check_values,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_mlp_types,
    read_plain_mlp,
    read_rotary_attention,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    GroupedRouting,
    MixtureShape,
    MlpShape,
    SoftmaxRouting,
)
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.named_weights import Weights

BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
"""Fields that are one number, or a list of one for each layer."""

HY3_DEFAULTS = {
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "router_scaling_factor": 2.826,
    "rope_theta": 11_158_840.0,
    "head_dim": 128,
}
"""The meaning of fields that a config of Hy3 leaves out."""

HY3_ROUTER = RouterNames(
    ("router.gate.weight", "gate.weight"), ("expert_bias", "e_score_correction_bias")
)
"""Names of published checkpoints, then those that transformers has."""


def read_hunyuan(fields: ConfigFields) -> TransformerConfig:
    """Hunyuan, dense: Llama with a norm on each head of q and k behind the rotation."""
    check_flags(fields, mlp_bias=False)
    return uniform_transformer(read_trunk(fields), _attention(fields), read_plain_mlp(fields))


def _attention(fields: ConfigFields) -> AttentionShape:
    check_activation(fields)
    check_flags(fields, use_qk_norm=True, use_cla=False)
    return replace(read_rotary_attention(fields), head_norm=HeadNorm.ROTATED_HEAD)


def read_hunyuan_moe(config: ConfigFields) -> TransformerConfig:
    """Hunyuan with experts: the dense model's attention, experts beside a shared one.

    Every layer has as many experts, and they are as wide as the shared one.
    """
    fields = _alike_in_all_layers(config)
    check_flags(fields, mlp_bias=False, use_mixed_mlp_moe=True, norm_topk_prob=True)
    _refuse_other_routing(fields)
    layers = uniform_transformer(read_trunk(fields), _attention(fields), _mixture(fields))
    return layers


def _alike_in_all_layers(fields: ConfigFields) -> ConfigFields:
    """The fields, with one number for a list of equal ones. Raises ConfigError for others."""
    alike = {}
    for name in BY_LAYER:
        values = fields.raw.get(name)
        if isinstance(values, list):
            if len(values) < fields.whole("num_hidden_layers") or len(set(map(str, values))) != 1:
                raise fields.refusal(name, "one number, the same in every layer")
            alike[name] = values[0]
    return ConfigFields(fields.source, {**fields.raw, **alike})


def _refuse_other_routing(fields: ConfigFields) -> None:
    expected = {
        "num_shared_expert": 1,
        "routed_scaling_factor": 1.0,
        "moe_layer_num_skipped": 0,
        "moe_intermediate_size": fields.whole("intermediate_size"),
    }
    check_values(fields, expected)


def _mixture(fields: ConfigFields) -> MixtureShape:
    named = fields.with_former(num_experts_per_tok="moe_topk")
    experts = read_experts(named, inner_dim="intermediate_size")
    shared = MlpShape(experts.inner_dim, has_bias=False)
    return MixtureShape(experts, SoftmaxRouting(shares_sum_to_one=True), shared)


def _load_feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MixtureShape) or shape.shared is None:
        raise TypeError(f"Hunyuan has experts beside a shared one in every layer, not {shape}")
    inside, experts = weights.under("mlp"), shape.experts
    score = make_linear(inside.precise("gate.wg.weight", experts.num_experts, hidden_dim))
    router = shares_of_chosen(WideScores(score), experts.experts_per_token)
    return ExpertsBesideShared(
        load_mixture(inside.under("experts"), experts, hidden_dim, router),
        load_gated_mlp(inside.under("shared_mlp"), shape.shared, hidden_dim),
    )


load_hunyuan_moe = partial(load_transformer, feed_forward=_load_feed_forward)


def read_hy_v3(fields: ConfigFields) -> TransformerConfig:
    """Hy3: the attention of Qwen 3, dense MLPs first, then experts by biased sigmoids."""
    fields = fields.with_defaults(**HY3_DEFAULTS)
    check_activation(fields)
    check_flags(fields, mlp_bias=False)
    trunk = read_trunk(fields)
    attention = replace(read_rotary_attention(fields), head_norm=HeadNorm.EACH_HEAD)
    mixture, mlp = _hy3_mixture(fields), read_plain_mlp(fields)
    num_dense = fields.whole("first_k_dense_replace", least=0)
    return TransformerConfig(
        trunk,
        attention=(attention,) * trunk.num_layers,
        feed_forwards=tuple(
            mixture if is_sparse else mlp for is_sparse in read_mlp_types(fields, num_dense)
        ),
    )


def _hy3_mixture(fields: ConfigFields) -> MixtureShape:
    experts = read_experts(fields)
    shared = MlpShape(experts.inner_dim * fields.whole("num_shared_experts"), has_bias=False)
    scaling = fields.positive("router_scaling_factor")
    return MixtureShape(experts, GroupedRouting(1, 1, norms_shares=True, scaling=scaling), shared)


def _load_hy3(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    inside = weights.under("mlp")
    if isinstance(shape, MlpShape):
        return load_gated_mlp(inside, shape, hidden_dim)
    shared = ("shared_mlp", "shared_experts")
    return load_grouped_mixture(inside, shape, hidden_dim, HY3_ROUTER, shared=shared)


load_hy_v3 = partial(load_transformer, feed_forward=_load_hy3)
