"""Poolside's Laguna: attention with a softplus gate, heads by layer, experts by biased sigmoids."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.expert_router import RouterNames
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import load_grouped_mixture
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    read_layers,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import (
    FULL,
    WINDOW,
    read_experts,
    read_mlp_types,
    read_plain_mlp,
    read_rotary_attention,
    read_sparse_layers,
    with_rope_of,
)
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    GateActivation,
    GateShape,
    HeadNorm,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    GroupedRouting,
    MixtureShape,
    MlpShape,
)
from ferryman.model.weights.named_weights import Weights

NUM_DENSE = 1
DEFAULTS = {
    "head_dim": 128,
    "sliding_window": 512,
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
        WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
"""The meaning of fields that a config leaves out."""

_ROUTER = RouterNames(
    ("gate.weight",), ("gate.e_score_correction_bias", "experts.e_score_correction_bias")
)


def read_laguna(fields: ConfigFields) -> TransformerConfig:
    """Laguna: gated attention in windows or not, as many heads as each layer says, experts."""
    fields = fields.with_defaults(**DEFAULTS)
    check_activation(fields)
    _refuse_other_routing(fields)
    mixture, mlp = _mixture(fields), read_plain_mlp(fields)
    return TransformerConfig(
        read_trunk(fields),
        attention=_attention(fields),
        feed_forwards=tuple(mixture if is_sparse else mlp for is_sparse in _sparse_layers(fields)),
    )


def _refuse_other_routing(fields: ConfigFields) -> None:
    check_flags(
        fields,
        moe_apply_router_weight_on_input=False,
        moe_router_use_sigmoid=True,
        norm_topk_prob=True,
    )
    if fields.raw.get("moe_router_score_func", "sigmoid") != "sigmoid":
        raise fields.refusal("moe_router_score_func", "'sigmoid'; nothing else is supported")
    if fields.raw.get("moe_router_logit_softcapping"):
        raise fields.refusal("moe_router_logit_softcapping", "0: scores are not capped")


def _sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Older configs list the layers without experts."""
    is_older = fields.raw.get("mlp_layer_types") is None and "mlp_only_layers" in fields.raw
    return read_sparse_layers(fields) if is_older else read_mlp_types(fields, NUM_DENSE)


def _attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    num_layers = fields.whole("num_hidden_layers")
    named = fields.with_defaults(layer_types=[FULL] * num_layers)
    words = read_layers(named, "layer_types", {FULL: FULL, WINDOW: WINDOW})
    heads: tuple[int, ...] = (fields.whole("num_attention_heads"),) * num_layers
    if fields.raw.get("num_attention_heads_per_layer") is not None:
        heads = fields.whole_list("num_attention_heads_per_layer")
    if len(heads) != num_layers:
        raise fields.refusal("num_attention_heads_per_layer", f"a list of {num_layers} numbers")
    return tuple(_layer(fields, *layer) for layer in zip(words, heads, strict=True))


def _layer(fields: ConfigFields, word: str, q_heads: int) -> AttentionShape:
    counted = ConfigFields(fields.source, {**fields.raw, "num_attention_heads": q_heads})
    return replace(
        read_rotary_attention(with_rope_of(counted, word)),
        head_norm=HeadNorm.EACH_HEAD,
        gate=_gate(fields),
        window_len=fields.whole("sliding_window") if word == WINDOW else 0,
    )


def _gate(fields: ConfigFields) -> GateShape:
    kind = fields.raw.get("gating", True)
    if kind not in (True, "per-head", "per-element"):
        raise fields.refusal("gating", "true, 'per-head' or 'per-element'")
    return GateShape("g_proj", GateActivation.SOFTPLUS, is_by_head=kind != "per-element")


def _mixture(fields: ConfigFields) -> MixtureShape:
    scaling = fields.positive("moe_routed_scaling_factor", 1.0)
    shared = MlpShape(fields.whole("shared_expert_intermediate_size", 512), has_bias=False)
    routing = GroupedRouting(1, 1, norms_shares=True, scaling=scaling)
    return MixtureShape(read_experts(fields), routing, shared)


def _load_feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    inside = weights.under("mlp")
    if isinstance(shape, MlpShape):
        return load_gated_mlp(inside, shape, hidden_dim)
    shared = ("shared_experts", "shared_expert")
    return load_grouped_mixture(inside, shape, hidden_dim, _ROUTER, shared=shared)


load_laguna = partial(load_transformer, feed_forward=_load_feed_forward)
