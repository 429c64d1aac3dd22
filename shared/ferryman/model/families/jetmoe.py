"""JetMoe: experts make a token's queries and outputs, and others feed it forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    load_decoder_layer,
)
from ferryman.model.layers.expert_attention import load_expert_attention
from ferryman.model.layers.moe import load_experts
from ferryman.model.readers.config_readers import check_activation, read_rotary, read_trunk
from ferryman.model.readers.transformer_readers import read_experts
from ferryman.model.shapes.attention_shapes import ExpertHeadsShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights

LAYER_NORM_EPS = 1e-6
"""The epsilon of a layer's norms. That of the config is the last norm's alone."""

DEFAULTS = {"tie_word_embeddings": True, "kv_channels": 128}
"""The meaning of fields that a config leaves out."""


@dataclass(frozen=True, slots=True)
class JetMoeConfig:
    """Attention by experts and a feed-forward of experts, alike in all layers."""

    trunk: TrunkShape
    attention: ExpertHeadsShape
    experts: MoeShape

    @property
    def states(self) -> tuple[tuple[ExpertHeadsShape], ...]:
        return ((self.attention,),) * self.trunk.num_layers


def read_jetmoe(config: ConfigFields) -> JetMoeConfig:
    """JetMoe: attention whose queries and outputs are made by experts, and experts behind it."""
    fields = config.with_defaults(**DEFAULTS)
    check_activation(fields, "activation_function")
    experts = read_experts(fields, count="num_local_experts", inner_dim="intermediate_size")
    return JetMoeConfig(read_trunk(fields), _attention(fields, experts), experts)


def _attention(fields: ConfigFields, experts: MoeShape) -> ExpertHeadsShape:
    kv_heads, head_dim = fields.whole("num_key_value_heads"), fields.whole("kv_channels")
    q_heads = kv_heads * experts.experts_per_token
    if fields.whole("num_attention_heads", q_heads) != q_heads:
        raise fields.refusal(
            "num_attention_heads", f"num_key_value_heads times num_experts_per_tok, {q_heads}"
        )
    counted = {**fields.raw, "num_attention_heads": q_heads, "head_dim": head_dim}
    return ExpertHeadsShape(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        has_bias=False,
        positions=read_rotary(ConfigFields(fields.source, counted), default_factor=1.0),
        num_experts=experts.num_experts,
    )


@dataclass(frozen=True, slots=True)
class ExpertsWithBias:
    """Experts, and a bias [hidden_dim] on their sum."""

    experts: FeedForward
    bias: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.experts(hidden).add_(self.bias)


def load_jetmoe(config: JetMoeConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_model_decoder(config, manifest, weights, partial(_layer, config), EndScales())


def _layer(config: JetMoeConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    inside, hidden_dim = weights.under("mlp"), place.hidden_dim
    experts = load_experts(inside, config.experts, hidden_dim)
    return load_decoder_layer(
        weights,
        replace(place, norm_eps=LAYER_NORM_EPS),
        load_expert_attention(weights.under("self_attention"), config.attention, place),
        ExpertsWithBias(experts, inside.tensor("bias", hidden_dim)),
    )
