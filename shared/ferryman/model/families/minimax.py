"""MiniMax-Text-01, and MiniMax-M2, which is a transformer.

MiniMax-Text-01: lightning attention, some layers of softmax attention, experts in every layer.

x      = norm(hidden);   hidden = alpha · x + beta · mixer(x)
x      = norm(hidden);   hidden = alpha · x + beta · experts(x)

The residual path goes through the norms. Published configs and those of transformers have different
names for the same fields.
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
    FeedForward,
    LayerPlace,
    Mixer,
    RmsNorm,
    load_norm,
)
from ferryman.model.layers.expert_router import RouterNames, shares_of_chosen
from ferryman.model.layers.lightning_attention import load_lightning
from ferryman.model.layers.moe import load_grouped_mixture, load_mixture
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    check_values,
    head_dim_of,
    read_layers,
    read_trunk,
    read_used,
)
from ferryman.model.readers.transformer_readers import read_experts, read_rotary_attention
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    GroupedRouting,
    MixtureShape,
    MoeShape,
)
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import LightningShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.named_weights import Weights

M2_DEFAULTS = {"head_dim": 128, "rope_theta": 5_000_000.0}
"""The meaning of fields that a config of MiniMax-M2 leaves out."""

MiniMaxMixer = AttentionShape | LightningShape

_NAMES: Mapping[str, str] = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_WORDS = ("linear_attention", "full_attention")  # by their numbers in `attn_type_list`


@dataclass(frozen=True, slots=True)
class ResidualScales:
    """The factor of the residual path and that of what is added to it."""

    alpha: float
    beta: float


@dataclass(frozen=True, slots=True)
class MiniMaxConfig:
    """A mixer for each layer, experts of one shape for all. `mixer_scales` are by layer."""

    trunk: TrunkShape
    mixers: tuple[MiniMaxMixer, ...]
    moe: MoeShape
    mixer_scales: tuple[ResidualScales, ...]
    feed_forward_scales: ResidualScales

    @property
    def states(self) -> tuple[tuple[MiniMaxMixer], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def read_minimax_m2(fields: ConfigFields) -> TransformerConfig:
    """MiniMax-M2: softmax attention in all layers, partly rotary, experts by biased sigmoids.

    One norm covers all heads of q, and one those of k.
    """
    fields = _with_rotary_share(fields.with_defaults(**M2_DEFAULTS))
    check_activation(fields)
    check_flags(fields, use_qk_norm=True, use_routing_bias=True)
    expected = {"qk_norm_type": "per_layer", "scoring_func": "sigmoid"}
    check_values(fields, {**expected, "shared_intermediate_size": 0})
    if set(fields.whole_list("attn_type_list")) - {1}:
        raise fields.refusal("attn_type_list", "a list of 1: all layers have softmax attention")
    attention = replace(
        read_rotary_attention(fields),
        head_norm=HeadNorm.ALL_HEADS,
        has_bias=False,
        has_out_bias=False,
    )
    experts = read_experts(fields, count="num_local_experts", inner_dim="intermediate_size")
    routing = GroupedRouting(1, 1, norms_shares=True, scaling=1.0)
    return uniform_transformer(read_trunk(fields), attention, MixtureShape(experts, routing))


def _load_m2_experts(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MixtureShape):
        raise TypeError(f"MiniMax-M2 has experts in every layer, not {shape}")
    names = ("block_sparse_moe.gate.weight", "mlp.gate.weight")
    inside = weights.under(weights.first_of(*names).partition(".")[0])
    router = RouterNames(weight=("gate.weight",))
    return load_grouped_mixture(inside, shape, hidden_dim, router, names=("w1", "w3", "w2"))


load_minimax_m2 = partial(load_transformer, feed_forward=_load_m2_experts)


def read_minimax(fields: ConfigFields) -> MiniMaxConfig:
    """MiniMax-Text-01: lightning attention, some layers of softmax attention, experts everywhere"""
    check_activation(fields)
    expected = {"sliding_window": None, "postnorm": True, "shared_intermediate_size": 0}
    check_values(fields, expected)
    fields = _with_present_names(fields)
    readers: dict[str, Callable[[], MiniMaxMixer]] = {
        "full_attention": partial(read_rotary_attention, fields),
        "linear_attention": partial(_lightning, fields),
    }
    mixers = read_used(read_layers(fields, "layer_types", readers))
    softmax, linear = _scales(fields, "full_attn"), _scales(fields, "linear_attn")
    return MiniMaxConfig(
        trunk=read_trunk(fields),
        mixers=mixers,
        moe=read_experts(fields, count="num_local_experts", inner_dim="intermediate_size"),
        mixer_scales=tuple(softmax if isinstance(m, AttentionShape) else linear for m in mixers),
        feed_forward_scales=_scales(fields, "mlp"),
    )


def _with_present_names(fields: ConfigFields) -> ConfigFields:
    """Fields of the published configs by the names of transformers."""
    former = {
        f"{part}_{factor}_factor": f"layernorm_{old}_{factor}"
        for part, old in (
            ("full_attn", "full_attention"),
            ("linear_attn", "linear_attention"),
            ("mlp", "mlp"),
        )
        for factor in ("alpha", "beta")
    }
    named = fields.with_former(**former)
    if "attn_type_list" in named.raw:
        numbers = named.whole_list("attn_type_list")
        if any(number >= len(_WORDS) for number in numbers):
            raise named.refusal("attn_type_list", "a list of 0 (lightning) and 1 (softmax)")
        named = named.with_defaults(layer_types=[_WORDS[number] for number in numbers])
    return _with_rotary_share(named).with_defaults(rope_theta=1_000_000.0)


def _with_rotary_share(fields: ConfigFields) -> ConfigFields:
    """Published configs have the number of a head's channels that turn."""
    if "rotary_dim" not in fields.raw:
        return fields
    share = fields.whole("rotary_dim") / head_dim_of(fields)
    return fields.with_defaults(partial_rotary_factor=share)


