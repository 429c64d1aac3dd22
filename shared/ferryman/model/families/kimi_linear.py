"""Kimi Linear: Kimi Delta Attention, layers of latent attention, experts. No rotation.

The rest of a layer is DeepSeek-V3's: a dense MLP first, then experts in groups beside shared ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.deepseek import read_expert_layers, read_latent
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    Mixer,
    load_decoder_layer,
)
from ferryman.model.layers.expert_router import load_grouped_router
from ferryman.model.layers.kimi_delta import load_kimi_delta
from ferryman.model.layers.latent import load_latent_attention
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import ExpertsBesideShared, load_mixture
from ferryman.model.readers.config_readers import (
    check_activation,
    check_values,
    read_grouped_routing,
    read_layers,
    read_trunk,
    read_used,
)
from ferryman.model.readers.transformer_readers import read_plain_mlp
from ferryman.model.shapes.attention_shapes import LatentShape, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.delta_shapes import KimiDeltaShape
from ferryman.model.shapes.feed_forward_shapes import GroupedRouting, MlpShape, MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights

KimiMixer = KimiDeltaShape | LatentShape

_EXPERT_NAMES: Mapping[str, str] = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True, slots=True)
class KimiLinearConfig:
    """A mixer for each layer; `has_experts` says which layers have experts for a dense MLP."""

    trunk: TrunkShape
    mixers: tuple[KimiMixer, ...]
    mlp: MlpShape
    has_experts: tuple[bool, ...]
    experts: MoeShape
    routing: GroupedRouting
    shared_mlp: MlpShape

    @property
    def states(self) -> tuple[tuple[KimiMixer], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def read_kimi_linear(fields: ConfigFields) -> KimiLinearConfig:
    check_activation(fields)
    fields = with_former_names(fields)
    _refuse_unsupported(fields)
    return config_with(fields, _mixers, num_dense=1)


def with_former_names(fields: ConfigFields) -> ConfigFields:
    """The fields under transformers' names, which the models' own configs do not have."""
    return fields.with_former(
        max_position_embeddings="model_max_length",
        num_experts_per_tok="num_experts_per_token",
        norm_topk_prob="moe_renormalize",
        n_group="num_expert_group",
    )


def config_with(
    fields: ConfigFields,
    read_mixers: Callable[[ConfigFields, int], tuple[KimiMixer, ...]],
    num_dense: int,
) -> KimiLinearConfig:
    """The config with the mixers of so many layers, of which by default the first `num_dense` have
    no experts."""
    trunk, inner_dim = read_trunk(fields), fields.whole("moe_intermediate_size")
    experts = MoeShape(fields.whole("num_experts"), fields.whole("num_experts_per_tok"), inner_dim)
    return KimiLinearConfig(
        trunk=trunk,
        mixers=read_mixers(fields, trunk.num_layers),
        mlp=read_plain_mlp(fields),
        has_experts=read_expert_layers(fields, trunk.num_layers, num_dense),
        experts=experts,
        routing=read_grouped_routing(fields, experts),
        shared_mlp=MlpShape(inner_dim * fields.whole("num_shared_experts", 1), has_bias=False),
    )


def _refuse_unsupported(fields: ConfigFields) -> None:
    expected = {"moe_router_activation_func": "sigmoid", "mla_use_nope": True, "moe_layer_freq": 1}
    check_values(fields, expected)


def _mixers(fields: ConfigFields, num_layers: int) -> tuple[KimiMixer, ...]:
    """The mixers by "layer_types", or by the lists of `linear_attn_config`, counted from 1."""
    readers: dict[str, Callable[[], KimiMixer]] = {
        "full_attention": partial(read_latent, fields, NoPositions()),
        "linear_attention": partial(_delta, fields),
    }
    if fields.raw.get("layer_types") is not None:
        return read_used(read_layers(fields, "layer_types", readers))
    nested = fields.merged_with("linear_attn_config")
    full, linear = nested.whole_list("full_attn_layers"), nested.whole_list("kda_layers")
    if sorted((*full, *linear)) != list(range(1, num_layers + 1)):
        raise nested.refusal("kda_layers", "the layers from 1 on that full_attn_layers lacks")
    words = ("full_attention" if i + 1 in full else "linear_attention" for i in range(num_layers))
    return read_used([readers[word] for word in words])


def _delta(fields: ConfigFields) -> KimiDeltaShape:
    """By the fields of `linear_attn_config`, or by those of transformers."""
    if "linear_attn_config" in fields.raw:
        nested = ConfigFields(fields.source, fields.raw["linear_attn_config"])
        width = nested.whole("short_conv_kernel_size", 4, least=2)
        return KimiDeltaShape(nested.whole("num_heads"), nested.whole("head_dim"), width)
    return KimiDeltaShape(
        fields.whole("linear_num_heads"),
        fields.whole("linear_head_dim"),
        fields.whole("linear_conv_kernel_dim", 4, least=2),
    )


def load_kimi_linear(
    config: KimiLinearConfig, manifest: StateManifest, weights: Weights
) -> Decoder:
    return load_model_decoder(config, manifest, weights, partial(_layer, config), EndScales())


def _layer(config: KimiLinearConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mixer = load_kimi_mixer(weights.under("self_attn"), config.mixers[place.layer], place)
    return load_decoder_layer(weights, place, mixer, _feed_forward(config, weights, place))


def load_kimi_mixer(weights: Weights, shape: KimiMixer, place: LayerPlace) -> Mixer:
    if isinstance(shape, LatentShape):
        return load_latent_attention(weights, shape, place)
    return load_kimi_delta(weights, shape, place)


def _feed_forward(config: KimiLinearConfig, weights: Weights, place: LayerPlace) -> FeedForward:
    dim, inside = place.hidden_dim, weights.under("block_sparse_moe")
    if not config.has_experts[place.layer]:
        # transformers writes a dense MLP under the name of the experts.
        names = "mlp", "block_sparse_moe"
        found = weights.first_of(*(f"{name}.down_proj.weight" for name in names))
        return load_gated_mlp(weights.under(found.split(".")[0]), config.mlp, dim)
    router = load_grouped_router(inside.under("gate"), config.experts, config.routing, dim)
    experts = inside.called(_EXPERT_NAMES).under("experts")
    return ExpertsBesideShared(
        load_mixture(experts, config.experts, dim, router),
        load_gated_mlp(inside.under("shared_experts"), config.shared_mlp, dim),
    )
