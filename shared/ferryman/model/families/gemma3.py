"""Gemma 3, its text model: five layers in a window to one that sees all, four norms a layer.

hidden += norm(attention(norm(hidden)))
hidden += norm(down(gelu(gate) · up)),  gate and up of norm(hidden)

Norms are stored as their distance from one. The embedding's scale, √hidden_dim, is rounded to the
model's dtype. A folder of the model that also sees images serves as its text model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.cache.manifest import StateManifest
from ferryman.model.attention import load_attention
from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.checkpoint import Checkpoint
from ferryman.model.decoder import Decoder, EndScales, load_decoder, load_ends
from ferryman.model.family import Family
from ferryman.model.fields import Fields
from ferryman.model.layers import FeedForward, Mixing, Place, RmsNorm, load_gated_mlp, load_norm
from ferryman.model.reading import head_dim_of, read_attention, read_layers, read_trunk
from ferryman.model.rotary import read_stretch
from ferryman.model.shapes import AttentionShape, MlpShape, RotaryPositions, TrunkShape
from ferryman.model.state import ModelState
from ferryman.model.weights import Weights

GELU = "gelu_pytorch_tanh"
gelu_tanh = partial(F.gelu, approximate="tanh")

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "hidden_activation": GELU,
    "eos_token_id": 1,
}
"""What a published config leaves out means these."""


@dataclass(frozen=True, slots=True)
class Gemma3Config:
    """One attention and one MLP a layer."""

    trunk: TrunkShape
    attention: tuple[AttentionShape, ...]
    mlp: MlpShape
    logits_cap: float

    @property
    def states(self) -> tuple[tuple[AttentionShape], ...]:
        return tuple((attention,) for attention in self.attention)


def _read(whole: Fields) -> Gemma3Config:
    nested = whole.beneath("text_config")
    fields = Fields(nested.source, {**DEFAULTS, **nested.raw})
    if fields.raw["hidden_activation"] != GELU:
        raise fields.refusal("hidden_activation", f"{GELU!r}; no other activation is supported")
    if fields.raw.get("attn_logit_softcapping") is not None:
        raise fields.refusal("attn_logit_softcapping", "null: scores are not capped in Gemma 3")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.refusal("use_bidirectional_attention", "false")
    return Gemma3Config(
        trunk=read_trunk(fields),
        attention=_read_attention(fields),
        mlp=MlpShape(fields.whole("intermediate_size"), has_bias=False),
        logits_cap=fields.real("final_logit_softcapping", 0.0),
    )


def _read_attention(fields: Fields) -> tuple[AttentionShape, ...]:
    """Layers that see all have waves of their own: longer, and often stretched."""
    scale = fields.real("query_pre_attn_scalar") ** -0.5
    shape = replace(read_attention(fields, scale, _positions_of_all(fields)), norms_heads=True)
    window = replace(
        shape, window_len=fields.whole("sliding_window"), positions=_positions_in_window(fields)
    )
    if fields.raw.get("layer_types"):
        meanings = {"full_attention": shape, "sliding_attention": window}
        return read_layers(fields, "layer_types", meanings)
    period, num_layers = fields.whole("sliding_window_pattern"), fields.whole("num_hidden_layers")
    return tuple(window if index % period else shape for index in range(1, num_layers + 1))


def _positions_of_all(fields: Fields) -> RotaryPositions:
    name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    rope = fields.beneath(name).beneath("full_attention")
    theta = rope.real("rope_theta", 1_000_000.0)
    return RotaryPositions(theta, head_dim_of(fields), read_stretch(rope))


def _positions_in_window(fields: Fields) -> RotaryPositions:
    """Nothing of the layers that see all holds here."""
    theta = fields.real("rope_local_base_freq", 10_000.0)
    bare = {name: fields.raw.get(name) for name in ("rope_parameters", "max_position_embeddings")}
    rope = Fields(fields.source, bare).beneath("rope_parameters").beneath("sliding_attention")
    theta = rope.real("rope_theta", theta)
    return RotaryPositions(theta, head_dim_of(fields), read_stretch(rope))


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """A mixer and a feed-forward, each between two norms and beside a residual path."""

    mixer_norm: RmsNorm
    mixer: Mixing
    mixed_norm: RmsNorm
    feed_forward_norm: RmsNorm
    feed_forward: FeedForward
    fed_norm: RmsNorm

    def prefill(self, hidden: Tensor, batch: PrefillBatch, state: ModelState) -> Tensor:
        return self._finish(hidden, self.mixer.prefill(self.mixer_norm(hidden), batch, state))

    def decode(self, hidden: Tensor, batch: DecodeBatch, state: ModelState) -> Tensor:
        return self._finish(hidden, self.mixer.decode(self.mixer_norm(hidden), batch, state))

    def _finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden + self.mixed_norm(mixed)
        fed = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + self.fed_norm(fed)


def _load(config: Gemma3Config, manifest: StateManifest, weights: Weights) -> Decoder:
    weights = _text_alone(weights)
    scale = torch.tensor(config.trunk.hidden_dim**0.5, dtype=weights.dtype)
    scales = EndScales(embedding_multiplier=float(scale), logits_cap=config.logits_cap)
    ends = load_ends(weights, config.trunk, "model.norm.weight", scales, norm_origin=1.0)
    return load_decoder(
        config,
        manifest,
        ends,
        weights.under("model.layers"),
        partial(_layer, config),
        norm_origin=1.0,
    )


def _text_alone(weights: Weights) -> Weights:
    """Beside a vision tower the text model's tensors have longer names, in either format."""
    prefixes = {"language_model.": "", "model.language_model.": "model."}
    renamed = {
        short + name.removeprefix(long): stored
        for name, stored in weights.checkpoint.tensors.items()
        for long, short in prefixes.items()
        if name.startswith(long)
    }
    checkpoint = weights.checkpoint
    tensors = {**checkpoint.tensors, **renamed}
    return replace(weights, checkpoint=Checkpoint(checkpoint.folder, tensors))


def _layer(config: Gemma3Config, weights: Weights, place: Place) -> SandwichLayer:
    dim, eps = place.hidden_dim, place.norm_eps
    norm = partial(load_norm, weights, dim=dim, eps=eps, origin=place.norm_origin)
    return SandwichLayer(
        mixer_norm=norm("input_layernorm"),
        mixer=load_attention(weights.under("self_attn"), config.attention[place.layer], place),
        mixed_norm=norm("post_attention_layernorm"),
        feed_forward_norm=norm("pre_feedforward_layernorm"),
        feed_forward=load_gated_mlp(weights.under("mlp"), config.mlp, dim, gelu_tanh),
        fed_norm=norm("post_feedforward_layernorm"),
    )


FAMILY = Family(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _read, _load)
