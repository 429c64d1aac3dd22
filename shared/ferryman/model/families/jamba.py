"""Jamba: Mamba-1 and attention without positions, a gated MLP or experts in every layer.

Attention and experts come at fixed periods, each with an offset of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.mamba import read_dt_rank
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    Mixer,
    load_decoder_layer,
)
from ferryman.model.layers.expert_router import shares_of_all
from ferryman.model.layers.mamba1 import load_mamba1
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import load_mixture
from ferryman.model.readers.config_readers import (
    check_activation,
    head_dim_of,
    read_attention,
    read_trunk,
    read_used,
)
from ferryman.model.readers.transformer_readers import read_experts, read_plain_mlp
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape, MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import InnerNorms, Mamba1Shape
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.named_weights import Weights

JambaMixer = AttentionShape | Mamba1Shape


@dataclass(frozen=True, slots=True)
class JambaConfig:
    """A mixer and a feed-forward for each layer."""

    trunk: TrunkShape
    mixers: tuple[JambaMixer, ...]
    feed_forwards: tuple[MlpShape | MoeShape, ...]

    @property
    def states(self) -> tuple[tuple[JambaMixer], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def read_jamba(fields: ConfigFields) -> JambaConfig:
    check_activation(fields)
    if fields.raw.get("sliding_window") is not None:
        raise fields.refusal("sliding_window", "null; windows are not supported")
    trunk = read_trunk(fields)
    attention, mamba = partial(_attention, fields), partial(_mamba, fields, trunk)
    attends = _periodic(fields, "attn_layer", 8, 4, trunk.num_layers)
    return JambaConfig(
        trunk=trunk,
        mixers=read_used([attention if each else mamba for each in attends]),
        feed_forwards=_feed_forwards(fields, trunk.num_layers),
    )


def _periodic(
    fields: ConfigFields, name: str, period: int, offset: int, num_layers: int
) -> tuple[bool, ...]:
    """True for each layer at the period's offset; the numbers are the defaults."""
    period = fields.whole(f"{name}_period", period)
    offset = fields.whole(f"{name}_offset", offset, least=0)
    if offset >= period:
        raise fields.refusal(f"{name}_offset", f"below {name}_period {period}")
    return tuple(layer % period == offset for layer in range(num_layers))


def _attention(fields: ConfigFields) -> AttentionShape:
    return read_attention(fields, head_dim_of(fields) ** -0.5, NoPositions())


def _mamba(fields: ConfigFields, trunk: TrunkShape) -> Mamba1Shape:
    return Mamba1Shape(
        inner_dim=fields.whole("mamba_expand", 2) * trunk.hidden_dim,
        ssm_state=fields.whole("mamba_d_state", 16),
        dt_rank=read_dt_rank(fields, "mamba_dt_rank"),
        conv_width=fields.whole("mamba_d_conv", 4, least=2),
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        has_bias=fields.flag("mamba_proj_bias", False),
        norms=InnerNorms.WITH_WEIGHTS,
        norm_eps=trunk.norm_eps,
    )


def _feed_forwards(fields: ConfigFields, num_layers: int) -> tuple[MlpShape | MoeShape, ...]:
    """Experts at their period, if there is more than one; an MLP in all other layers."""
    mlp, counted = (
        read_plain_mlp(fields),
        fields.with_defaults(num_experts=16, num_experts_per_tok=2),
    )
    if counted.whole("num_experts") == 1:
        return (mlp,) * num_layers
    moe = read_experts(counted, inner_dim="intermediate_size")
    has_experts = _periodic(fields, "expert_layer", 2, 1, num_layers)
    return tuple(moe if each else mlp for each in has_experts)


def load_jamba(config: JambaConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    layer = partial(_layer, config)
    return load_model_decoder(
        config, manifest, weights, layer, EndScales(), final_norm="final_layernorm"
    )


def _layer(config: JambaConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    inside, shape = weights.under("feed_forward"), config.feed_forwards[place.layer]
    return load_decoder_layer(
        weights,
        place,
        _mixer(weights, config.mixers[place.layer], place),
        _feed_forward(inside, shape, place.hidden_dim),
        norms=("input_layernorm", "pre_ff_layernorm"),
    )


def _mixer(weights: Weights, shape: JambaMixer, place: LayerPlace) -> Mixer:
    if isinstance(shape, AttentionShape):
        return load_attention(weights.under("self_attn"), shape, place)
    return load_mamba1(weights.under("mamba"), shape, place)


def _feed_forward(weights: Weights, shape: MlpShape | MoeShape, hidden_dim: int) -> FeedForward:
    if isinstance(shape, MlpShape):
        return load_gated_mlp(weights, shape, hidden_dim)
    score = make_linear(weights.tensor("router.weight", shape.num_experts, hidden_dim))
    router = shares_of_all(score, shape.experts_per_token)
    return load_mixture(weights.under("experts"), shape, hidden_dim, router)
