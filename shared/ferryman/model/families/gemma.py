"""Gemma 1 to 3: two norms a layer, then four; since Gemma 2 windows in some layers.

hidden += norm(attention(norm(hidden)))
hidden += norm(down(gelu(gate) · up)),  gate and up of norm(hidden)

Norms are stored as their distance from one. The embedding's scale, √hidden_dim, is rounded to the
model's dtype. From the folder of a model that also reads images, the text model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    Layer,
    LayerPlace,
    SandwichLayer,
    load_decoder_layer,
    load_norm,
)
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.token_input import rounded
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import (
    GELU,
    check_activation,
    check_flags,
    head_dim_of,
    read_attention,
    read_rotary,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import (
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm, RotaryPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MlpShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.rotary import read_scaling, read_theta
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields, text_weights
from ferryman_kernels.elementwise.activations import gelu_tanh

# The meanings of fields that published configs leave out; null is a value of its own.
DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "hidden_activation": GELU,
}
GEMMA1_DEFAULTS: Mapping[str, Any] = {"head_dim": 256, "tie_word_embeddings": True}
GEMMA2_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "eos_token_id": 1,
}


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


GemmaLayerLoader = Callable[[GemmaConfig, Weights, LayerPlace], Layer]


def read_gemma(config: ConfigFields) -> TransformerConfig:
    """Gemma 1: Llama with a gelu, a scaled embedding, and norms stored as distances from one.

    "gelu" in the first configs means its approximation by a tanh, as all code of Gemma takes it.
    """
    fields = config.with_defaults(**GEMMA1_DEFAULTS)
    check_activation(fields, "hidden_act", (GELU, "gelu"))
    if fields.raw.get("hidden_activation") is not None:
        check_activation(fields, "hidden_activation", (GELU,))
    check_flags(fields, use_bidirectional_attention=False)
    attention = read_rotary_attention(fields)
    return uniform_transformer(read_trunk(fields), attention, read_plain_mlp(fields))


def read_gemma2(whole: ConfigFields) -> GemmaConfig:
    """Gemma 2: Gemma 3 with capped scores, no norms of heads; a window in every other layer."""
    fields = ConfigFields(whole.source, {**GEMMA2_DEFAULTS, **whole.raw})
    plain = read_attention(fields, _scale(fields), read_rotary(fields, default_factor=1.0))
    full = replace(plain, score_cap=fields.not_negative("attn_logit_softcapping", 0.0))
    return _config(fields, read_windows(fields, full, lambda layer: layer % 2 == 0))


def read_vaultgemma(whole: ConfigFields) -> GemmaConfig:
    """VaultGemma: Gemma 2 with a norm before attention and MLP, and none behind."""
    return read_gemma2(whole)


def read_gemma3(whole: ConfigFields) -> GemmaConfig:
    """Gemma 3, its text model: five layers with a window for each full one, four norms a layer.

    Full layers have rotary positions of their own: longer waves, which are often scaled.
    """
    nested = text_fields(whole)
    fields = ConfigFields(nested.source, {**GEMMA3_DEFAULTS, **nested.raw})
    if fields.raw.get("attn_logit_softcapping") is not None:
        raise fields.refusal("attn_logit_softcapping", "null: scores are not capped in Gemma 3")
    plain = read_attention(fields, _scale(fields), positions_of_all(fields))
    full = replace(plain, head_norm=HeadNorm.EACH_HEAD)
    period, near = fields.whole("sliding_window_pattern"), positions_in_window(fields)
    layers = read_windows(fields, full, lambda layer: (layer + 1) % period != 0)
    return _config(
        fields,
        tuple(replace(shape, positions=near) if shape.window_len else shape for shape in layers),
    )


def _scale(fields: ConfigFields) -> float:
    scale: float = fields.positive("query_pre_attn_scalar") ** -0.5
    return scale


def _config(fields: ConfigFields, attention: tuple[AttentionShape, ...]) -> GemmaConfig:
    check_activation(fields, "hidden_activation", (GELU,))
    check_flags(fields, use_bidirectional_attention=False)
    return GemmaConfig(
        trunk=read_trunk(fields),
        attention=attention,
        mlp=read_plain_mlp(fields),
        logits_cap=fields.not_negative("final_logit_softcapping", 0.0),
    )


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


def load_gemma1(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    scales = EndScales(rounded(config.trunk.hidden_dim**0.5, weights))
    return load_transformer(
        replace(config, scales=scales),
        manifest,
        weights,
        feed_forward=_gelu_mlp,
        load_norm=partial(load_norm, origin=1.0),
    )


def _gelu_mlp(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MlpShape):
        raise TypeError(f"Gemma 1 has no experts, but {shape}")
    return load_gated_mlp(weights.under("mlp"), shape, hidden_dim, gelu_tanh)


def load_gemma(
    config: GemmaConfig,
    manifest: StateManifest,
    weights: Weights,
    layer: GemmaLayerLoader | None = None,
) -> Decoder:
    """The decoder whose layers `layer` loads: Gemma 2's and 3's unless it is given."""
    weights = text_weights(weights)
    scales = EndScales(rounded(config.trunk.hidden_dim**0.5, weights), logits_cap=config.logits_cap)
    ends = load_embedding_and_head(
        weights, config.trunk, "model.norm.weight", scales, load_norm=partial(load_norm, origin=1.0)
    )
    layers, load_layer = weights.under("model.layers"), partial(layer or _layer, config)
    return load_decoder(config, manifest, ends, layers, load_layer, norm_origin=1.0)


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


def _layer_without_norms_behind(
    config: GemmaConfig, weights: Weights, place: LayerPlace
) -> DecoderLayer:
    attention = load_attention(weights.under("self_attn"), config.attention[place.layer], place)
    mlp = load_gated_mlp(weights.under("mlp"), config.mlp, place.hidden_dim, gelu_tanh)
    norms = ("input_layernorm", "pre_feedforward_layernorm")
    return load_decoder_layer(weights, place, attention, mlp, norms=norms)


load_vaultgemma = partial(load_gemma, layer=_layer_without_norms_behind)
