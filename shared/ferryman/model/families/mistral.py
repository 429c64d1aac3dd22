"""Mistral, Ministral and Ministral 3, and their text beside images: Llama, in windows or not.

Ministral 3's queries grow with their position. Mistral has a window in all layers or in none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.text_model import text_fields, text_weights
from ferryman.model.readers.transformer_readers import (
    has_short_window,
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, QueryGrowth
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.weights.named_weights import Weights

WITH_WINDOWS = {"MistralForCausalLM", "MinistralForCausalLM"}


def _read(whole: ConfigFields) -> TransformerConfig:
    nested = text_fields(whole)
    fields = ConfigFields(nested.source, {**_defaults(whole), **nested.raw})
    check_activation(fields)
    trunk = read_trunk(fields)
    return TransformerConfig(
        trunk,
        attention=_attention(fields),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
    )


def _defaults(fields: ConfigFields) -> Mapping[str, int]:
    """The meaning of fields that a config leaves out: the first models had windows."""
    return {"sliding_window": 4096} if set(fields.words("architectures")) & WITH_WINDOWS else {}


def _attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    plain = read_rotary_attention(fields)
    full = replace(plain, has_bias=False, has_out_bias=False, growth=_growth(fields))
    has_window = has_short_window(fields)
    return read_windows(fields, full, lambda _: has_window)


def _growth(fields: ConfigFields) -> QueryGrowth | None:
    rope = fields.merged_with("rope_parameters")
    beta = rope.not_negative("llama_4_scaling_beta", 0.0)
    return QueryGrowth(beta, rope.whole("original_max_position_embeddings")) if beta else None


def _load(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_transformer(config, manifest, text_weights(weights))


FAMILY = Family(
    (
        "MistralForCausalLM",
        "MinistralForCausalLM",
        "Ministral3ForCausalLM",
        "Mistral3ForConditionalGeneration",
    ),
    _read,
    _load,
)
