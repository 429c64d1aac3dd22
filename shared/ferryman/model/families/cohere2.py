"""Cohere Command R7B and A: attention and MLP side by side after one norm.

hidden += attention(norm(hidden)) + mlp(norm(hidden)),   the norm also subtracts the mean

Three of four layers have rotary positions and a window; the others have neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.model.attention import load_attention
from ferryman.model.attention_shapes import AttentionShape, NoPositions, RotaryPositions
from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.config_fields import ConfigFields
from ferryman.model.config_readers import check_activation, read_trunk
from ferryman.model.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.family import Family
from ferryman.model.feed_forward_shapes import MlpShape
from ferryman.model.layers import FeedForward, LayerPlace, Mixer, Norm, load_gated_mlp
from ferryman.model.state import ModelState
from ferryman.model.transformer import TransformerConfig
from ferryman.model.transformer_readers import (
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.weights import Weights

DEFAULT_LOGIT_SCALE = 0.0625


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    for name, expected in {"use_qk_norm": False, "use_gated_activation": True}.items():
        if fields.flag(name, expected) is not expected:
            raise fields.refusal(name, str(expected).lower())
    tied = ConfigFields(fields.source, {"tie_word_embeddings": True, **fields.raw})
    trunk = read_trunk(tied, norm_eps="layer_norm_eps")
    logit_scale = fields.positive("logit_scale", DEFAULT_LOGIT_SCALE)
    return TransformerConfig(
        trunk,
        attention=_attention(fields),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
        scales=EndScales(logits_scaling=1.0 / logit_scale),
    )


def _attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    """Published configs name a period, "sliding_window_pattern", or the type of each layer."""
    period = fields.whole("sliding_window_pattern", 4)
    shape = read_rotary_attention(fields)
    full = replace(shape, positions=NoPositions())
    layers = read_windows(fields, full, lambda layer: (layer + 1) % period != 0)
    if not isinstance(shape.positions, RotaryPositions):
        raise TypeError(shape.positions)
    turning = replace(shape.positions, is_interleaved=True)
    return tuple(replace(each, positions=turning) if each.window_len else each for each in layers)


@dataclass(frozen=True, slots=True)
class CentredNorm:
    """(x - mean) / √variance · `weight` [dim], which is in the accumulation dtype."""

    weight: Tensor
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(self.weight.dtype)
        centred = wide - wide.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return (centred * torch.rsqrt(variance + self.eps) * self.weight).to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class SideBySideLayer:
    """A mixer and a feed-forward that read the same norm, beside one residual path."""

    norm: Norm
    mixer: Mixer
    feed_forward: FeedForward

    def prefill(self, hidden: Tensor, batch: PrefillBatch, state: ModelState) -> Tensor:
        normed = self.norm(hidden)
        return hidden + self.mixer.prefill(normed, batch, state) + self.feed_forward(normed)

    def decode(self, hidden: Tensor, batch: DecodeBatch, state: ModelState) -> Tensor:
        normed = self.norm(hidden)
        return hidden + self.mixer.decode(normed, batch, state) + self.feed_forward(normed)


def _load(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    ends = load_embedding_and_head(weights, config.trunk, "model.norm.weight", config.scales)
    norm = _load_norm(
        weights.under("model"), "norm", config.trunk.hidden_dim, config.trunk.norm_eps
    )
    return load_decoder(
        config,
        manifest,
        replace(ends, norm=norm),
        weights.under("model.layers"),
        partial(_layer, config),
    )


def _load_norm(weights: Weights, name: str, dim: int, eps: float) -> CentredNorm:
    return CentredNorm(weights.precise(f"{name}.weight", dim), eps)


def _layer(config: TransformerConfig, weights: Weights, place: LayerPlace) -> SideBySideLayer:
    mlp = config.feed_forwards[place.layer]
    if not isinstance(mlp, MlpShape):
        raise TypeError(f"Cohere 2 has no experts, but {mlp}")
    return SideBySideLayer(
        norm=_load_norm(weights, "input_layernorm", place.hidden_dim, place.norm_eps),
        mixer=load_attention(weights.under("self_attn"), config.attention[place.layer], place),
        feed_forward=load_gated_mlp(weights.under("mlp"), mlp, place.hidden_dim),
    )


FAMILY = Family(("Cohere2ForCausalLM",), _read, _load)
