"""ZAYA: attention behind convolutions, and experts by routers that read the router before.

`convolved_attention.py` has the formulas of the attention, `depth_router.py` those of routers and
sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.convolved_attention import load_convolved_attention
from ferryman.model.layers.decoder import (
    Decoder,
    EmbeddingAndHead,
    EndScales,
    load_decoder,
    load_embedding_and_head,
)
from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.depth_router import (
    DepthRoutedLayer,
    FirstRoutedLayer,
    NormWithoutStates,
    load_depth_routed_layer,
    load_learned_channels,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    read_layers,
    read_trunk,
    read_used,
)
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_rotary_attention,
    with_rope_of,
)
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import HeadConvShape
from ferryman.model.weights.named_weights import Weights

FULL, WINDOW = "hybrid", "hybrid_sliding"
DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "head_dim": 128,
    "num_experts_per_tok": 1,
    "rope_parameters": {
        FULL: {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
        WINDOW: {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
}
"""The meaning of fields that a config leaves out."""

LEGACY = ("zaya_layers", "cca", "zaya_mlp_expansion", "zaya_use_eda")
"""Fields of Zyphra's first layout, which has attention and experts as layers of their own."""


@dataclass(frozen=True, slots=True)
class ZayaConfig:
    """The attention of each layer, behind the same convolutions, and experts in every layer."""

    trunk: TrunkShape
    attentions: tuple[AttentionShape, ...]
    conv: HeadConvShape
    moe: MoeShape
    router_dim: int

    @property
    def states(self) -> tuple[tuple[AttentionShape, HeadConvShape], ...]:
        return tuple((attention, self.conv) for attention in self.attentions)


def read_zaya(fields: ConfigFields) -> ZayaConfig:
    """ZAYA: attention behind convolutions; experts by routers that read the router before."""
    for name in LEGACY:
        if name in fields.raw:
            raise fields.refusal(name, "left out, as in folders in the layout of transformers")
    fields = fields.with_defaults(**DEFAULTS)
    check_activation(fields)
    moe = read_experts(fields)
    if moe.experts_per_token != 1:
        raise fields.refusal("num_experts_per_tok", "1, the one that a router of ZAYA chooses")
    trunk = replace(read_trunk(fields), has_head_bias=fields.flag("lm_head_bias", False))
    return ZayaConfig(
        trunk=trunk,
        attentions=_attentions(fields),
        conv=_conv(fields),
        moe=moe,
        router_dim=fields.whole("router_hidden_size", 256),
    )


def _attentions(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    words = [FULL] * fields.whole("num_hidden_layers")
    readers = {word: partial(_attention, fields, word) for word in (FULL, WINDOW)}
    return read_used(read_layers(fields.with_defaults(layer_types=words), "layer_types", readers))


def _attention(fields: ConfigFields, word: str) -> AttentionShape:
    window_len = fields.whole("sliding_window") if word == WINDOW else 0
    return replace(read_rotary_attention(with_rope_of(fields, word)), window_len=window_len)


def _conv(fields: ConfigFields) -> HeadConvShape:
    plain = read_rotary_attention(with_rope_of(fields, FULL))
    if plain.kv_heads * plain.head_dim % 2:
        raise fields.refusal("head_dim", "such that half the channels of all values are whole")
    return HeadConvShape(
        q_heads=plain.q_heads,
        kv_heads=plain.kv_heads,
        head_dim=plain.head_dim,
        channel_width=fields.whole("cca_time0", 2),
        head_width=fields.whole("cca_time1", 2),
    )


def load_zaya(config: ZayaConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    ends = load_embedding_and_head(weights, config.trunk, "model.norm.weight", EndScales())
    norm = NormWithoutStates(config.trunk.hidden_dim, ends.norm, weights.dtype)
    ends = EmbeddingAndHead(ends.embedding, norm, ends.head, ends.scales)
    model = weights.under("model")
    layer = partial(_layer, config, model)
    return load_decoder(config, manifest, ends, model.under("layers"), layer)


def _layer(
    config: ZayaConfig, model: Weights, weights: Weights, place: LayerPlace
) -> DepthRoutedLayer | FirstRoutedLayer:
    mixer = load_convolved_attention(
        weights.under("self_attn"), config.attentions[place.layer], config.conv, place
    )
    layer = load_depth_routed_layer(weights, place, mixer, config.moe, config.router_dim)
    if place.layer:
        return layer
    entering = load_learned_channels(model, "input_hidden_states", place.hidden_dim)
    return FirstRoutedLayer(entering, layer)
