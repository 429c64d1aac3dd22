"""Qwen 1.5 to 3, dense or with experts, and the text of their image models.

Qwen 2 has biases on q, k and v; Qwen 3 has a norm on each head of q and k instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ferryman.model.layers.transformer import TransformerConfig
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_plain_mlp,
    read_rotary_attention,
    read_sparse_layers,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    MixtureShape,
    MlpShape,
    SoftmaxRouting,
)
from ferryman.model.weights.text_model import text_fields

MOE_WITH_IMAGES = "Qwen3VLMoeForConditionalGeneration"


def read_qwen2(whole: ConfigFields) -> TransformerConfig:
    """Qwen 2 and 2.5, dense, and the text of their image models: Llama with biases on q, k, v."""
    fields = text_fields(whole)
    return _dense(fields, replace(read_rotary_attention(fields), has_bias=True, has_out_bias=False))


def read_qwen3(whole: ConfigFields) -> TransformerConfig:
    """Qwen 3, dense, and the text of its image models: Llama with a norm on each head of q, k."""
    fields = text_fields(whole)
    return _dense(fields, replace(read_rotary_attention(fields), head_norm=HeadNorm.EACH_HEAD))


def _dense(fields: ConfigFields, full: AttentionShape) -> TransformerConfig:
    """A gated MLP in every layer. Windows are in the layers from "max_window_layers" on."""
    check_activation(fields)
    trunk = read_trunk(fields)
    return TransformerConfig(
        trunk,
        attention=_windows(fields, full, lambda layer, bound: layer >= bound),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
    )


def _windows(
    fields: ConfigFields, full: AttentionShape, is_window: Callable[[int, int], bool]
) -> tuple[AttentionShape, ...]:
    """Windows if "use_sliding_window" is true: where `is_window`, of a layer and
    "max_window_layers", says so if the config does not name each layer's type."""
    if not fields.flag("use_sliding_window", False):
        return (full,) * fields.whole("num_hidden_layers")
    return read_windows(
        fields,
        full,
        lambda layer: is_window(layer, fields.whole("max_window_layers", 28, least=0)),
    )


def read_qwen2_moe(fields: ConfigFields) -> TransformerConfig:
    """Qwen 1.5 and 2 with experts: the attention of Qwen 2, experts beside a gated one.

    Without a list of types, windows are in every other layer below "max_window_layers".
    """
    check_activation(fields)
    has_bias = fields.flag("qkv_bias", True)
    full = replace(read_rotary_attention(fields), has_bias=has_bias, has_out_bias=False)
    return TransformerConfig(
        read_trunk(fields),
        attention=_windows(fields, full, lambda layer, bound: layer % 2 == 0 and layer < bound),
        feed_forwards=tuple(
            read_shared_moe(fields, shares_sum_to_one=fields.flag("norm_topk_prob", False))
            if is_sparse
            else read_plain_mlp(fields)
            for is_sparse in read_sparse_layers(fields)
        ),
    )


def read_shared_moe(fields: ConfigFields, *, shares_sum_to_one: bool) -> MixtureShape:
    """Experts of `moe_intermediate_size` beside one of `shared_expert_intermediate_size`."""
    shared = MlpShape(fields.whole("shared_expert_intermediate_size"), has_bias=False)
    routing = SoftmaxRouting(shares_sum_to_one)
    return MixtureShape(read_experts(fields), routing, shared, gates_shared=True)


def read_qwen3_moe(whole: ConfigFields) -> TransformerConfig:
    """Qwen 3 with experts, and the text of its image models: in most layers experts share a token.

    All layers have a window, or none has.
    """
    fields = text_fields(whole)
    check_activation(fields)
    trunk = read_trunk(fields)
    slides = fields.flag("use_sliding_window", False)
    attention = replace(
        read_rotary_attention(fields),
        head_norm=HeadNorm.EACH_HEAD,
        window_len=fields.whole("sliding_window") if slides else 0,
    )
    return TransformerConfig(
        trunk,
        attention=(attention,) * trunk.num_layers,
        feed_forwards=tuple(_feed_forward(fields, each) for each in read_sparse_layers(fields)),
    )


def _feed_forward(fields: ConfigFields, is_sparse: bool) -> FeedForwardShape:
    if not is_sparse:
        return read_plain_mlp(fields)
    has_images = MOE_WITH_IMAGES in fields.words("architectures")
    sums_to_one = fields.flag("norm_topk_prob", has_images)
    if has_images and not sums_to_one:
        raise fields.refusal("norm_topk_prob", "true")
    routing = SoftmaxRouting(sums_to_one)
    # transformers 5 writes num_local_experts.
    count = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
    return MixtureShape(read_experts(fields, count=count), routing)
