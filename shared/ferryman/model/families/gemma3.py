"""Gemma 3, its text model: five layers with a window for each full one, four norms a layer.

hidden += norm(attention(norm(hidden)))
hidden += norm(down(gelu(gate) · up)),  gate and up of norm(hidden)

Norms are stored as their distance from one. The embedding's scale, √hidden_dim, is rounded to the
model's dtype. From the folder of a model that also reads images, the text model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    LayerPlace,
    SandwichLayer,
    gelu_tanh,
    load_gated_mlp,
    load_norm,
)
from ferryman.model.readers.config_readers import (
    GELU,
    check_activation,
    head_dim_of,
    read_attention,
    read_layers,
    read_trunk,
)
from ferryman.model.readers.text_model import text_fields, text_weights
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm, RotaryPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.rotary import read_scaling, read_theta
from ferryman.model.weights.named_weights import Weights

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
"""The meaning of fields that a published config leaves out."""


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """One attention and one MLP a layer."""

    trunk: TrunkShape
    attention: tuple[AttentionShape, ...]
    mlp: MlpShape
    logits_cap: float

    @property
    def states(self) -> tuple[tuple[AttentionShape], ...]:
        return tuple((attention,) for attention in self.attention)


def _read(whole: ConfigFields) -> GemmaConfig:
    nested = text_fields(whole)
    fields = ConfigFields(nested.source, {**DEFAULTS, **nested.raw})
    check_activation(fields, "hidden_activation", (GELU,))
    if fields.raw.get("attn_logit_softcapping") is not None:
        raise fields.refusal("attn_logit_softcapping", "null: scores are not capped in Gemma 3")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.refusal("use_bidirectional_attention", "false")
    return GemmaConfig(
        trunk=read_trunk(fields),
        attention=_read_attention(fields),
        mlp=MlpShape(fields.whole("intermediate_size"), has_bias=False),
        logits_cap=fields.not_negative("final_logit_softcapping", 0.0),
    )


def _read_attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    """Full layers have rotary positions of their own: longer waves, which are often scaled."""
    scale = fields.positive("query_pre_attn_scalar") ** -0.5
    shape = replace(
        read_attention(fields, scale, positions_of_all(fields)), head_norm=HeadNorm.EACH_HEAD
    )
    window = replace(
        shape, window_len=fields.whole("sliding_window"), positions=positions_in_window(fields)
    )
    if fields.raw.get("layer_types"):
        meanings = {"full_attention": shape, "sliding_attention": window}
        return read_layers(fields, "layer_types", meanings)
    period, num_layers = fields.whole("sliding_window_pattern"), fields.whole("num_hidden_layers")
    return tuple(window if index % period else shape for index in range(1, num_layers + 1))


def positions_of_all(fields: ConfigFields) -> RotaryPositions:
    name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    rope = fields.merged_with(name).merged_with("full_attention")
    theta = read_theta(rope, 1_000_000.0)
    return RotaryPositions(theta, head_dim_of(fields), read_scaling(rope))


def positions_in_window(fields: ConfigFields) -> RotaryPositions:
    """The positions of window layers: they share no field with those of full layers."""
    theta = read_theta(fields, 10_000.0, "rope_local_base_freq")
    bare = {name: fields.raw.get(name) for name in ("rope_parameters", "max_position_embeddings")}
    rope = (
        ConfigFields(fields.source, bare)
        .merged_with("rope_parameters")
        .merged_with("sliding_attention")
    )
    theta = read_theta(rope, theta)
    return RotaryPositions(theta, head_dim_of(fields), read_scaling(rope))


def load_gemma(config: GemmaConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    weights = text_weights(weights)
    scale = torch.tensor(config.trunk.hidden_dim**0.5, dtype=weights.dtype)
    scales = EndScales(embedding_multiplier=float(scale), logits_cap=config.logits_cap)
    ends = load_embedding_and_head(
        weights, config.trunk, "model.norm.weight", scales, load_norm=partial(load_norm, origin=1.0)
    )
    return load_decoder(
        config,
        manifest,
        ends,
        weights.under("model.layers"),
        partial(_layer, config),
        norm_origin=1.0,
    )


def _layer(config: GemmaConfig, weights: Weights, place: LayerPlace) -> SandwichLayer:
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


FAMILY = Family(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _read, load_gemma)
