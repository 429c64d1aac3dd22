"""Llama, the plain case, and models that are Llama with another part in the attention.

They differ in positions, biases and norms of heads; Llama 4 has experts as well.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.expert_router import sigmoid_of_chosen
from ferryman.model.layers.experts import ShareOfInput
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import ExpertsBesideShared, load_mixture
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_text_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    read_layers,
    read_mlp,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import (
    FULL,
    read_experts,
    read_rotary_attention,
    read_turning_layers,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    HeadNorm,
    NoPositions,
    QueryGrowth,
)
from ferryman.model.shapes.chunks import check_chunks
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    MixtureShape,
    MlpShape,
    SigmoidRouting,
)
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields

CWM_PERIOD = 4
CWM_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "sliding_window": 8192,
    "rope_theta": 1_000_000.0,
}
CHUNKED = "chunked_attention"
LLAMA4_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 500_000.0}
"""The meaning of fields that a config of Llama 4 leaves out."""


def read_llama(fields: ConfigFields) -> TransformerConfig:
    """Llama: rotary grouped-query attention and a gated MLP in every layer. The plain case."""
    check_activation(fields)
    return uniform_transformer(read_trunk(fields), read_rotary_attention(fields), read_mlp(fields))


def read_seed_oss(fields: ConfigFields) -> TransformerConfig:
    """Seed-OSS: Llama with biases on q, k and v, and none where the heads are joined."""
    check_activation(fields)
    attention = replace(
        read_rotary_attention(fields),
        has_bias=fields.flag("attention_bias", True),
        has_out_bias=fields.flag("attention_out_bias", False),
    )
    return uniform_transformer(read_trunk(fields), attention, read_mlp(fields))


def read_smollm3(fields: ConfigFields) -> TransformerConfig:
    """SmolLM 3: Llama without positions in every fourth layer."""
    check_activation(fields)
    trunk = read_trunk(fields)
    full, turns = read_rotary_attention(fields), read_turning_layers(fields)
    layers = (full,) * len(turns)
    if fields.flag("use_sliding_window", False):
        layers = read_windows(fields, full, lambda layer: not turns[layer])
    return TransformerConfig(
        trunk,
        attention=tuple(
            shape if has_positions else replace(shape, positions=NoPositions())
            for shape, has_positions in zip(layers, turns, strict=True)
        ),
        feed_forwards=(read_mlp(fields),) * trunk.num_layers,
    )


def read_cwm(fields: ConfigFields) -> TransformerConfig:
    """CWM (Code World Model): Llama with windows in three of four layers, the first without."""
    fields = fields.with_defaults(**CWM_DEFAULTS)
    check_activation(fields)
    trunk, full = read_trunk(fields), read_rotary_attention(fields)
    return TransformerConfig(
        trunk,
        attention=read_windows(fields, full, lambda layer: layer % CWM_PERIOD != 0),
        feed_forwards=(read_mlp(fields),) * trunk.num_layers,
    )


def read_llama4(whole: ConfigFields) -> TransformerConfig:
    """Llama 4, its text: rotary attention within chunks, some layers without either, and experts.

    Queries and keys in chunks are normed behind the rotation, queries of the other layers grow with
    their position. An expert's share multiplies what goes into it.
    """
    nested = text_fields(whole)
    fields = ConfigFields(nested.source, {**LLAMA4_DEFAULTS, **nested.raw})
    check_activation(fields)
    trunk = read_trunk(fields)
    return TransformerConfig(
        trunk,
        attention=_chunked_attention(fields),
        feed_forwards=_feed_forwards(fields, trunk.num_layers),
    )


def _chunked_attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    full = read_rotary_attention(fields, is_interleaved=True)
    turns = read_turning_layers(fields)
    norms = fields.flag("use_qk_norm", True)
    turning = replace(full, head_norm=HeadNorm.ROTATED_WITHOUT_WEIGHTS if norms else HeadNorm.NONE)
    growing = replace(full, positions=NoPositions(), growth=_growth(fields))
    are_chunked = turns
    if fields.raw.get("layer_types") is not None:
        are_chunked = read_layers(fields, "layer_types", {CHUNKED: True, FULL: False})
    chunk_len = fields.whole("attention_chunk_size", 8192) if any(are_chunked) else 0
    return tuple(
        replace(turning if turn else growing, chunk_len=chunk_len if is_chunked else 0)
        for turn, is_chunked in zip(turns, are_chunked, strict=True)
    )


def _growth(fields: ConfigFields) -> QueryGrowth | None:
    """The first configs have a number instead of true."""
    if not fields.raw.get("attn_temperature_tuning", True):
        return None
    return QueryGrowth(
        fields.not_negative("attn_scale", 0.1), fields.whole("floor_scale", 8192), first=1
    )


def _feed_forwards(fields: ConfigFields, num_layers: int) -> tuple[FeedForwardShape, ...]:
    """Experts in every `interleave_moe_layer_step`-th layer, or in those of "moe_layers"."""
    if fields.raw.get("moe_layers") is None:
        step = fields.whole("interleave_moe_layer_step", 1)
        sparse = set(range(step - 1, num_layers, step))
    else:
        sparse = set(fields.whole_list("moe_layers"))
    return tuple(
        _mixture(fields)
        if layer in sparse
        else MlpShape(fields.whole("intermediate_size_mlp"), has_bias=False)
        for layer in range(num_layers)
    )


def _mixture(fields: ConfigFields) -> MixtureShape:
    experts = read_experts(fields, count="num_local_experts", inner_dim="intermediate_size")
    return MixtureShape(experts, SigmoidRouting(), MlpShape(experts.inner_dim, has_bias=False))


def load_llama4(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    for shape in config.attention:
        check_chunks(shape.chunk_len, manifest.page_size)
    return load_text_transformer(config, manifest, weights, _load_feed_forward)


def _load_feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    inside = weights.under("feed_forward")
    if isinstance(shape, MlpShape):
        return load_gated_mlp(inside, shape, hidden_dim)
    if shape.shared is None:
        raise TypeError("Llama 4 has a shared expert beside the routed ones")
    experts = shape.experts
    score = make_linear(inside.tensor("router.weight", experts.num_experts, hidden_dim))
    routed = load_mixture(
        inside.under("experts"),
        experts,
        hidden_dim,
        sigmoid_of_chosen(score, experts.experts_per_token, SigmoidRouting()),
        weighing=ShareOfInput(),
    )
    shared = load_gated_mlp(inside.under("shared_expert"), shape.shared, hidden_dim)
    return ExpertsBesideShared(routed, shared)
