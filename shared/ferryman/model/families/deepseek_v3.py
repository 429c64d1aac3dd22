"""DeepSeek-V3: latent attention, dense MLPs first, then experts in groups beside shared ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.decoder import Decoder, EndScales, load_decoder, load_ends
from ferryman.model.family import Family
from ferryman.model.fields import Fields
from ferryman.model.fp8 import METHOD, check_blocks
from ferryman.model.grouped_routing import load_grouped_router
from ferryman.model.latent import load_latent_attention
from ferryman.model.layers import (
    DecoderLayer,
    FeedForward,
    Mixing,
    Place,
    load_gated_mlp,
    load_norm,
)
from ferryman.model.moe import ExpertsBesideShared, load_mixture
from ferryman.model.reading import (
    check_activation,
    read_grouped_routing,
    read_layers,
    read_rotary,
    read_trunk,
)
from ferryman.model.rotary import Unstretched, yarn_growth
from ferryman.model.shapes import GroupedRouting, LatentShape, MlpShape, MoeShape, TrunkShape
from ferryman.model.weights import Weights

LoadMixer = Callable[[Weights, Place], Mixing]


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    """`has_experts` says which layers have experts; the others have the dense `mlp`."""

    trunk: TrunkShape
    attention: LatentShape
    mlp: MlpShape
    has_experts: tuple[bool, ...]
    experts: MoeShape
    routing: GroupedRouting
    shared_mlp: MlpShape

    @property
    def states(self) -> tuple[tuple[LatentShape], ...]:
        return ((self.attention,),) * self.trunk.num_layers


def read_deepseek(fields: Fields) -> DeepseekConfig:
    """What DeepSeek-V3 and V3.2 have in common; refuses other ways to route by name."""
    check_activation(fields)
    check_blocks(fields)
    expected = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    for name, value in expected.items():
        if fields.raw.get(name, value) != value:
            raise fields.refusal(name, repr(value))
    trunk, inner_dim = read_trunk(fields), fields.whole("moe_intermediate_size")
    experts = MoeShape(
        fields.whole("n_routed_experts"), fields.whole("num_experts_per_tok"), inner_dim
    )
    return DeepseekConfig(
        trunk=trunk,
        attention=_attention(fields),
        mlp=MlpShape(fields.whole("intermediate_size"), has_bias=False),
        has_experts=_has_experts(fields, trunk.num_layers),
        experts=experts,
        routing=read_grouped_routing(fields, experts),
        shared_mlp=MlpShape(inner_dim * fields.whole("n_shared_experts"), has_bias=False),
    )


def _attention(fields: Fields) -> LatentShape:
    q_heads, rope_dim = fields.whole("num_attention_heads"), fields.whole("qk_rope_head_dim")
    if fields.whole("num_key_value_heads", q_heads) != q_heads:
        raise fields.refusal("num_key_value_heads", f"num_attention_heads, {q_heads}")
    plain_dim = fields.whole("qk_nope_head_dim")
    return LatentShape(
        q_heads=q_heads,
        query_rank=fields.whole("q_lora_rank", 0, least=0),
        latent_dim=fields.whole("kv_lora_rank"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=fields.whole("v_head_dim"),
        scale=(plain_dim + rope_dim) ** -0.5 * _growth(fields),
        has_bias=fields.flag("attention_bias", False),
        positions=read_rotary(_turning_alone(fields), default_factor=1.0),
        is_interleaved=fields.flag("rope_interleave", True),
    )


def _turning_alone(fields: Fields) -> Fields:
    """To rotary positions a head is the part of it that turns, and all of that turns."""
    return replace(fields, raw={**fields.raw, "head_dim": fields.whole("qk_rope_head_dim")})


def _growth(fields: Fields) -> float:
    """By how much scores grow where positions are stretched (YaRN's mscale_all_dim)."""
    positions = read_rotary(_turning_alone(fields), default_factor=1.0)
    name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    rope = fields.beneath(name)
    scale = rope.real("mscale_all_dim", 0.0)
    if isinstance(positions.stretch, Unstretched) or not scale:
        return 1.0
    return yarn_growth(rope.real("factor"), scale) ** 2


def _has_experts(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    if fields.raw.get("mlp_layer_types") is not None:
        return read_layers(fields, "mlp_layer_types", {"dense": False, "sparse": True})
    num_dense = fields.whole("first_k_dense_replace", 0, least=0)
    return tuple(index >= num_dense for index in range(num_layers))


def load_layer(
    config: DeepseekConfig, load_mixer: LoadMixer, weights: Weights, place: Place
) -> DecoderLayer:
    """A layer of `config` with what `load_mixer` finds under "self_attn"."""
    dim, eps = place.hidden_dim, place.norm_eps
    return DecoderLayer(
        mixer_norm=load_norm(weights, "input_layernorm", dim, eps),
        mixer=load_mixer(weights.under("self_attn"), place),
        feed_forward_norm=load_norm(weights, "post_attention_layernorm", dim, eps),
        feed_forward=_feed_forward(config, weights.under("mlp"), place),
    )


def _feed_forward(config: DeepseekConfig, weights: Weights, place: Place) -> FeedForward:
    if not config.has_experts[place.layer]:
        return load_gated_mlp(weights, config.mlp, place.hidden_dim)
    router = load_grouped_router(
        weights.under("gate"), config.experts, config.routing, place.hidden_dim
    )
    return ExpertsBesideShared(
        load_mixture(weights.under("experts"), config.experts, place.hidden_dim, router),
        load_gated_mlp(weights.under("shared_experts"), config.shared_mlp, place.hidden_dim),
    )


def _load(config: DeepseekConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    def load_mixer(under: Weights, place: Place) -> Mixing:
        return load_latent_attention(under, config.attention, place)

    ends = load_ends(weights, config.trunk, "model.norm.weight", EndScales())
    layer = partial(load_layer, config, load_mixer)
    return load_decoder(config, manifest, ends, weights.under("model.layers"), layer)


FAMILY = Family(("DeepseekV3ForCausalLM",), read_deepseek, _load, quantisations=(METHOD,))
