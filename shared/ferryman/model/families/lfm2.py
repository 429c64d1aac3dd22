"""LFM2: short convolutions, some layers of attention with normed heads, a gated MLP in every layer.

hidden += mixer(operator_norm(hidden))
hidden += w2(silu(w1(x)) · w3(x)),  x = ffn_norm(hidden)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    Mixer,
    load_gated_mlp,
    load_norm,
)
from ferryman.model.layers.short_conv import load_short_conv
from ferryman.model.readers.config_readers import (
    head_dim_of,
    read_attention,
    read_layers,
    read_rotary,
    read_trunk,
    read_used,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.model_shapes import ModelConfig, TrunkShape
from ferryman.model.shapes.recurrent_shapes import ShortConvShape
from ferryman.model.weights.named_weights import Weights

Operator = AttentionShape | ShortConvShape

# This family's words for parts of a tensor's name.
_NAMES: Mapping[str, str] = {
    "o_proj": "out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
_THETA = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Lfm2Config:
    """One operator a layer, and one MLP shape for all."""

    trunk: TrunkShape
    operators: tuple[Operator, ...]
    mlp: MlpShape

    @property
    def states(self) -> tuple[tuple[Operator], ...]:
        return tuple((operator,) for operator in self.operators)


def _read(fields: ConfigFields) -> Lfm2Config:
    fields = with_lfm2_names(fields)
    return Lfm2Config(read_lfm2_trunk(fields), read_operators(fields), _mlp(fields))


def with_lfm2_names(fields: ConfigFields) -> ConfigFields:
    """The fields by their present names; of two, the former counts. Defaults as in transformers."""
    former = {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"}
    given = {name: fields.raw[old] for name, old in former.items() if old in fields.raw}
    named = replace(fields, raw={**fields.raw, **given})
    return named.with_defaults(rope_theta=_THETA, tie_word_embeddings=True)


def read_lfm2_trunk(fields: ConfigFields) -> TrunkShape:
    return read_trunk(fields, norm_eps="norm_eps")


def read_operators(fields: ConfigFields) -> tuple[Operator, ...]:
    """The operators by "layer_types", or attention in the layers that "full_attn_idxs" lists."""
    attention, conv = partial(_attention, fields), partial(_short_conv, fields)
    readers: dict[str, Callable[[], Operator]] = {"full_attention": attention, "conv": conv}
    if fields.raw.get("layer_types") is not None:
        return read_used(read_layers(fields, "layer_types", readers))
    indices, num_layers = fields.whole_list("full_attn_idxs"), fields.whole("num_hidden_layers")
    if "full_attn_idxs" not in fields.raw or any(index >= num_layers for index in indices):
        raise fields.refusal("full_attn_idxs", f"a list of layer indices below {num_layers}")
    return read_used([attention if i in indices else conv for i in range(num_layers)])


def _attention(fields: ConfigFields) -> AttentionShape:
    positions = read_rotary(fields, default_factor=1.0)
    plain = read_attention(fields, head_dim_of(fields) ** -0.5, positions)
    return replace(plain, head_norm=HeadNorm.EACH_HEAD, has_bias=False)


def _short_conv(fields: ConfigFields) -> ShortConvShape:
    return ShortConvShape(
        dim=fields.whole("hidden_size"),
        conv_width=fields.whole("conv_L_cache", 3, least=2),
        has_bias=fields.flag("conv_bias", False),
    )


def _mlp(fields: ConfigFields) -> MlpShape:
    """Two thirds of `intermediate_size`, times a factor, rounded up to a multiple; or just that."""
    inner_dim = fields.whole("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return MlpShape(inner_dim, has_bias=False)
    factor, multiple = (
        fields.positive("block_ffn_dim_multiplier", 1.0),
        fields.whole("block_multiple_of", 256),
    )
    scaled = int(factor * int(2 * inner_dim / 3))
    return MlpShape(-(-scaled // multiple) * multiple, has_bias=False)


def load_lfm2(
    config: ModelConfig,
    manifest: StateManifest,
    weights: Weights,
    load_layer: Callable[[Weights, LayerPlace], DecoderLayer],
) -> Decoder:
    """The decoder with layers made by `load_layer`, from weights by the loaders' names."""
    ends = load_embedding_and_head(
        weights, config.trunk, "model.embedding_norm.weight", EndScales()
    )
    return load_decoder(
        config, manifest, ends, weights.called(_NAMES).under("model.layers"), load_layer
    )


def load_lfm2_layer(
    weights: Weights, place: LayerPlace, operator: Operator, feed_forward: FeedForward
) -> DecoderLayer:
    dim, eps = place.hidden_dim, place.norm_eps
    return DecoderLayer(
        mixer_norm=load_norm(weights, "operator_norm", dim, eps),
        mixer=_operator(weights, operator, place),
        feed_forward_norm=load_norm(weights, "ffn_norm", dim, eps),
        feed_forward=feed_forward,
    )


def _operator(weights: Weights, shape: Operator, place: LayerPlace) -> Mixer:
    if isinstance(shape, AttentionShape):
        return load_attention(weights.under("self_attn"), shape, place)
    return load_short_conv(weights.under("conv"), shape, place)


def _load(config: Lfm2Config, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_lfm2(config, manifest, weights, partial(_layer, config))


def _layer(config: Lfm2Config, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mlp = load_gated_mlp(weights.under("feed_forward"), config.mlp, place.hidden_dim)
    return load_lfm2_layer(weights, place, config.operators[place.layer], mlp)


FAMILY = Family(("Lfm2ForCausalLM",), _read, _load)
