"""ERNIE 4.5, dense or with experts: Llama whose rotations join neighbouring channels."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.layers.transformer import TransformerConfig, uniform_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import read_experts, read_rotary_attention
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    BiasedSoftmaxRouting,
    FeedForwardShape,
    MixtureShape,
    MlpShape,
)

# The meanings of fields that a config leaves out.
DEFAULTS = {"tie_word_embeddings": True, "head_dim": 128}
MOE_DEFAULTS = {"tie_word_embeddings": True, "moe_layer_end_index": -1}


def read_ernie4_5(given: ConfigFields) -> TransformerConfig:
    """ERNIE 4.5, dense: Llama whose rotations join neighbouring channels."""
    fields = ConfigFields(given.source, {**DEFAULTS, **given.raw})
    check_activation(fields)
    return uniform_transformer(read_trunk(fields), _attention(fields), _mlp(fields))


def _attention(fields: ConfigFields) -> AttentionShape:
    has_bias = fields.flag("use_bias", False)
    plain = read_rotary_attention(fields, is_interleaved=True)
    return replace(plain, has_bias=has_bias, has_out_bias=has_bias)


def _mlp(fields: ConfigFields) -> MlpShape:
    return MlpShape(fields.whole("intermediate_size"), fields.flag("use_bias", False))


def read_ernie4_5_moe(given: ConfigFields) -> TransformerConfig:
    """ERNIE 4.5 with experts: the dense model's attention, experts beside shared ones."""
    fields = ConfigFields(given.source, {**MOE_DEFAULTS, **given.raw})
    check_activation(fields)
    trunk = replace(read_trunk(fields), has_head_bias=fields.flag("use_bias", False))
    shapes: dict[bool, FeedForwardShape] = {True: _mixture(fields), False: _mlp(fields)}
    return TransformerConfig(
        trunk,
        attention=(_attention(fields),) * trunk.num_layers,
        feed_forwards=tuple(shapes[is_sparse] for is_sparse in _sparse_layers(fields)),
    )


def _mixture(fields: ConfigFields) -> MixtureShape:
    names = fields.with_former(num_experts_per_tok="moe_k")
    experts = read_experts(names, count="moe_num_experts")
    num_shared = fields.whole("moe_num_shared_experts", 2, least=0)
    shared = MlpShape(num_shared * experts.inner_dim, fields.flag("use_bias", False))
    routing = BiasedSoftmaxRouting(fields.positive("moe_norm_min", 1e-12))
    return MixtureShape(experts, routing, shared if num_shared else None)


def _sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """True for every "moe_layer_interval"-th layer from the start index to the end index, both
    included; the end index -1 is the last layer."""
    num_layers, interval = fields.whole("num_hidden_layers"), fields.whole("moe_layer_interval", 1)
    first = fields.whole("moe_layer_start_index", 1, least=0)
    last = fields.whole("moe_layer_end_index", least=-1)
    last = num_layers - 1 if last == -1 else last
    return tuple(
        (layer + 1) % interval == 0 and first <= layer <= last for layer in range(num_layers)
    )
