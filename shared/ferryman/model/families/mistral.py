"""Mistral and Mixtral: Llama, in windows or not, and experts for the MLP in Mixtral."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.expert_router import ExpertRouter, shares_of_chosen
from ferryman.model.layers.moe import load_mixture
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_plain_mlp,
    read_rotary_attention,
    read_short_windows,
)
from ferryman.model.shapes.attention_shapes import QueryGrowth
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    MixtureShape,
    MoeShape,
    SoftmaxRouting,
)
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields

WITH_WINDOWS = {"MistralForCausalLM", "MinistralForCausalLM"}


def read_mistral(whole: ConfigFields) -> TransformerConfig:
    """Mistral, Ministral and Ministral 3, and their text beside images: Llama, in windows or not.

    Ministral 3's queries grow with their position. Mistral has a window in all layers or in none.
    """
    nested = text_fields(whole)
    fields = ConfigFields(nested.source, {**_defaults(whole), **nested.raw})
    return _read(fields, read_plain_mlp(fields))


def _read(fields: ConfigFields, feed_forward: FeedForwardShape) -> TransformerConfig:
    check_activation(fields)
    trunk, plain = read_trunk(fields), read_rotary_attention(fields)
    full = replace(plain, has_bias=False, has_out_bias=False, growth=_growth(fields))
    return TransformerConfig(
        trunk,
        attention=read_short_windows(fields, full),
        feed_forwards=(feed_forward,) * trunk.num_layers,
    )


def _defaults(fields: ConfigFields) -> Mapping[str, int]:
    """The meaning of fields that a config leaves out: the first models had windows."""
    return {"sliding_window": 4096} if set(fields.words("architectures")) & WITH_WINDOWS else {}


def _growth(fields: ConfigFields) -> QueryGrowth | None:
    rope = fields.merged_with("rope_parameters")
    beta = rope.not_negative("llama_4_scaling_beta", 0.0)
    return QueryGrowth(beta, rope.whole("original_max_position_embeddings")) if beta else None


def read_mixtral(fields: ConfigFields) -> TransformerConfig:
    """Mixtral: Mistral's attention, and experts in every layer."""
    experts = read_experts(fields, count="num_local_experts", inner_dim="intermediate_size")
    return _read(fields, MixtureShape(experts, SoftmaxRouting(shares_sum_to_one=True)))


def _load_feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MixtureShape):
        raise TypeError(f"Mixtral has experts in every layer, not {shape}")
    router = partial(shares_of_chosen, experts_per_token=shape.experts.experts_per_token)
    return load_block_experts(weights, shape.experts, hidden_dim, router)


def load_block_experts(
    weights: Weights, shape: MoeShape, hidden_dim: int, router: Callable[[Linear], ExpertRouter]
) -> FeedForward:
    """The experts as they are published, under "block_sparse_moe", each with w1, w3 and w2, or as
    transformers saves them. `router` makes the router of the scores."""
    gate = weights.first_of("block_sparse_moe.gate.weight", "mlp.gate.weight", "mlp.router.weight")
    score = make_linear(weights.tensor(gate, shape.num_experts, hidden_dim))
    under = weights.under(gate.partition(".")[0]).under("experts")
    return load_mixture(under, shape, hidden_dim, router(score), ("w1", "w3", "w2"))


load_mixtral = partial(load_transformer, feed_forward=_load_feed_forward)
