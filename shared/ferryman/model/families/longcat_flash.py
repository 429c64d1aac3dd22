"""LongCat-Flash: two latent attentions and MLPs a layer, and experts beside the second of them.

The experts of a layer read what its first MLP reads, and their output is added behind its second
(shortcut-connected experts). Some experts are the identity. To pages, and to all that counts
layers, each attention is a layer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.deepseek import read_turning_latent
from ferryman.model.layers.decoder import (
    Decoder,
    EndScales,
    load_embedding_and_head,
    load_halved_layers,
)
from ferryman.model.layers.decoder_layers import LayerPlace, load_decoder_layer
from ferryman.model.layers.latent import load_latent_attention
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.shortcut_experts import (
    HalfLayer,
    ShortcutLayer,
    load_experts_and_identities,
)
from ferryman.model.readers.config_readers import check_activation, check_flags, read_trunk
from ferryman.model.shapes.attention_shapes import LatentShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import IdentityRouting, MlpShape, MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights

HALVES = ("0", "1")
DEFAULTS = {"rope_theta": 10_000_000.0, "zero_expert_type": "identity", "attention_method": "MLA"}
"""The meaning of fields that a config leaves out."""


@dataclass(frozen=True, slots=True)
class LongcatConfig:
    """`trunk` counts attentions as layers."""

    trunk: TrunkShape
    attention: LatentShape
    mlp: MlpShape
    experts: MoeShape
    routing: IdentityRouting

    @property
    def states(self) -> tuple[tuple[LatentShape], ...]:
        return ((self.attention,),) * self.trunk.num_layers


def read_longcat_flash(fields: ConfigFields) -> LongcatConfig:
    """LongCat-Flash: two latent attentions a layer, experts beside the second, also identities."""
    fields = fields.with_defaults(**DEFAULTS)
    _refuse_other_parts(fields)
    trunk = read_trunk(fields, num_layers=len(HALVES) * _num_layers(fields))
    latent = read_turning_latent(fields)
    if not latent.query_rank:
        raise fields.refusal("q_lora_rank", "a whole number of at least 1")
    growth = (trunk.hidden_dim / latent.query_rank) ** 0.5
    return LongcatConfig(
        trunk=trunk,
        # Scores grow as the queries do.
        attention=replace(
            latent,
            scale=latent.scale * growth,
            latent_scale=(trunk.hidden_dim / latent.latent_dim) ** 0.5,
        ),
        mlp=MlpShape(fields.whole("ffn_hidden_size"), has_bias=False),
        experts=_experts(fields),
        routing=IdentityRouting(
            fields.whole("zero_expert_num", least=0), fields.positive("routed_scaling_factor", 1.0)
        ),
    )


def _refuse_other_parts(fields: ConfigFields) -> None:
    check_activation(fields)
    check_flags(
        fields,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        norm_topk_prob=False,
        rope_interleave=True,
        router_bias=False,
    )
    for name in ("zero_expert_type", "attention_method"):
        if fields.raw[name] != DEFAULTS[name]:
            raise fields.refusal(name, repr(DEFAULTS[name]))


def _num_layers(fields: ConfigFields) -> int:
    """Layers of two attentions; some configs count attentions beside them."""
    num_layers = fields.whole("num_layers")
    counted = num_layers, len(HALVES) * num_layers
    if fields.whole("num_hidden_layers", num_layers) not in counted:
        raise fields.refusal("num_hidden_layers", f"{counted[0]} or {counted[1]}, by num_layers")
    return num_layers


def _experts(fields: ConfigFields) -> MoeShape:
    experts, chosen = fields.whole("n_routed_experts"), fields.whole("moe_topk")
    most = experts + fields.whole("zero_expert_num", least=0)
    if chosen > most:
        raise fields.refusal("moe_topk", f"at most n_routed_experts + zero_expert_num, {most}")
    return MoeShape(experts, chosen, fields.whole("expert_ffn_hidden_size"))


def load_longcat_flash(config: LongcatConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    ends = load_embedding_and_head(weights, config.trunk, "model.norm.weight", EndScales())
    under, load_layer = weights.under("model.layers"), partial(_layer, config)
    return Decoder(config, manifest, ends, load_halved_layers(config, manifest, under, load_layer))


def _layer(
    config: LongcatConfig, weights: Weights, places: tuple[LayerPlace, LayerPlace]
) -> ShortcutLayer:
    first, second = (
        _half(config, weights, half, place) for half, place in zip(HALVES, places, strict=True)
    )
    experts = load_experts_and_identities(
        weights.under("mlp"), config.experts, config.routing, config.trunk.hidden_dim
    )
    return ShortcutLayer(first, experts, second)


def _half(config: LongcatConfig, weights: Weights, half: str, place: LayerPlace) -> HalfLayer:
    inside = weights.under(f"self_attn.{half}")
    return load_decoder_layer(
        weights,
        place,
        load_latent_attention(inside, config.attention, place),
        load_gated_mlp(weights.under(f"mlps.{half}"), config.mlp, place.hidden_dim),
        norms=(f"input_layernorm.{half}", f"post_attention_layernorm.{half}"),
    )
