"""EXAONE 4, 4.5 and K-EXAONE: a norm on each head, and no positions in layers without windows."""

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
    read_grouped_routing,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_mlp_types,
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MixtureShape, MlpShape
from ferryman.model.shapes.model_shapes import NormPlaces
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields

MOE_DEFAULTS = {
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "sliding_window": 4096,
}
"""The meaning of fields that a config of K-EXAONE leaves out."""

_ROUTER = RouterNames(("gate.weight",), ("gate.e_score_correction_bias", "e_score_correction_bias"))


def read_exaone4(whole: ConfigFields) -> TransformerConfig:
    """EXAONE 4, 4.5's text: OLMo 2's norms, a norm on each head; beside windows no positions."""
    fields = text_fields(whole)
    check_activation(fields)
    trunk = read_trunk(fields)
    return TransformerConfig(
        trunk,
        attention=read_turning_windows(fields, trunk.num_layers),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
        norms=NormPlaces.AFTER,
    )


def read_turning_windows(fields: ConfigFields, num_layers: int) -> tuple[AttentionShape, ...]:
    """Heads with norms, which turn in layers with a window; in all layers where none has one."""
    plain = replace(read_rotary_attention(fields), has_bias=False, has_out_bias=False)
    turning = replace(plain, head_norm=HeadNorm.EACH_HEAD)
    if fields.raw.get("sliding_window") is None:
        return (turning,) * num_layers
    layers = read_windows(fields, turning, lambda layer: not _is_full(fields, layer, num_layers))
    return tuple(
        shape if shape.window_len else replace(shape, positions=NoPositions()) for shape in layers
    )


def _is_full(fields: ConfigFields, layer: int, num_layers: int) -> bool:
    """Published configs give a period as letters, "LLLG", or as a number."""
    pattern = fields.raw.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.refusal("sliding_window_pattern", "a number, or letters L and G")
        return pattern[layer % len(pattern)] == "G" or layer == num_layers - 1
    return (layer + 1) % fields.whole("sliding_window_pattern", 4) == 0


def read_exaone_moe(fields: ConfigFields) -> TransformerConfig:
    """K-EXAONE: EXAONE 4 with norms before attention and MLP, and the experts of DeepSeek-V3."""
    fields = fields.with_defaults(**MOE_DEFAULTS)
    check_activation(fields)
    trunk = read_trunk(fields)
    are_sparse = read_mlp_types(fields, fields.whole("first_k_dense_replace", least=0))
    return TransformerConfig(
        trunk,
        attention=read_turning_windows(fields, trunk.num_layers),
        feed_forwards=tuple(
            _mixture(fields) if is_sparse else read_plain_mlp(fields) for is_sparse in are_sparse
        ),
    )


def _mixture(fields: ConfigFields) -> MixtureShape:
    experts = read_experts(fields)
    shared = MlpShape(experts.inner_dim * fields.whole("num_shared_experts"), has_bias=False)
    return MixtureShape(experts, read_grouped_routing(fields, experts), shared)


def _load_feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    inside = weights.under("mlp")
    if isinstance(shape, MixtureShape):
        return load_grouped_mixture(inside, shape, hidden_dim, _ROUTER)
    return load_gated_mlp(inside, shape, hidden_dim)


load_exaone_moe = partial(load_transformer, feed_forward=_load_feed_forward)