def _scales(fields: ConfigFields, part: str) -> ResidualScales:
    alpha, beta = (fields.positive(f"{part}_{name}_factor", 1.0) for name in ("alpha", "beta"))
    return ResidualScales(alpha, beta)


def _lightning(fields: ConfigFields) -> LightningShape:
    return LightningShape(fields.whole("num_attention_heads"), head_dim_of(fields))


@dataclass(frozen=True, slots=True)
class MiniMaxLayer:
    """A mixer and a feed-forward on a residual path that goes through both norms."""

    mixer_norm: RmsNorm
    mixer: Mixer
    mixer_scales: ResidualScales
    feed_forward_norm: RmsNorm
    feed_forward: FeedForward
    feed_forward_scales: ResidualScales

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        normed = self.mixer_norm(hidden)
        mixed = self.mixer.forward(normed, batch, state)
        hidden = normed * self.mixer_scales.alpha + mixed * self.mixer_scales.beta
        normed, scales = self.feed_forward_norm(hidden), self.feed_forward_scales
        return normed * scales.alpha + self.feed_forward(normed) * scales.beta


def load_minimax(config: MiniMaxConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_model_decoder(config, manifest, weights, partial(_layer, config), EndScales())


def _layer(config: MiniMaxConfig, weights: Weights, place: LayerPlace) -> MiniMaxLayer:
    dim, eps, moe = place.hidden_dim, place.norm_eps, config.moe
    experts = weights.under("block_sparse_moe").called(_NAMES)
    score = make_linear(experts.tensor("gate.weight", moe.num_experts, dim))
    router = shares_of_chosen(score, moe.experts_per_token)
    return MiniMaxLayer(
        mixer_norm=load_norm(weights, "input_layernorm", dim, eps),
        mixer=_mixer(config, weights.under("self_attn"), place),
        mixer_scales=config.mixer_scales[place.layer],
        feed_forward_norm=load_norm(weights, "post_attention_layernorm", dim, eps),
        feed_forward=load_mixture(experts.under("experts"), moe, dim, router),
        feed_forward_scales=config.feed_forward_scales,
    )


def _mixer(config: MiniMaxConfig, weights: Weights, place: LayerPlace) -> Mixer:
    shape = config.mixers[place.layer]
    if isinstance(shape, AttentionShape):
        return load_attention(weights, shape, place)
    return load_lightning(weights, shape, place, config.trunk.num_layers)
