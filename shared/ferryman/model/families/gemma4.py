"""Gemma 4, its text: Gemma 3 with normed values, heads of two sizes, and pages read by many layers.

hidden += norm(attention(norm(hidden)))
hidden += norm(mlp(norm(hidden)))            (with experts: norm(norm(mlp) + norm(experts)))
hidden += what the layer's own input of the token adds (small models)
hidden *= a number of the layer

Keys, values and queries are normed by head, and scores are not scaled. In full layers some waves
alone turn, and values may be the keys. The last layers of small models read the pages of the last
layer of their kind before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder import (
    Decoder,
    EmbeddingAndHead,
    EndScales,
    load_decoder,
    load_embedding_and_head,
)
from ferryman.model.layers.decoder_layers import (
    FeedForward,
    Layer,
    LayerPlace,
    Mixer,
    Norm,
    SandwichLayer,
    load_norm,
)
from ferryman.model.layers.earlier_pages import load_earlier_pages_attention
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import load_normed_mixture
from ferryman.model.layers.token_input import (
    TokenGatedLayer,
    TokenInputShape,
    load_token_gate,
    rounded,
)
from ferryman.model.readers.config_readers import (
    GELU,
    check_activation,
    read_attention,
    read_layers,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import FULL, WINDOW, read_experts
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    HeadNorm,
    RotaryPositions,
    ValueSource,
)
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape, MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.rotary import ProportionalScaling, read_scaling, read_theta
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields, text_weights
from ferryman_kernels.elementwise.activations import gelu_tanh

DEFAULTS: Mapping[str, Any] = {"tie_word_embeddings": True, "hidden_activation": GELU}
"""The meaning of fields that a published config leaves out."""
UNIFIED = frozenset({"Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"})
"""Models without towers for images and sound; their text is dense and has no inputs of layers."""
UNIFIED_DEFAULTS = {**DEFAULTS, "hidden_size_per_layer_input": 0, "sliding_window": 1024}


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """One attention and one MLP a layer.

    `sources` has for each layer the one whose keys and values it reads: its own, or an earlier
    one. `experts` is None for a dense model, `token_input` where tokens have no input of a layer.
    """

    trunk: TrunkShape
    attention: tuple[AttentionShape, ...]
    sources: tuple[int, ...]
    mlps: tuple[MlpShape, ...]
    experts: MoeShape | None
    token_input: TokenInputShape | None
    logits_cap: float

    @property
    def states(self) -> tuple[tuple[AttentionShape, ...], ...]:
        return kept_states(self.attention, self.sources)


def read_gemma4(whole: ConfigFields) -> Gemma4Config:
    nested = text_fields(whole)
    defaults = UNIFIED_DEFAULTS if UNIFIED & set(whole.words("architectures")) else DEFAULTS
    fields = ConfigFields(nested.source, {**defaults, **nested.raw})
    check_activation(fields, "hidden_activation", (GELU,))
    if fields.raw.get("use_bidirectional_attention") not in (None, "vision"):
        raise fields.refusal("use_bidirectional_attention", "null or 'vision': text is causal")
    # The last layer is always full.
    trunk, are_windows = read_trunk(fields), (*read_window_layers(fields, 6)[:-1], False)
    sources = read_sources(fields, are_windows)
    return Gemma4Config(
        trunk=trunk,
        attention=tuple(
            _read_attention(fields, layer, is_window=is_window)
            for layer, is_window in enumerate(are_windows)
        ),
        sources=sources,
        mlps=_read_mlps(fields, sources),
        experts=_read_experts(fields) if fields.flag("enable_moe_block", False) else None,
        token_input=_read_token_input(fields),
        logits_cap=fields.not_negative("final_logit_softcapping", 0.0),
    )


def read_window_layers(fields: ConfigFields, period: int) -> tuple[bool, ...]:
    """True for layers with windows. Without a list every `period`-th layer is full."""
    if fields.raw.get("layer_types") is not None:
        return read_layers(fields, "layer_types", {WINDOW: True, FULL: False})
    return tuple((layer + 1) % period != 0 for layer in range(fields.whole("num_hidden_layers")))


def read_sources(fields: ConfigFields, are_windows: tuple[bool, ...]) -> tuple[int, ...]:
    """For each layer the one whose pages it reads: the last "num_kv_shared_layers" read those of
    the last layer of their kind before them all."""
    num_own = len(are_windows) - fields.whole("num_kv_shared_layers", 0, least=0)
    last = {is_window: layer for layer, is_window in enumerate(are_windows[: max(num_own, 0)])}
    if not set(are_windows) <= set(last):
        raise fields.refusal("num_kv_shared_layers", "such that layers of each type keep pages")
    return (*range(num_own), *(last[is_window] for is_window in are_windows[num_own:]))


def kept_states(
    attention: Sequence[AttentionShape], sources: Sequence[int]
) -> tuple[tuple[AttentionShape, ...], ...]:
    """The state of each layer; those that read the pages of others keep none."""
    return tuple(
        (shape,) if source == layer else ()
        for layer, (shape, source) in enumerate(zip(attention, sources, strict=True))
    )


def _read_attention(fields: ConfigFields, layer: int, *, is_window: bool) -> AttentionShape:
    own, kind = _fields_of_layer(fields, layer, is_window=is_window), FULL
    values = ValueSource.NORMED
    if is_window:
        kind = WINDOW
    elif fields.flag("attention_k_eq_v", False):
        values = ValueSource.NORMED_KEYS
    plain = read_attention(own, 1.0, _positions(own, kind))
    window_len = fields.whole("sliding_window") if is_window else 0
    return replace(plain, head_norm=HeadNorm.EACH_HEAD, values=values, window_len=window_len)


def _fields_of_layer(fields: ConfigFields, layer: int, *, is_window: bool) -> ConfigFields:
    """Heads of full layers are described by fields of their own: published configs have "global_…",
    transformers writes "per_layer_config", by the layer's number."""
    if fields.raw.get("per_layer_config") is not None:
        own = fields.inner("per_layer_config").inner(str(layer))
        return ConfigFields(fields.source, {**fields.raw, **own.raw})
    if is_window:
        return fields
    heads = {"head_dim": fields.whole("global_head_dim", 512)}
    if fields.flag("attention_k_eq_v", False):
        kv_heads = fields.whole("num_key_value_heads")
        heads["num_key_value_heads"] = fields.whole("num_global_key_value_heads", kv_heads)
    return ConfigFields(fields.source, {**fields.raw, **heads})


