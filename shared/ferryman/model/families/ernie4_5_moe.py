"""ERNIE 4.5 with experts: the dense model's attention, experts beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.families.ernie4_5 import read_ernie_attention
from ferryman.model.family import Family
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import read_experts
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    BiasedSoftmaxRouting,
    FeedForwardShape,
    MixtureShape,
    MlpShape,
)

DEFAULTS = {"tie_word_embeddings": True, "moe_layer_end_index": -1}
"""The meaning of fields that a config leaves out."""


def _read(given: ConfigFields) -> TransformerConfig:
    fields = ConfigFields(given.source, {**DEFAULTS, **given.raw})
    check_activation(fields)
    has_bias = fields.flag("use_bias", False)
    trunk = replace(read_trunk(fields), has_head_bias=has_bias)
    dense, mixture = MlpShape(fields.whole("intermediate_size"), has_bias), _mixture(fields)
    shapes: dict[bool, FeedForwardShape] = {True: mixture, False: dense}
    return TransformerConfig(
        trunk,
        attention=(read_ernie_attention(fields, has_bias),) * trunk.num_layers,
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


FAMILY = Family(("Ernie4_5_MoeForCausalLM",), _read, load_transformer)
