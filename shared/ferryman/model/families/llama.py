"""Llama: rotary grouped-query attention and a gated MLP in every layer. The plain case."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.attention import load_attention
from ferryman.model.decoder import Decoder, EndScales, load_decoder, load_ends
from ferryman.model.family import Family
from ferryman.model.fields import Fields
from ferryman.model.layers import DecoderLayer, Place, load_gated_mlp, load_norm
from ferryman.model.reading import (
    check_activation,
    head_dim_of,
    read_attention,
    read_mlp,
    read_rotary,
    read_trunk,
)
from ferryman.model.shapes import AttentionShape, MlpShape, TrunkShape
from ferryman.model.weights import Weights


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Attention, full or in a window, and one gated MLP a layer."""

    trunk: TrunkShape
    attention: tuple[AttentionShape, ...]
    mlp: MlpShape

    @property
    def states(self) -> tuple[tuple[AttentionShape], ...]:
        return tuple((attention,) for attention in self.attention)


def _read(fields: Fields) -> DenseConfig:
    check_activation(fields)
    positions = read_rotary(fields, default_factor=1.0)
    attention = read_attention(fields, head_dim_of(fields) ** -0.5, positions)
    trunk = read_trunk(fields)
    return DenseConfig(trunk, (attention,) * trunk.num_layers, read_mlp(fields))


def load_dense(config: DenseConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    """A decoder by the tensor names of Llama, which most dense families share."""
    ends = load_ends(weights, config.trunk, "model.norm.weight", EndScales())
    return load_decoder(
        config, manifest, ends, weights.under("model.layers"), partial(_layer, config)
    )


def _layer(config: DenseConfig, weights: Weights, place: Place) -> DecoderLayer:
    dim, eps = place.hidden_dim, place.norm_eps
    return DecoderLayer(
        mixer_norm=load_norm(weights, "input_layernorm", dim, eps),
        mixer=load_attention(weights.under("self_attn"), config.attention[place.layer], place),
        feed_forward_norm=load_norm(weights, "post_attention_layernorm", dim, eps),
        feed_forward=load_gated_mlp(weights.under("mlp"), config.mlp, dim),
    )


FAMILY = Family(("LlamaForCausalLM",), _read, load_dense)
