"""Gemma 3n, its text: four streams of hidden states, and pages that the last layers all read.

`hidden_streams.py` has the formulas of a layer and of the streams.
In sparse layers the MLP's gate keeps the channels that are far above the mean of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.gemma import positions_in_window, positions_of_all
from ferryman.model.families.gemma4 import (
    kept_states,
    load_attention_of,
    read_sources,
    read_window_layers,
)
from ferryman.model.layers.decoder import (
    Decoder,
    EmbeddingAndHead,
    EndScales,
    load_decoder,
    load_embedding_and_head,
)
from ferryman.model.layers.decoder_layers import FeedForward, Layer, LayerPlace, load_norm
from ferryman.model.layers.hidden_streams import (
    JoinedStreamsNorm,
    ProjectedStreams,
    SpreadLayer,
    StreamsLayer,
    StreamsShape,
    load_alternating_updates,
    load_low_rank_residual,
    load_projections,
)
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.token_input import TokenGate, TokenInputShape, load_token_gate, rounded
from ferryman.model.readers.config_readers import (
    GELU,
    check_activation,
    read_attention,
    read_trunk,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm, ValueSource
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.ranks import SINGLE_RANK
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman.model.weights.text_model import text_fields, text_weights
from ferryman_kernels.elementwise.activations import gelu_tanh

DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "hidden_activation": GELU,
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 15,
}
"""The meaning of fields that a published config leaves out."""


@dataclass(frozen=True, slots=True)
class Gemma3nConfig:
    """One attention and one MLP a layer; `sources` as in Gemma4Config.

    `sparsities` has for each layer the share of its gate's channels that a normal distribution
    would leave at 0 (0: the layer is not sparse).
    """

    trunk: TrunkShape
    attention: tuple[AttentionShape, ...]
    sources: tuple[int, ...]
    mlps: tuple[MlpShape, ...]
    sparsities: tuple[float, ...]
    token_input: TokenInputShape
    streams: StreamsShape
    low_rank: int
    logits_cap: float

    @property
    def states(self) -> tuple[tuple[AttentionShape, ...], ...]:
        return kept_states(self.attention, self.sources)


def read_gemma3n(whole: ConfigFields) -> Gemma3nConfig:
    nested = text_fields(whole)
    fields = ConfigFields(nested.source, {**DEFAULTS, **nested.raw})
    check_activation(fields, "hidden_activation", (GELU,))
    are_windows = read_window_layers(fields, 5)
    return Gemma3nConfig(
        trunk=read_trunk(fields),
        attention=_read_attention(fields, are_windows),
        sources=read_sources(fields, are_windows),
        mlps=_read_mlps(fields),
        sparsities=_read_sparsities(fields),
        token_input=TokenInputShape(
            fields.whole("vocab_size_per_layer_input", 262_144),
            fields.whole("hidden_size_per_layer_input", 256),
        ),
        streams=_read_streams(fields),
        low_rank=fields.whole("laurel_rank", 64),
        logits_cap=fields.not_negative("final_logit_softcapping", 0.0),
    )


def _read_attention(
    fields: ConfigFields, are_windows: tuple[bool, ...]
) -> tuple[AttentionShape, ...]:
    full = replace(
        read_attention(fields, 1.0, positions_of_all(fields)),
        head_norm=HeadNorm.EACH_HEAD,
        values=ValueSource.NORMED,
    )
    positions, window_len = positions_in_window(fields), fields.whole("sliding_window", 512)
    window = replace(full, window_len=window_len, positions=positions)
    return tuple(window if is_window else full for is_window in are_windows)


def _read_mlps(fields: ConfigFields) -> tuple[MlpShape, ...]:
    """One width for all layers, or a list with the width of each."""
    num_layers = fields.whole("num_hidden_layers")
    if not isinstance(fields.raw.get("intermediate_size"), list):
        return (MlpShape(fields.whole("intermediate_size"), has_bias=False),) * num_layers
    widths = fields.whole_list("intermediate_size")
    if len(widths) != num_layers or 0 in widths:
        raise fields.refusal("intermediate_size", f"a list of {num_layers} widths, or one width")
    return tuple(MlpShape(width, has_bias=False) for width in widths)


def _read_sparsities(fields: ConfigFields) -> tuple[float, ...]:
    """Without a list the first ten layers of a deeper model are sparse."""
    name, num_layers = "activation_sparsity_pattern", fields.whole("num_hidden_layers")
    found = fields.raw.get(name)
    if found is None:
        num_sparse = 10 if num_layers > 10 else 0
        return (0.95,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    if not isinstance(found, list) or len(found) != num_layers or not all(map(_is_share, found)):
        raise fields.refusal(name, f"a list of {num_layers} numbers from 0 to below 1")
    return tuple(map(float, found))


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _read_streams(fields: ConfigFields) -> StreamsShape:
    count, active = (
        fields.whole("altup_num_inputs", 4),
        fields.whole("altup_active_idx", 0, least=0),
    )
    if active >= count:
        raise fields.refusal("altup_active_idx", f"less than altup_num_inputs {count}")
    return StreamsShape(count, active, fields.flag("altup_correct_scale", True))


@dataclass(frozen=True, slots=True)
class SparseGelu:
    """gelu of what lies above mean + `deviations` · standard deviation of a gate's channels.

    It takes all channels [tokens, inner_dim] of a gate.
    """

    deviations: float

    def __call__(self, gate: Tensor) -> Tensor:
        wide = gate.to(accumulation_dtype(gate.dtype))
        mean = wide.mean(-1, keepdim=True)
        # torch's std of one row has other bits than that of several.
        spread = (wide - mean).square_().mean(-1, keepdim=True).sqrt_()
        cutoff = mean.to(gate.dtype) + spread.to(gate.dtype) * self.deviations
        return gelu_tanh((gate - cutoff).relu())


def load_gemma3n(config: Gemma3nConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    weights, dim = text_weights(weights), config.trunk.hidden_dim
    scales = EndScales(rounded(dim**0.5, weights), logits_cap=config.logits_cap)
    ends = load_embedding_and_head(weights, config.trunk, "model.norm.weight", scales)
    model = weights.under("model")
    joined = load_projections(model, "altup_unembed_projections", config.streams, dim)
    layer = partial(_layer, config, model, ends)
    streamed = replace(ends, norm=JoinedStreamsNorm(joined, ends.norm))
    return load_decoder(config, manifest, streamed, model.under("layers"), layer)


def _layer(
    config: Gemma3nConfig,
    model: Weights,
    ends: EmbeddingAndHead,
    weights: Weights,
    place: LayerPlace,
) -> Layer:
    dim, eps = place.hidden_dim, place.norm_eps
    norm = partial(load_norm, weights, dim=dim, eps=eps)
    shape, source = config.attention[place.layer], config.sources[place.layer]
    layer = StreamsLayer(
        updates=load_alternating_updates(weights.under("altup"), config.streams, dim, eps),
        residual=load_low_rank_residual(weights.under("laurel"), config.low_rank, place),
        mixer_norm=norm("input_layernorm"),
        mixer=load_attention_of(weights.under("self_attn"), shape, place, source),
        mixed_norm=norm("post_attention_layernorm"),
        feed_forward_norm=norm("pre_feedforward_layernorm"),
        feed_forward=_feed_forward(config, weights.under("mlp"), place),
        fed_norm=norm("post_feedforward_layernorm"),
        gate=_gate(config, model, ends, weights, place),
    )
    if place.layer > 0:
        return layer
    others = load_projections(model, "altup_projections", config.streams, dim)
    return SpreadLayer(ProjectedStreams(others), layer)


def _feed_forward(config: Gemma3nConfig, weights: Weights, place: LayerPlace) -> FeedForward:
    """A sparse MLP is computed whole by every rank: its cutoff depends on all channels."""
    shape, sparsity = config.mlps[place.layer], config.sparsities[place.layer]
    if not sparsity:
        return load_gated_mlp(weights, shape, place.hidden_dim, gelu_tanh)
    act = SparseGelu(NormalDist().inv_cdf(sparsity))
    return load_gated_mlp(replace(weights, group=SINGLE_RANK), shape, place.hidden_dim, act)


def _gate(
    config: Gemma3nConfig,
    model: Weights,
    ends: EmbeddingAndHead,
    weights: Weights,
    place: LayerPlace,
) -> TokenGate:
    """The scale of the corrected stream goes into the gate: into weights in floats, and before
    the product with weights in codes."""
    if config.streams.scales_output:
        scale = weights.precise("altup.correct_output_scale", place.hidden_dim)
        weights = weights.scaled({"per_layer_input_gate.weight": scale})
    num_layers = config.trunk.num_layers
    return load_token_gate(model, weights, ends, config.token_input, place, num_layers)
