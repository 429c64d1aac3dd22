"""Cohere Command R, R7B and A: attention and MLP, or experts, side by side after one norm.

hidden += attention(norm(hidden)) + mlp(norm(hidden)),   the norm also subtracts the mean
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.model.layers.centred_norm import load_centred_norm
from ferryman.model.layers.decoder import EndScales
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import check_activation, check_flags, read_trunk
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_mlp_types,
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    MixtureShape,
    MlpShape,
    Routing,
    SigmoidRouting,
    SoftmaxRouting,
)
from ferryman.model.shapes.model_shapes import NormPlaces

LOGIT_SCALE = 0.0625
PERIOD = 4
MOE_DEFAULTS = {"head_dim": 128, "tie_word_embeddings": True}
"""The meaning of fields that a config with experts leaves out."""


def read_cohere(fields: ConfigFields) -> TransformerConfig:
    """Cohere Command R: attention and MLP side by side after one norm; heads may have norms."""
    fields = fields.with_defaults(tie_word_embeddings=True, rope_theta=500_000.0)
    check_activation(fields)
    turning = read_rotary_attention(fields, is_interleaved=True)
    is_normed = fields.flag("use_qk_norm", False)
    attention = replace(turning, head_norm=HeadNorm.OWN_CENTRED) if is_normed else turning
    return replace(
        uniform_transformer(
            read_trunk(fields, norm_eps="layer_norm_eps"), attention, read_plain_mlp(fields)
        ),
        norms=NormPlaces.SHARED,
        scales=EndScales(logits_scaling=1.0 / fields.positive("logit_scale", LOGIT_SCALE)),
    )


def read_cohere2(fields: ConfigFields) -> TransformerConfig:
    """Cohere Command R7B and A: attention and MLP side by side after one norm.

    Three of four layers have rotary positions and a window; the others have neither.
    """
    check_activation(fields)
    check_flags(fields, use_qk_norm=False, use_gated_activation=True)
    tied = ConfigFields(fields.source, {"tie_word_embeddings": True, **fields.raw})
    trunk = read_trunk(tied, norm_eps="layer_norm_eps")
    logit_scale = fields.positive("logit_scale", LOGIT_SCALE)
    return TransformerConfig(
        trunk,
        attention=_cohere2_attention(fields),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
        norms=NormPlaces.SHARED,
        scales=EndScales(logits_scaling=1.0 / logit_scale),
    )


def _cohere2_attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    """Published configs name a period, "sliding_window_pattern", or the type of each layer."""
    period = fields.whole("sliding_window_pattern", PERIOD)
    turning = read_rotary_attention(fields, is_interleaved=True)
    full = replace(turning, positions=NoPositions())
    layers = read_windows(fields, full, lambda layer: (layer + 1) % period != 0)
    return tuple(
        replace(shape, positions=turning.positions) if shape.window_len else shape
        for shape in layers
    )


load_cohere = partial(load_transformer, load_norm=load_centred_norm)


def read_cohere2_moe(fields: ConfigFields) -> TransformerConfig:
    """Cohere Command A with experts: Command A whose layers have experts, but for the first."""
    fields = fields.with_defaults(**MOE_DEFAULTS)
    if fields.raw.get("rms_norm_eps") is not None:
        raise fields.refusal("rms_norm_eps", "null: only norms around the mean are supported")
    num_dense = fields.whole("first_k_dense_replace", 0, least=0)
    are_sparse = read_mlp_types(fields, num_dense)
    dense = MlpShape(
        fields.whole("prefix_dense_intermediate_size", fields.whole("intermediate_size")),
        has_bias=False,
    )
    return replace(
        read_cohere2(fields),
        attention=_attention_beside_experts(fields, are_sparse, num_dense),
        feed_forwards=tuple(_mixture(fields) if sparse else dense for sparse in are_sparse),
    )


def _attention_beside_experts(
    fields: ConfigFields, are_sparse: tuple[bool, ...], num_dense: int
) -> tuple[AttentionShape, ...]:
    """The first layers have a period of windows of their own. If it is 1, all layers with a dense
    MLP have rotary positions."""
    first_period = fields.whole("prefix_dense_sliding_window_pattern", 1)
    period = fields.whole("sliding_window_pattern", PERIOD)

    def is_window(layer: int) -> bool:
        if layer < num_dense:
            return (layer + 1) % first_period != 0
        return (layer - num_dense + 1) % period != 0

    turning = read_rotary_attention(fields, is_interleaved=True)
    return tuple(
        shape
        if shape.window_len or (first_period == 1 and not is_sparse)
        else replace(shape, positions=NoPositions())
        for shape, is_sparse in zip(
            read_windows(fields, turning, is_window), are_sparse, strict=True
        )
    )


def _mixture(fields: ConfigFields) -> MixtureShape:
    experts = read_experts(fields, inner_dim="intermediate_size")
    num_shared = fields.whole("num_shared_experts", 0, least=0)
    joint = fields.raw.get("shared_expert_combination_strategy", "average")
    if joint not in ("sum", "average"):
        raise fields.refusal("shared_expert_combination_strategy", "'sum' or 'average'")
    shared = MlpShape(num_shared * experts.inner_dim, has_bias=False) if num_shared else None
    return MixtureShape(experts, _routing(fields), shared, is_mean=joint == "average")


def _routing(fields: ConfigFields) -> Routing:
    name = fields.raw.get("expert_selection_fn", "softmax")
    if name not in ("softmax", "sigmoid"):
        raise fields.refusal("expert_selection_fn", "'softmax' or 'sigmoid'")
    sums_to_one = fields.flag("norm_topk_prob", True)
    # A softmax is over the chosen alone, so that its shares sum to one in any case.
    return SoftmaxRouting(True) if name == "softmax" else SigmoidRouting(sums_to_one)
