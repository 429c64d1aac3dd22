"""Qwen 2 and 2.5, dense, and the text of their image models: Llama with biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.text_model import text_fields, text_weights
from ferryman.model.readers.transformer_readers import (
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.named_weights import Weights


def _read(whole: ConfigFields) -> TransformerConfig:
    fields = text_fields(whole)
    check_activation(fields)
    trunk = read_trunk(fields)
    plain = read_rotary_attention(fields)
    return TransformerConfig(
        trunk,
        attention=read_qwen_windows(fields, replace(plain, has_bias=True, has_out_bias=False)),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
    )


def read_qwen_windows(fields: ConfigFields, full: AttentionShape) -> tuple[AttentionShape, ...]:
    """Windows if "use_sliding_window" is true: from layer "max_window_layers" on if the config does
    not name each layer's type."""
    if not fields.flag("use_sliding_window", False):
        return (full,) * fields.whole("num_hidden_layers")

    def is_window(layer: int) -> bool:
        return layer >= fields.whole("max_window_layers", 28, least=0)

    return read_windows(fields, full, is_window)


def _load(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_transformer(config, manifest, text_weights(weights))


FAMILY = Family(
    (
        "Qwen2ForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    ),
    _read,
    _load,
)
