"""Ling 2.5 and 2.6, Ring 2.5 and 2.6: lightning attention, each group's last layer latent, experts.

Published code disagrees in some places (docs/decisions/0214). Where that
changes a model that is published, the decision says which code is followed; where it does not, the
config is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.deepseek import (
    DeepseekConfig,
    load_dense_or_experts,
    read_deepseek,
    with_whole_turns,
)
from ferryman.model.families.ling3 import BAILING_NAMES
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    LayerPlace,
    Mixer,
    load_decoder_layer,
    load_norm,
)
from ferryman.model.layers.latent import load_latent_attention
from ferryman.model.layers.lightning_attention import load_turning_lightning
from ferryman.model.layers.mtp import (
    DEEPSEEK_NAMES,
    MtpHead,
    MtpSource,
    check_one_layer,
    load_entry_input,
)
from ferryman.model.readers.config_readers import (
    check_flags,
    check_values,
    head_dim_of,
    read_grouped_routing,
    read_rotary,
)
from ferryman.model.shapes.attention_shapes import LATENT_NORM_EPS, LatentShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import GroupedRouting, MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import TurningLightningShape
from ferryman.model.weights.named_weights import Weights

DEFAULTS = {
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "rope_theta": 600_000.0,
    "layer_group_size": 5,
    "group_norm_size": 4,
    "head_dim": 128,
    "first_k_dense_replace": 1,
}
"""The meaning of fields that a config leaves out."""
TURNING_PART = 0.5
"""The part of a head of lightning attention that turns, unless the config says so."""


@dataclass(frozen=True, slots=True)
class LightningLatentConfig:
    """`latent` is the model with latent attention in all layers; those where `is_lightning` is True
    have lightning attention in its place."""

    latent: DeepseekConfig
    lightning: TurningLightningShape
    is_lightning: tuple[bool, ...]

    @property
    def trunk(self) -> TrunkShape:
        return self.latent.trunk

    @property
    def states(self) -> tuple[tuple[LatentShape | TurningLightningShape], ...]:
        return tuple((self.mixer(layer),) for layer in range(len(self.is_lightning)))

    def mixer(self, layer: int) -> LatentShape | TurningLightningShape:
        return self.lightning if self.is_lightning[layer] else self.latent.attention


def read_ling_25(fields: ConfigFields) -> LightningLatentConfig:
    """Ling and Ring 2.5 and 2.6: lightning attention that turns, latent attention, experts."""
    # A null has no effect in published code where these have another meaning than a missing field.
    for name in ("head_dim", "num_shared_experts"):
        if name in fields.raw and fields.raw[name] is None:
            raise fields.refusal(name, "a number, or left out")
    fields = fields.with_defaults(**DEFAULTS).with_former(
        n_routed_experts="num_experts", n_shared_experts="num_shared_experts"
    )
    _refuse_unsupported(fields)
    lightning = _lightning(fields)
    latent = read_deepseek(with_whole_turns(fields), _routing)
    if latent.trunk.norm_eps != LATENT_NORM_EPS:
        raise fields.refusal(
            "rms_norm_eps",
            f"{LATENT_NORM_EPS}: published code has two meanings for norms of latents",
        )
    return LightningLatentConfig(latent, lightning, _lightning_layers(fields))


def _refuse_unsupported(fields: ConfigFields) -> None:
    check_flags(
        fields,
        use_qk_norm=True,
        use_qkv_bias=False,
        use_bias=False,
        linear_silu=False,
        use_linear_silu=False,
        linear_rope=True,
        rope_interleave=True,
        norm_head=False,
        moe_router_enable_routed_scaling=True,
        moe_router_enable_shared_expert=True,
        tie_word_embeddings=False,
        attention_bias=False,
        use_mla_nope=False,
    )
    check_values(fields, {"full_attention_type": "mla"})
    if fields.raw.get("router_dtype") not in (None, "fp32", "float32"):
        raise fields.refusal("router_dtype", "'fp32', as published")
    _refuse_growth(fields)
    shared = fields.raw.get("moe_shared_expert_intermediate_size")
    if shared is not None and shared != fields.raw.get("moe_intermediate_size"):
        raise fields.refusal("moe_shared_expert_intermediate_size", "moe_intermediate_size")


def _refuse_growth(fields: ConfigFields) -> None:
    """Published code differs in whether YaRN's own growth is that of latent layers, too."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.inner(name)
        if rope.raw.get("mscale") or rope.raw.get("mscale_all_dim"):
            raise fields.refusal(name, "without mscale and mscale_all_dim")


