"""Qwen 3 with experts, and the text of its image models: in most layers experts share a token."""

from __future__ import annotations

from dataclasses import replace

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.text_model import text_fields, text_weights
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_plain_mlp,
    read_rotary_attention,
    read_sparse_layers,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MixtureShape, SoftmaxRouting
from ferryman.model.weights.named_weights import Weights

WITH_IMAGES = "Qwen3VLMoeForConditionalGeneration"


def _read(whole: ConfigFields) -> TransformerConfig:
    fields = text_fields(whole)
    check_activation(fields)
    trunk = read_trunk(fields)
    return TransformerConfig(
        trunk,
        attention=(_attention(fields),) * trunk.num_layers,
        feed_forwards=tuple(_feed_forward(fields, each) for each in read_sparse_layers(fields)),
    )


def _attention(fields: ConfigFields) -> AttentionShape:
    """One shape for all layers: a window in each of them, or in none."""
    slides = fields.flag("use_sliding_window", False)
    window_len = fields.whole("sliding_window") if slides else 0
    plain = read_rotary_attention(fields)
    return replace(plain, head_norm=HeadNorm.EACH_HEAD, window_len=window_len)


def _feed_forward(fields: ConfigFields, is_sparse: bool) -> FeedForwardShape:
    if not is_sparse:
        return read_plain_mlp(fields)
    has_images = WITH_IMAGES in fields.words("architectures")
    sums_to_one = fields.flag("norm_topk_prob", has_images)
    if has_images and not sums_to_one:
        raise fields.refusal("norm_topk_prob", "true")
    routing = SoftmaxRouting(sums_to_one)
    # transformers 5 writes num_local_experts.
    count = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
    return MixtureShape(read_experts(fields, count=count), routing)


def _load(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_transformer(config, manifest, text_weights(weights))


FAMILY = Family(("Qwen3MoeForCausalLM", WITH_IMAGES), _read, _load)
