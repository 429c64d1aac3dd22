"""Bamba: Mamba-2 and attention with partly rotary heads, a gated MLP in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import DecoderLayer, LayerPlace, load_gated_mlp, load_norm
from ferryman.model.layers.mixers import MixerShape, load_mixer
from ferryman.model.readers.config_readers import (
    check_activation,
    head_dim_of,
    read_attention,
    read_mamba,
    read_mlp,
    read_rotary,
    read_trunk,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights


@dataclass(frozen=True, slots=True)
class BambaConfig:
    """One mixer and one MLP a layer."""

    trunk: TrunkShape
    mixers: tuple[MixerShape, ...]
    mlp: MlpShape

    @property
    def states(self) -> tuple[tuple[MixerShape], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def _read(fields: ConfigFields) -> BambaConfig:
    check_activation(fields)
    return BambaConfig(trunk=read_trunk(fields), mixers=_mixers(fields), mlp=read_mlp(fields))


def _mixers(fields: ConfigFields) -> tuple[MixerShape, ...]:
    """Attention in the layers that the config lists, Mamba-2 in all others."""
    indices = fields.whole_list("attn_layer_indices")
    num_layers = fields.whole("num_hidden_layers")
    if any(index >= num_layers for index in indices):
        raise fields.refusal("attn_layer_indices", f"layer indices below {num_layers}")
    positions = read_rotary(fields, default_factor=0.5)
    attention = read_attention(fields, head_dim_of(fields) ** -0.5, positions)
    mamba = read_mamba(fields)
    return tuple(attention if index in indices else mamba for index in range(num_layers))


def _load(config: BambaConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    ends = load_embedding_and_head(
        weights, config.trunk, "model.final_layernorm.weight", EndScales()
    )
    return load_decoder(
        config, manifest, ends, weights.under("model.layers"), partial(_layer, config)
    )


def _layer(config: BambaConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    dim, eps = place.hidden_dim, place.norm_eps
    return DecoderLayer(
        mixer_norm=load_norm(weights, "input_layernorm", dim, eps),
        mixer=load_mixer(weights, config.mixers[place.layer], place),
        feed_forward_norm=load_norm(weights, "pre_ff_layernorm", dim, eps),
        feed_forward=load_gated_mlp(weights.under("feed_forward"), config.mlp, dim),
    )


FAMILY = Family(("BambaForCausalLM",), _read, _load)
