"""LFM2, dense or with experts: short convolutions, some layers of attention with normed heads.

hidden += mixer(operator_norm(hidden))
hidden += w2(silu(w1(x)) · w3(x)),  x = ffn_norm(hidden)

Experts are behind the first layers of LFM2-MoE:

score  = sigmoid(x · Wᵀ);   chosen = the best of score + bias
share  = scaling · score of the chosen, first divided by their sum
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    Mixer,
    load_decoder_layer,
)
from ferryman.model.layers.expert_router import RankedRouter, WideScores
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import load_mixture
from ferryman.model.layers.short_conv import load_short_conv
from ferryman.model.readers.config_readers import read_layers, read_trunk, read_used
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_plain_mlp,
    read_rotary_attention,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape, MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import ShortConvShape
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.expert_choice import ExpertNumbers, ExpertRule, Measure, ShareSum

Operator = AttentionShape | ShortConvShape

# This family's words for parts of a tensor's name.
_NAMES: Mapping[str, str] = {
    "o_proj": "out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
_NORMS = ("operator_norm", "ffn_norm")
_THETA = 1_000_000.0
_SUM_EPS = 1e-6  # added to the sum of the chosen shares, as the published model was trained


@dataclass(frozen=True, slots=True)
class Lfm2Config:
    """One operator a layer, and one MLP shape for all."""

    trunk: TrunkShape
    operators: tuple[Operator, ...]
    mlp: MlpShape

    @property
    def states(self) -> tuple[tuple[Operator], ...]:
        return tuple((operator,) for operator in self.operators)


@dataclass(frozen=True, slots=True)
class BiasedRouting:
    """The routing of a token. `has_bias`: a learnt bias affects the choice, not the share."""

    has_bias: bool
    norms_shares: bool
    scaling: float


@dataclass(frozen=True, slots=True)
class Lfm2MoeConfig:
    """One operator a layer; the first `num_dense` layers have an MLP, the others experts."""

    trunk: TrunkShape
    operators: tuple[Operator, ...]
    mlp: MlpShape
    moe: MoeShape
    routing: BiasedRouting
    num_dense: int

    @property
    def states(self) -> tuple[tuple[Operator], ...]:
        return tuple((operator,) for operator in self.operators)


def read_lfm2(fields: ConfigFields) -> Lfm2Config:
    """LFM2: short convolutions, some layers of attention with normed heads, gated MLPs."""
    fields = _with_present_names(fields)
    return Lfm2Config(read_trunk(fields, norm_eps="norm_eps"), _operators(fields), _mlp(fields))


def read_lfm2_moe(fields: ConfigFields) -> Lfm2MoeConfig:
    """LFM2-MoE: LFM2 with experts behind the first layers."""
    fields = _with_present_names(fields)
    return Lfm2MoeConfig(
        trunk=read_trunk(fields, norm_eps="norm_eps"),
        operators=_operators(fields),
        mlp=read_plain_mlp(fields),
        moe=read_experts(fields),
        routing=BiasedRouting(
            fields.flag("use_expert_bias", True),
            fields.flag("norm_topk_prob", True),
            fields.positive("routed_scaling_factor", 1.0),
        ),
        num_dense=fields.whole("num_dense_layers", 2, least=0),
    )


def _with_present_names(fields: ConfigFields) -> ConfigFields:
    """The fields by their present names; of two, the former counts. Defaults as in transformers."""
    former = {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"}
    given = {name: fields.raw[old] for name, old in former.items() if old in fields.raw}
    named = replace(fields, raw={**fields.raw, **given})
    return named.with_defaults(rope_theta=_THETA, tie_word_embeddings=True)


def _operators(fields: ConfigFields) -> tuple[Operator, ...]:
    """The operators by "layer_types", or attention in the layers that "full_attn_idxs" lists."""
    attention, conv = partial(_attention, fields), partial(read_short_conv, fields)
    readers: dict[str, Callable[[], Operator]] = {"full_attention": attention, "conv": conv}
    if fields.raw.get("layer_types") is not None:
        return read_used(read_layers(fields, "layer_types", readers))
    indices, num_layers = fields.whole_list("full_attn_idxs"), fields.whole("num_hidden_layers")
    if "full_attn_idxs" not in fields.raw or any(index >= num_layers for index in indices):
        raise fields.refusal("full_attn_idxs", f"a list of layer indices below {num_layers}")
    return read_used([attention if i in indices else conv for i in range(num_layers)])


def _attention(fields: ConfigFields) -> AttentionShape:
    return replace(read_rotary_attention(fields), head_norm=HeadNorm.EACH_HEAD, has_bias=False)


def read_short_conv(fields: ConfigFields) -> ShortConvShape:
    return ShortConvShape(
        dim=fields.whole("hidden_size"),
        conv_width=fields.whole("conv_L_cache", 3, least=2),
        has_bias=fields.flag("conv_bias", False),
    )


def _mlp(fields: ConfigFields) -> MlpShape:
    """Two thirds of `intermediate_size`, times a factor, rounded up to a multiple; or just that."""
    inner_dim = fields.whole("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return MlpShape(inner_dim, has_bias=False)
    factor, multiple = (
        fields.positive("block_ffn_dim_multiplier", 1.0),
        fields.whole("block_multiple_of", 256),
    )
    scaled = int(factor * int(2 * inner_dim / 3))
    return MlpShape(-(-scaled // multiple) * multiple, has_bias=False)


def biased_router(
    score: Linear, bias: Tensor, routing: BiasedRouting, experts_per_token: int
) -> RankedRouter:
    """`score` takes the accumulation dtype, `bias` [experts] is in it."""
    divisor = ShareSum(added=_SUM_EPS) if routing.norms_shares else None
    rule = ExpertRule(experts_per_token, Measure.SIGMOID, sum=divisor, scaling=routing.scaling)
    return RankedRouter(WideScores(score), rule, ExpertNumbers(bias))


def load_lfm2(config: Lfm2Config, manifest: StateManifest, weights: Weights) -> Decoder:
    def load_mlp(inside: Weights, place: LayerPlace) -> FeedForward:
        return load_gated_mlp(inside, config.mlp, place.hidden_dim)

    return _load(config, manifest, weights, load_mlp)


def load_lfm2_moe(config: Lfm2MoeConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return _load(config, manifest, weights, partial(_load_mlp_or_experts, config))


def _load_mlp_or_experts(config: Lfm2MoeConfig, weights: Weights, place: LayerPlace) -> FeedForward:
    if place.layer < config.num_dense:
        return load_gated_mlp(weights, config.mlp, place.hidden_dim)
    moe, routing = config.moe, config.routing
    weight = weights.precise("gate.weight", moe.num_experts, place.hidden_dim)
    bias = weight.new_zeros(moe.num_experts)
    if routing.has_bias:
        bias = weights.precise("expert_bias", moe.num_experts)
    router = biased_router(make_linear(weight), bias, routing, moe.experts_per_token)
    return load_mixture(weights.under("experts"), moe, place.hidden_dim, router)


def _load(
    config: Lfm2Config | Lfm2MoeConfig,
    manifest: StateManifest,
    weights: Weights,
    load_feed_forward: Callable[[Weights, LayerPlace], FeedForward],
) -> Decoder:
    def load_layer(weights: Weights, place: LayerPlace) -> DecoderLayer:
        mixer = load_operator(weights, config.operators[place.layer], place)
        feed_forward = load_feed_forward(weights.under("feed_forward"), place)
        return load_decoder_layer(weights, place, mixer, feed_forward, norms=_NORMS)

    return load_model_decoder(
        config,
        manifest,
        weights.called(_NAMES),
        load_layer,
        EndScales(),
        final_norm="embedding_norm",
    )


def load_operator(weights: Weights, shape: Operator, place: LayerPlace) -> Mixer:
    if isinstance(shape, AttentionShape):
        return load_attention(weights.under("self_attn"), shape, place)
    return load_short_conv(weights.under("conv"), shape, place)
