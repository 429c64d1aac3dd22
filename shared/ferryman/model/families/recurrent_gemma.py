"""RecurrentGemma (Griffin): recurrent blocks, and every third layer attention in a window.

hidden += mixer(norm(hidden))
hidden += down(gelu(gate) · up),  gate and up of norm(hidden)

Norms are stored as their distance from one. No layer keeps pages of all positions, so a sequence
has no last position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    LayerPlace,
    Mixer,
    load_decoder_layer,
    load_norm,
)
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.rg_lru import load_rg_lru
from ferryman.model.readers.config_readers import (
    GELU,
    POSITIONS_OF_A_RECURRENCE,
    check_activation,
    check_flags,
    read_trunk,
    read_used,
)
from ferryman.model.readers.transformer_readers import read_rotary_attention
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import RgLruShape
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import gelu_tanh

# The meanings of fields that published configs leave out.
DEFAULTS: Mapping[str, Any] = {
    "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
    "conv1d_width": 4,
    "logits_soft_cap": 30.0,
    "max_position_embeddings": POSITIONS_OF_A_RECURRENCE,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

GriffinMixer = AttentionShape | RgLruShape


@dataclass(frozen=True, slots=True)
class RecurrentGemmaConfig:
    """A mixer for each layer, MLPs of one shape."""

    trunk: TrunkShape
    mixers: tuple[GriffinMixer, ...]
    mlp: MlpShape
    logits_cap: float

    @property
    def states(self) -> tuple[tuple[GriffinMixer], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def read_recurrent_gemma(config: ConfigFields) -> RecurrentGemmaConfig:
    """RecurrentGemma (Griffin): RG-LRUs, and some layers of attention in windows."""
    fields = config.with_former(block_types="_block_types").with_defaults(**DEFAULTS)
    check_activation(fields, "hidden_activation", (GELU,))
    check_flags(fields, embeddings_scale_by_sqrt_dim=True)
    inner_dim = fields.whole("intermediate_size")
    if inner_dim % 2:
        raise fields.refusal("intermediate_size", "even: gate and up have half of it each")
    return RecurrentGemmaConfig(
        trunk=read_trunk(fields),
        mixers=read_used(_readers(fields)),
        mlp=MlpShape(inner_dim // 2, has_bias=True),
        logits_cap=fields.positive("logits_soft_cap"),
    )


def _readers(fields: ConfigFields) -> list[Callable[[], GriffinMixer]]:
    """A reader for each layer: "block_types" are the words of a period."""
    by_word: dict[str, Callable[[], GriffinMixer]] = {
        "recurrent": partial(_recurrence, fields),
        "attention": partial(_attention, fields),
    }
    words = fields.words("block_types")
    if not words or set(words) - by_word.keys():
        raise fields.refusal("block_types", f"a list of {', '.join(by_word)}")
    num_layers = fields.whole("num_hidden_layers")
    return [by_word[words[layer % len(words)]] for layer in range(num_layers)]


def _attention(fields: ConfigFields) -> AttentionShape:
    window_len = fields.whole("attention_window_size")
    plain = read_rotary_attention(fields, default_factor=0.5)
    return replace(plain, window_len=window_len, has_out_bias=True)


def _recurrence(fields: ConfigFields) -> RgLruShape:
    dim = fields.whole("lru_width", fields.whole("hidden_size"))
    blocks = fields.whole("num_attention_heads")
    if dim % blocks:
        raise fields.refusal("lru_width", f"a multiple of num_attention_heads {blocks}")
    return RgLruShape(dim, blocks, fields.whole("conv1d_width", least=2))


def load_recurrent_gemma(
    config: RecurrentGemmaConfig, manifest: StateManifest, weights: Weights
) -> Decoder:
    # The scale is published as a bfloat16, in whatever dtype the model runs.
    scale = float(torch.tensor(config.trunk.hidden_dim**0.5, dtype=torch.bfloat16))
    ends = load_embedding_and_head(
        weights,
        config.trunk,
        "model.final_norm.weight",
        EndScales(scale, logits_cap=config.logits_cap),
        load_norm=partial(load_norm, origin=1.0),
    )
    layers, load_layer = weights.under("model.layers"), partial(_layer, config)
    return load_decoder(config, manifest, ends, layers, load_layer, norm_origin=1.0)


def _layer(config: RecurrentGemmaConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mlp = load_gated_mlp(weights.under("mlp_block"), config.mlp, place.hidden_dim, gelu_tanh)
    mixer = _mixer(weights.under("temporal_block"), config.mixers[place.layer], place)
    norms = ("temporal_pre_norm", "channel_pre_norm")
    return load_decoder_layer(weights, place, mixer, mlp, norms=norms)


def _mixer(weights: Weights, shape: GriffinMixer, place: LayerPlace) -> Mixer:
    if isinstance(shape, AttentionShape):
        return load_attention(weights, shape, place)
    return load_rg_lru(weights, shape, place)
