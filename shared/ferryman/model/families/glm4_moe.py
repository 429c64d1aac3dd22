"""GLM-4.5 to 4.7: partly rotary attention, dense MLPs first, then DeepSeek's experts."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import (
    check_activation,
    head_dim_of,
    read_attention,
    read_grouped_routing,
    read_rotary,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import read_experts, read_plain_mlp
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MixtureShape, MlpShape


def _read(fields: ConfigFields) -> TransformerConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    num_dense = fields.whole("first_k_dense_replace", 1, least=0)
    return TransformerConfig(
        trunk,
        attention=(_attention(fields),) * trunk.num_layers,
        feed_forwards=tuple(
            _read_mixture(fields) if layer >= num_dense else read_plain_mlp(fields)
            for layer in range(trunk.num_layers)
        ),
    )


def _attention(fields: ConfigFields) -> AttentionShape:
    positions = read_rotary(fields, default_factor=0.5)
    plain = read_attention(fields, head_dim_of(fields) ** -0.5, positions)
    has_norm = fields.flag("use_qk_norm", False)
    head_norm = HeadNorm.EACH_HEAD if has_norm else HeadNorm.NONE
    return replace(plain, has_out_bias=False, head_norm=head_norm)


def _read_mixture(fields: ConfigFields) -> FeedForwardShape:
    experts = read_experts(fields, count="n_routed_experts")
    shared_dim = experts.inner_dim * fields.whole("n_shared_experts", 1)
    return MixtureShape(
        experts, read_grouped_routing(fields, experts), MlpShape(shared_dim, has_bias=False)
    )


FAMILY = Family(("Glm4MoeForCausalLM",), _read, load_transformer)
