"""DeepSeek-V2, V3 and V3.2: latent attention, dense MLPs first, then experts beside shared ones.

The layer for multi-token prediction is numbered after the others. Its embedding and head are copies
of the model's, and not read. V3.2 has indexers, which choose what a token attends to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import (
    Decoder,
    EndScales,
    load_embedding_and_head,
    load_layers,
    load_model_decoder,
)
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    NormedPath,
    load_decoder_layer,
    load_norm,
)
from ferryman.model.layers.latent import load_latent_attention
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import load_routed
from ferryman.model.layers.mtp import (
    DEEPSEEK_NAMES,
    MtpHead,
    MtpSource,
    check_one_layer,
    load_entry_input,
)
from ferryman.model.layers.sparse_latent import (
    PlacedLayer,
    SparsePart,
    joined_by_index,
    load_indexer,
    load_placed_attention,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    read_grouped_routing,
    read_layers,
    read_rotary,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import read_plain_mlp
from ferryman.model.shapes.attention_shapes import (
    IndexShape,
    LatentShape,
    NoPositions,
    RotaryPositions,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    MixtureShape,
    MlpShape,
    MoeShape,
    Routing,
    SoftmaxRouting,
)
from ferryman.model.shapes.model_shapes import StateShape, TrunkShape
from ferryman.model.shapes.rotary import NoScaling, yarn_growth
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields, text_weights

V2_METHODS = ("greedy", "group_limited_greedy")


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


def read_deepseek_v3(whole: ConfigFields) -> DeepseekConfig:
    """DeepSeek-V3, Kimi K2.5's text: latent attention, dense MLPs first, then grouped experts."""
    return read_deepseek(text_fields(whole), _group_routing)


def _group_routing(fields: ConfigFields, experts: MoeShape) -> Routing:
    """Routing in groups by sigmoids, balanced without a loss; other ways are refused."""
    expected = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    for name, value in expected.items():
        if fields.raw.get(name, value) != value:
            raise fields.refusal(name, repr(value))
    return read_grouped_routing(fields, experts)


def read_deepseek_v2(fields: ConfigFields) -> DeepseekConfig:
    """DeepSeek-V2 and V2-Lite: DeepSeek-V3 with experts chosen by a softmax, of the best groups."""
    check_flags(fields, mlp_bias=False)
    return read_deepseek(fields, _softmax_routing)


def _softmax_routing(fields: ConfigFields, experts: MoeShape) -> SoftmaxRouting:
    if fields.raw.get("scoring_func", "softmax") != "softmax":
        raise fields.refusal("scoring_func", "'softmax'")
    if fields.flag("norm_topk_prob", False):
        raise fields.refusal("norm_topk_prob", "false: shares are those of all experts")
    method = fields.raw.get("topk_method") or V2_METHODS[0]
    if method not in V2_METHODS:
        raise fields.refusal("topk_method", f"one of {', '.join(V2_METHODS)}")
    scaling = fields.positive("routed_scaling_factor", 1.0)
    if method == V2_METHODS[0]:
        return SoftmaxRouting(shares_sum_to_one=False, scaling=scaling)
    num_groups = fields.whole("n_group")
    if experts.num_experts % num_groups:
        raise fields.refusal("n_group", f"a divisor of {experts.num_experts} experts")
    chosen = fields.whole("topk_group")
    if chosen > num_groups:
        raise fields.refusal("topk_group", f"at most n_group {num_groups}")
    if experts.experts_per_token > chosen * experts.num_experts // num_groups:
        raise fields.refusal("num_experts_per_tok", "at most the experts of topk_group groups")
    return SoftmaxRouting(False, scaling, num_groups, chosen)


def read_deepseek(
    fields: ConfigFields, read_routing: Callable[[ConfigFields, MoeShape], Routing]
) -> DeepseekConfig:
    """Latent attention in every layer, experts by `read_routing` in all but the first."""
    check_activation(fields)
    if fields.raw.get("moe_layer_freq", 1) != 1:
        raise fields.refusal("moe_layer_freq", "1")
    trunk, inner_dim = read_trunk(fields), fields.whole("moe_intermediate_size")
    experts = MoeShape(
        fields.whole("n_routed_experts"), fields.whole("num_experts_per_tok"), inner_dim
    )
    return DeepseekConfig(
        trunk=trunk,
        attention=read_turning_latent(fields),
        mlp=read_plain_mlp(fields),
        has_experts=read_expert_layers(fields, trunk.num_layers),
        experts=experts,
        routing=read_routing(fields, experts),
        shared_mlp=MlpShape(inner_dim * fields.whole("n_shared_experts"), has_bias=False),
    )


def read_turning_latent(fields: ConfigFields) -> LatentShape:
    """Latent attention with rotary positions, by the names of DeepSeek's fields."""
    return read_latent(
        fields,
        read_rotary(_turning_alone(fields), default_factor=1.0),
        growth=_growth(fields),
        is_interleaved=fields.flag("rope_interleave", True),
    )


