"""DeepSeek-V3: latent attention, dense MLPs first, then experts in groups beside shared ones.

The layer for multi-token prediction is numbered after the others. Its embedding and head are copies
of the model's, and not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family, MtpSource
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    Mixer,
    load_gated_mlp,
    load_norm,
)
from ferryman.model.layers.latent import load_latent_attention
from ferryman.model.layers.moe import load_routed
from ferryman.model.layers.mtp import DEEPSEEK_NAMES, MtpHead, check_one_layer, load_entry_input
from ferryman.model.readers.config_readers import (
    check_activation,
    read_grouped_routing,
    read_layers,
    read_rotary,
    read_trunk,
)
from ferryman.model.shapes.attention_shapes import LatentShape, NoPositions, RotaryPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MixtureShape, MlpShape, MoeShape, Routing
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.rotary import NoScaling, yarn_growth
from ferryman.model.weights.named_weights import Weights

LoadMixer = Callable[[Weights, LayerPlace], Mixer]


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    """`has_experts` is True for the layers with experts; the others have the dense `mlp`."""

    trunk: TrunkShape
    attention: LatentShape
    mlp: MlpShape
    has_experts: tuple[bool, ...]
    experts: MoeShape
    routing: Routing
    shared_mlp: MlpShape

    @property
    def states(self) -> tuple[tuple[LatentShape], ...]:
        return ((self.attention,),) * self.trunk.num_layers


def read_routing(fields: ConfigFields, experts: MoeShape) -> Routing:
    """Routing in groups by sigmoids, balanced without a loss; other ways are refused."""
    expected = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    for name, value in expected.items():
        if fields.raw.get(name, value) != value:
            raise fields.refusal(name, repr(value))
    return read_grouped_routing(fields, experts)


def read_deepseek(
    fields: ConfigFields,
    read_routing: Callable[[ConfigFields, MoeShape], Routing] = read_routing,
) -> DeepseekConfig:
    """The config that DeepSeek-V2, V3 and V3.2 share."""
    check_activation(fields)
    if fields.raw.get("moe_layer_freq", 1) != 1:
        raise fields.refusal("moe_layer_freq", "1")
    trunk, inner_dim = read_trunk(fields), fields.whole("moe_intermediate_size")
    experts = MoeShape(
        fields.whole("n_routed_experts"), fields.whole("num_experts_per_tok"), inner_dim
    )
    return DeepseekConfig(
        trunk=trunk,
        attention=_attention(fields),
        mlp=MlpShape(fields.whole("intermediate_size"), has_bias=False),
        has_experts=read_expert_layers(fields, trunk.num_layers),
        experts=experts,
        routing=read_routing(fields, experts),
        shared_mlp=MlpShape(inner_dim * fields.whole("n_shared_experts"), has_bias=False),
    )


def _attention(fields: ConfigFields) -> LatentShape:
    return read_latent(
        fields,
        read_rotary(_turning_alone(fields), default_factor=1.0),
        growth=_growth(fields),
        is_interleaved=fields.flag("rope_interleave", True),
    )


def read_latent(
    fields: ConfigFields,
    positions: RotaryPositions | NoPositions,
    *,
    growth: float = 1.0,
    is_interleaved: bool = False,
) -> LatentShape:
    """Latent attention by the names of DeepSeek's fields; `growth` multiplies its scores."""
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
        scale=(plain_dim + rope_dim) ** -0.5 * growth,
        has_bias=fields.flag("attention_bias", False),
        positions=positions,
        is_interleaved=is_interleaved,
    )


def _turning_alone(fields: ConfigFields) -> ConfigFields:
    """The fields with the rotating part of a head as the head: all of its channels rotate."""
    return replace(fields, raw={**fields.raw, "head_dim": fields.whole("qk_rope_head_dim")})


def _growth(fields: ConfigFields) -> float:
    """The factor by which scores grow where positions are scaled (YaRN's mscale_all_dim)."""
    positions = read_rotary(_turning_alone(fields), default_factor=1.0)
    name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    rope = fields.merged_with(name)
    scale = rope.not_negative("mscale_all_dim", 0.0)
    if isinstance(positions.scaling, NoScaling) or not scale:
        return 1.0
    return yarn_growth(rope.positive("factor"), scale) ** 2


def read_expert_layers(
    fields: ConfigFields, num_layers: int, num_dense: int = 0
) -> tuple[bool, ...]:
    """True for each layer with experts; the first `num_dense` have none unless the config says."""
    if fields.raw.get("mlp_layer_types") is not None:
        return read_layers(fields, "mlp_layer_types", {"dense": False, "sparse": True})
    num_dense = fields.whole("first_k_dense_replace", num_dense, least=0)
    return tuple(index >= num_dense for index in range(num_layers))


def load_layer(
    config: DeepseekConfig, load_mixer: LoadMixer, weights: Weights, place: LayerPlace
) -> DecoderLayer:
    """A layer of `config` with the mixer that `load_mixer` reads under "self_attn"."""
    dim, eps = place.hidden_dim, place.norm_eps
    return DecoderLayer(
        mixer_norm=load_norm(weights, "input_layernorm", dim, eps),
        mixer=load_mixer(weights.under("self_attn"), place),
        feed_forward_norm=load_norm(weights, "post_attention_layernorm", dim, eps),
        feed_forward=load_deepseek_feed_forward(config, weights.under("mlp"), place),
    )


def load_deepseek_feed_forward(
    config: DeepseekConfig, weights: Weights, place: LayerPlace
) -> FeedForward:
    """The MLP or the experts under `weights` of the layer at `place`."""
    if not config.has_experts[place.layer]:
        return load_gated_mlp(weights, config.mlp, place.hidden_dim)
    shape = MixtureShape(config.experts, config.routing, config.shared_mlp)
    return load_routed(weights, shape, place.hidden_dim)


def _mtp_attention(config: DeepseekConfig) -> LatentShape:
    return config.attention


def _load_mtp(config: DeepseekConfig, weights: Weights, place: LayerPlace) -> MtpHead:
    def load_mixer(under: Weights, place: LayerPlace) -> Mixer:
        return load_latent_attention(under, config.attention, place)

    inside = weights.under(f"model.layers.{place.layer}")
    longer = replace(config, has_experts=(*config.has_experts, True))
    return MtpHead(
        load_entry_input(inside, DEEPSEEK_NAMES, place),
        load_layer(longer, load_mixer, inside, place),
        load_norm(inside, "shared_head.norm", place.hidden_dim, place.norm_eps),
    )


def load_deepseek(config: DeepseekConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    def load_mixer(under: Weights, place: LayerPlace) -> Mixer:
        return load_latent_attention(under, config.attention, place)

    ends = load_embedding_and_head(weights, config.trunk, "model.norm.weight", EndScales())
    layer = partial(load_layer, config, load_mixer)
    return load_decoder(config, manifest, ends, weights.under("model.layers"), layer)


MTP = MtpSource(
    partial(check_one_layer, name="num_nextn_predict_layers"), _mtp_attention, _load_mtp
)
FAMILY = Family(("DeepseekV3ForCausalLM",), read_deepseek, load_deepseek, mtp=MTP)