def _lightning(fields: ConfigFields) -> TurningLightningShape:
    heads, head_dim = fields.whole("num_attention_heads"), head_dim_of(fields)
    if fields.raw.get("num_kv_heads_for_linear_attn") not in (None, 0, heads):
        raise fields.refusal("num_kv_heads_for_linear_attn", f"num_attention_heads, {heads}")
    positions = read_rotary(fields, TURNING_PART)
    if fields.raw.get("rotary_dim") not in (None, positions.rotary_dim):
        raise fields.refusal("rotary_dim", f"the part of a head that turns, {positions.rotary_dim}")
    groups = fields.whole("group_norm_size")
    if heads * head_dim % groups:
        raise fields.refusal("group_norm_size", f"a divisor of {heads * head_dim} channels")
    return TurningLightningShape(heads, head_dim, positions, groups)


def _lightning_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """True for all layers but the last of each group."""
    num_layers, period = fields.whole("num_hidden_layers"), fields.whole("layer_group_size")
    if num_layers % period:
        raise fields.refusal("layer_group_size", f"a divisor of num_hidden_layers {num_layers}")
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


def _routing(fields: ConfigFields, experts: MoeShape) -> GroupedRouting:
    """Groups by sigmoids with a bias. One expert a token has a share of 1 in some code alone."""
    check_values(
        fields,
        {"score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    )
    check_flags(fields, norm_topk_prob=True, moe_router_enable_expert_bias=True)
    fields.whole("num_experts_per_tok", least=2)
    return read_grouped_routing(fields, experts)


def load_ling_25(
    config: LightningLatentConfig, manifest: StateManifest, weights: Weights
) -> Decoder:
    named = weights.called(BAILING_NAMES)
    return load_model_decoder(config, manifest, named, partial(_layer, config), EndScales())


def _layer(config: LightningLatentConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    feed_forward = load_dense_or_experts(config.latent, weights, place)
    return load_decoder_layer(weights, place, _mixer(config, weights, place), feed_forward)


def _mixer(config: LightningLatentConfig, weights: Weights, place: LayerPlace) -> Mixer:
    shape, inside = config.mixer(place.layer), weights.under("self_attn")
    if isinstance(shape, LatentShape):
        return load_latent_attention(inside, shape, place)
    return load_turning_lightning(inside, shape, place, config.trunk.num_layers)


def _mtp_attention(config: LightningLatentConfig) -> LatentShape:
    return config.latent.attention


def _load_mtp(config: LightningLatentConfig, weights: Weights, place: LayerPlace) -> MtpHead:
    """The layer numbered after the others: latent attention and experts."""
    inside = weights.called(BAILING_NAMES).under(f"model.layers.{place.layer}")
    longer = replace(
        config,
        latent=replace(config.latent, has_experts=(*config.latent.has_experts, True)),
        is_lightning=(*config.is_lightning, False),
    )
    return MtpHead(
        load_entry_input(inside, DEEPSEEK_NAMES, place),
        _layer(longer, inside, place),
        load_norm(inside, "final_layernorm", place.hidden_dim, place.norm_eps),
    )


LING_25_MTP = MtpSource(
    partial(check_one_layer, name="num_nextn_predict_layers"), _mtp_attention, _load_mtp
)