def with_whole_turns(fields: ConfigFields) -> ConfigFields:
    """The fields without the part of a head that turns: of a latent head it is all that
    "qk_rope_head_dim" counts, and configs that give a part mean one of the whole head."""
    raw = {name: value for name, value in fields.raw.items() if name != "partial_rotary_factor"}
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.inner(name).raw
        if rope:
            raw[name] = {key: rope[key] for key in rope if key != "partial_rotary_factor"}
    return ConfigFields(fields.source, raw)


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


def load_deepseek(config: DeepseekConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    """The model, or the text model of a folder whose model also reads images."""
    text = text_weights(weights)
    return load_model_decoder(config, manifest, text, partial(_layer, config), EndScales())


def _layer(config: DeepseekConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mixer = load_latent_attention(weights.under("self_attn"), config.attention, place)
    return load_decoder_layer(weights, place, mixer, load_dense_or_experts(config, weights, place))


class DenseOrExperts(Protocol):
    """A config whose layers have a dense MLP, or experts with a shared one."""

    @property
    def mlp(self) -> MlpShape: ...
    @property
    def has_experts(self) -> tuple[bool, ...]: ...
    @property
    def experts(self) -> MoeShape: ...
    @property
    def routing(self) -> Routing: ...
    @property
    def shared_mlp(self) -> MlpShape: ...


def load_dense_or_experts(
    config: DenseOrExperts, weights: Weights, place: LayerPlace
) -> FeedForward:
    """The feed-forward of the layer under `weights`, by DeepSeek-V3's names."""
    inside = weights.under("mlp")
    if not config.has_experts[place.layer]:
        return load_gated_mlp(inside, config.mlp, place.hidden_dim)
    shape = MixtureShape(config.experts, config.routing, config.shared_mlp)
    return load_routed(inside, shape, place.hidden_dim)


def _mtp_attention(config: DeepseekConfig) -> LatentShape:
    return config.attention


def _load_mtp(config: DeepseekConfig, weights: Weights, place: LayerPlace) -> MtpHead:
    inside = weights.under(f"model.layers.{place.layer}")
    longer = replace(config, has_experts=(*config.has_experts, True))
    return MtpHead(
        load_entry_input(inside, DEEPSEEK_NAMES, place),
        _layer(longer, inside, place),
        load_norm(inside, "shared_head.norm", place.hidden_dim, place.norm_eps),
    )


DEEPSEEK_MTP = MtpSource(
    partial(check_one_layer, name="num_nextn_predict_layers"), _mtp_attention, _load_mtp
)


@dataclass(frozen=True, slots=True)
class SparseDeepseekConfig:
    """`dense` is the model without its indexers.

    `has_indexer` is True for layers with an indexer; each other layer attends to the places that
    the last one before it chose.
    """

    dense: DeepseekConfig
    index: IndexShape
    has_indexer: tuple[bool, ...]

    @property
    def trunk(self) -> TrunkShape:
        return self.dense.trunk

    @property
    def states(self) -> tuple[tuple[StateShape, ...], ...]:
        latent = self.dense.attention
        return tuple((latent, self.index) if own else (latent,) for own in self.has_indexer)


def read_deepseek_v32(fields: ConfigFields) -> SparseDeepseekConfig:
    """DeepSeek-V3.2: DeepSeek-V3 whose layers have indexers that choose what a token attends to."""
    fields.whole("q_lora_rank")  # the indexer computes its queries from that latent
    if fields.raw.get("layer_types") is not None:
        read_layers(fields, "layer_types", {"indexed_attention": None})
    check_flags(fields, rope_interleave=True)
    dense = read_deepseek_v3(fields)
    index = IndexShape(
        fields.whole("index_n_heads"), fields.whole("index_head_dim"), fields.whole("index_topk")
    )
    if index.head_dim < dense.attention.rope_dim:
        raise fields.refusal("index_head_dim", f"at least {dense.attention.rope_dim}, which turn")
    return SparseDeepseekConfig(dense, index, (True,) * dense.trunk.num_layers)


def load_sparse_deepseek(
    config: SparseDeepseekConfig, manifest: StateManifest, weights: Weights
) -> Decoder:
    ends = load_embedding_and_head(weights, config.trunk, "model.norm.weight", EndScales())
    load_part = partial(_load_part, config)
    parts = load_layers(config, manifest, weights.under("model.layers"), load_part)
    return Decoder(config, manifest, ends, joined_by_index(parts))


def _load_part(config: SparseDeepseekConfig, weights: Weights, place: LayerPlace) -> SparsePart:
    dense, norm = config.dense, partial(load_norm, dim=place.hidden_dim, eps=place.norm_eps)
    under = weights.under("self_attn")
    attention = load_placed_attention(under, dense.attention, place)
    layer = PlacedLayer(
        mixer_path=NormedPath(norm(weights, "input_layernorm")),
        attention=attention,
        feed_forward_path=NormedPath(norm(weights, "post_attention_layernorm")),
        feed_forward=load_dense_or_experts(dense, weights, place),
    )
    if not config.has_indexer[place.layer]:
        return layer, None
    indexer = under.under("indexer")
    return layer, load_indexer(indexer, attention, dense.attention, config.index, place)
