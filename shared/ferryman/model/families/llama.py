"""Llama: rotary grouped-query attention and a gated MLP in every layer. The plain case."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.cache.manifest import StateManifest
from ferryman.model.attention import load_attention
from ferryman.model.decoder import Decoder, EndScales, load_ends
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
    return Decoder(
        config=config,
        manifest=manifest,
        ends=load_ends(weights, config.trunk, "model.norm.weight", EndScales()),
        layers=tuple(
            _layer(config, manifest.scan_chunk, weights.under(f"model.layers.{index}"), index)
            for index in range(config.trunk.num_layers)
        ),
    )


def _layer(config: DenseConfig, scan_chunk: int, weights: Weights, index: int) -> DecoderLayer:
    dim, eps = config.trunk.hidden_dim, config.trunk.norm_eps
    place = Place(index, dim, eps, scan_chunk)
    return DecoderLayer(
        mixer_norm=load_norm(weights, "input_layernorm", dim, eps),
        mixer=load_attention(weights.under("self_attn"), config.attention[index], place),
        feed_forward_norm=load_norm(weights, "post_attention_layernorm", dim, eps),
        feed_forward=load_gated_mlp(weights.under("mlp"), config.mlp, dim),
    )


FAMILY = Family(("LlamaForCausalLM",), _read, load_dense)