def _positions(fields: ConfigFields, kind: str) -> RotaryPositions:
    """Both kinds of layers have waves over whole heads; "proportional" ones stand still in part."""
    rope, head_dim = fields.inner("rope_parameters").inner(kind), fields.whole("head_dim")
    theta = read_theta(rope, 10_000.0 if kind == WINDOW else 1_000_000.0)
    if rope.raw.get("rope_type", "default" if kind == WINDOW else "proportional") != "proportional":
        context = {"max_position_embeddings": fields.raw.get("max_position_embeddings")}
        scaled = ConfigFields(rope.source, {**context, **rope.raw})
        return RotaryPositions(theta, head_dim, read_scaling(scaled))
    share = rope.positive("partial_rotary_factor", 1.0 if rope.raw else 0.25)
    if share > 1.0:
        raise rope.refusal("partial_rotary_factor", "at most 1")
    turning = ProportionalScaling(int(share * head_dim // 2), rope.positive("factor", 1.0))
    return RotaryPositions(theta, head_dim, turning)


def _read_mlps(fields: ConfigFields, sources: tuple[int, ...]) -> tuple[MlpShape, ...]:
    """Layers that read the pages of others may have MLPs twice as wide."""
    inner_dim = fields.whole("intermediate_size")
    wide_dim = inner_dim * (2 if fields.flag("use_double_wide_mlp", False) else 1)
    return tuple(
        MlpShape(inner_dim if source == layer else wide_dim, has_bias=False)
        for layer, source in enumerate(sources)
    )


def _read_experts(fields: ConfigFields) -> MoeShape:
    return read_experts(fields.with_former(num_experts_per_tok="top_k_experts"))


def _read_token_input(fields: ConfigFields) -> TokenInputShape | None:
    dim = fields.whole("hidden_size_per_layer_input", 256, least=0)
    return TokenInputShape(fields.whole("vocab_size_per_layer_input"), dim) if dim else None


@dataclass(frozen=True, slots=True)
class ScaledLayer:
    """A layer whose hidden states are multiplied by one number, `scale` [1]."""

    inner: Layer
    scale: Tensor

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        return self.inner.forward(hidden, batch, state) * self.scale


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def load_gemma4(config: Gemma4Config, manifest: StateManifest, weights: Weights) -> Decoder:
    weights = text_weights(weights)
    scales = EndScales(rounded(config.trunk.hidden_dim**0.5, weights), logits_cap=config.logits_cap)
    ends = load_embedding_and_head(weights, config.trunk, "model.norm.weight", scales)
    model = weights.under("model")
    layer = partial(_layer, config, model, ends)
    return load_decoder(config, manifest, ends, model.under("layers"), layer)


def _layer(
    config: Gemma4Config,
    model: Weights,
    ends: EmbeddingAndHead,
    weights: Weights,
    place: LayerPlace,
) -> Layer:
    norm = partial(load_norm, weights, dim=place.hidden_dim, eps=place.norm_eps)
    shape, source = config.attention[place.layer], config.sources[place.layer]
    before, fed = _feed_forward(config, weights, place)
    layer: Layer = SandwichLayer(
        mixer_norm=norm("input_layernorm"),
        mixer=load_attention_of(weights.under("self_attn"), shape, place, source),
        mixed_norm=norm("post_attention_layernorm"),
        feed_forward_norm=before,
        feed_forward=fed,
        fed_norm=norm("post_feedforward_layernorm"),
    )
    if config.token_input is not None:
        gate = load_token_gate(
            model, weights, ends, config.token_input, place, config.trunk.num_layers
        )
        layer = TokenGatedLayer(layer, gate)
    return ScaledLayer(layer, weights.tensor("layer_scalar", 1))


def _feed_forward(
    config: Gemma4Config, weights: Weights, place: LayerPlace
) -> tuple[Norm, FeedForward]:
    """The feed-forward and the norm before it: a mixture norms its parts' inputs itself."""
    norm = load_norm(weights, "pre_feedforward_layernorm", place.hidden_dim, place.norm_eps)
    shape = config.mlps[place.layer]
    mlp = load_gated_mlp(weights.under("mlp"), shape, place.hidden_dim, gelu_tanh)
    if config.experts is None:
        return norm, mlp
    return _as_it_is, load_normed_mixture(weights, config.experts, place, norm, mlp)


def load_attention_of(
    weights: Weights, shape: AttentionShape, place: LayerPlace, source: int
) -> Mixer:
    """Attention to the pages of the layer `source`: its own, or those of an earlier one."""
    if source == place.layer:
        return load_attention(weights, shape, place)
    return load_earlier_pages_attention(weights, shape, place, source)
