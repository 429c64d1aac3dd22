"""dots.llm1: the attention of Qwen 3, dense MLPs first, then the experts of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_grouped_routing, read_trunk
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MixtureShape, MlpShape


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    num_dense = fields.whole("first_k_dense_replace", 0, least=0)
    return TransformerConfig(
        trunk,
        attention=_attention(fields),
        feed_forwards=tuple(
            _mixture(fields) if layer >= num_dense else read_plain_mlp(fields)
            for layer in range(trunk.num_layers)
        ),
    )


def _attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    full = replace(read_rotary_attention(fields), head_norm=HeadNorm.EACH_HEAD)
    has_windows = fields.raw.get("sliding_window") is not None
    first = fields.whole("max_window_layers", 62, least=0)
    return read_windows(fields, full, lambda layer: has_windows and layer >= first)


def _mixture(fields: ConfigFields) -> FeedForwardShape:
    """Shares are those of the chosen experts' sigmoids unless "norm_topk_prob" is true."""
    if fields.raw.get("scoring_func", "noaux_tc") not in ("noaux_tc", "sigmoid"):
        raise fields.refusal("scoring_func", "'noaux_tc'")
    experts = read_experts(fields, count="n_routed_experts")
    routing = read_grouped_routing(fields.with_defaults(norm_topk_prob=False), experts)
    shared = MlpShape(experts.inner_dim * fields.whole("n_shared_experts"), has_bias=False)
    return MixtureShape(experts, routing, shared)


FAMILY = Family(("Dots1ForCausalLM",), _read, load_transformer)
