"""Mellum and Flint: the attention and experts of Qwen 3, with windows and other routing."""

from __future__ import annotations

from dataclasses import replace

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_layers, read_trunk
from ferryman.model.readers.transformer_readers import (
    FULL,
    WINDOW,
    read_experts,
    read_mlp_types,
    read_plain_mlp,
    read_rotary_attention,
    read_sparse_layers,
    read_windows,
    with_rope_of,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    MixtureShape,
    MlpShape,
    SigmoidRouting,
    SoftmaxRouting,
)
from ferryman.model.weights.named_weights import Weights

MELLUM_DEFAULTS = {
    "head_dim": 128,
    "sliding_window": 1024,
    "rope_parameters": {FULL: {"rope_theta": 500_000.0}, WINDOW: {"rope_theta": 10_000.0}},
}
FLINT_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "sliding_window": 513,
    "shared_expert_intermediate_size": 1024,
}
FLINT_PERIOD, FLINT_DENSE = 4, (0, 1)
"""Layers with full attention, and the layers without experts, where a config does not say."""


def read_mellum(fields: ConfigFields) -> TransformerConfig:
    """Mellum: Qwen 3 with experts, in windows or not, each kind with waves of its own."""
    fields = fields.with_defaults(**MELLUM_DEFAULTS)
    check_activation(fields)
    mixture = MixtureShape(
        # transformers 5 writes num_local_experts.
        read_experts(fields.with_former(num_experts="num_local_experts")),
        SoftmaxRouting(fields.flag("norm_topk_prob", True)),
    )
    return TransformerConfig(
        read_trunk(fields),
        attention=_mellum_attention(fields),
        feed_forwards=tuple(
            mixture if is_sparse else read_plain_mlp(fields)
            for is_sparse in read_mlp_types(fields, 0)
        ),
    )


def _mellum_attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    full, turning = (
        replace(read_rotary_attention(with_rope_of(fields, word)), head_norm=HeadNorm.EACH_HEAD)
        for word in (FULL, WINDOW)
    )
    window = replace(turning, window_len=fields.whole("sliding_window"))
    words = fields.with_defaults(layer_types=[FULL] * fields.whole("num_hidden_layers"))
    return read_layers(words, "layer_types", {FULL: full, WINDOW: window})


def read_flint(fields: ConfigFields) -> TransformerConfig:
    """Flint: Qwen 3's heads with sinks, positions in windows alone; experts by sigmoids."""
    fields = fields.with_defaults(**FLINT_DEFAULTS, mlp_only_layers=list(FLINT_DENSE))
    check_activation(fields)
    return TransformerConfig(
        read_trunk(fields),
        attention=_flint_attention(fields),
        feed_forwards=tuple(
            _flint_mixture(fields) if is_sparse else read_plain_mlp(fields)
            for is_sparse in read_sparse_layers(fields)
        ),
    )


def _flint_attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    last = fields.whole("num_hidden_layers") - 1
    turning = replace(read_rotary_attention(fields), head_norm=HeadNorm.EACH_HEAD, has_sinks=True)

    def is_window(layer: int) -> bool:
        return layer > 1 and layer % FLINT_PERIOD != 1 and layer != last

    return tuple(
        shape if shape.window_len else replace(shape, positions=NoPositions())
        for shape in read_windows(fields, turning, is_window)
    )


def _flint_mixture(fields: ConfigFields) -> FeedForwardShape:
    shared = MlpShape(fields.whole("shared_expert_intermediate_size"), has_bias=False)
    routing = SigmoidRouting(fields.flag("norm_topk_prob", True))
    return MixtureShape(read_experts(fields), routing, shared)


def load_flint(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_transformer(config, manifest, weights.called({"shared_experts": "shared_expert"}))
