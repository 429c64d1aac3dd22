"""MiniMax M3's text: attention to blocks of keys that an indexer chooses, and experts.

In the first layers attention is full, and a gated MLP is in place of the experts. All gated MLPs
have the activation of gpt-oss. Norms store the distance of their weights from one. Layers that
predict several tokens ("mtp") are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.block_sparse import BlockSparseAttention, load_block_indexer
from ferryman.model.layers.decoder import (
    Decoder,
    EndScales,
    load_decoder,
    load_embedding_and_head,
)
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    Mixer,
    load_decoder_layer,
    load_norm,
)
from ferryman.model.layers.expert_router import RouterNames
from ferryman.model.layers.mlp import ClampedSwiglu, load_gated_mlp
from ferryman.model.layers.moe import load_grouped_mixture
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    check_values,
    read_layers,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import (
    FULL,
    read_experts,
    read_mlp_types,
    read_rotary_attention,
)
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    BlockIndexShape,
    HeadNorm,
    RotaryPositions,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    GroupedRouting,
    MixtureShape,
    MlpShape,
)
from ferryman.model.shapes.model_shapes import StateShape, TrunkShape
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields, text_weights

SPARSE = "minimax_m3_sparse"
NORM_ORIGIN = 1.0
DEFAULTS = {
    "head_dim": 128,
    "rope_theta": 5_000_000.0,
    "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
}
"""The meaning of fields that a config leaves out."""

_PUBLISHED_NAMES = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""Fields of "sparse_attention_config", by the names of transformers."""


@dataclass(frozen=True, slots=True)
class MiniMaxM3Config:
    """`is_sparse` is True for layers with an indexer; `swiglu_alpha` and `swiglu_limit` are those
    of all gated MLPs."""

    trunk: TrunkShape
    attention: AttentionShape
    index: BlockIndexShape
    is_sparse: tuple[bool, ...]
    feed_forwards: tuple[FeedForwardShape, ...]
    swiglu_alpha: float
    swiglu_limit: float

    @property
    def states(self) -> tuple[tuple[StateShape, ...], ...]:
        both, alone = (self.attention, self.index), (self.attention,)
        return tuple(both if is_sparse else alone for is_sparse in self.is_sparse)


def read_minimax_m3(whole: ConfigFields) -> MiniMaxM3Config:
    """MiniMax M3's text: attention to blocks that an indexer chooses, experts beside a shared one

    An index head chooses for the queries of one head of keys.
    """
    fields = _with_names_of_transformers(text_fields(whole))
    _refuse_other_layers(fields)
    attention = _read_attention(fields)
    routing = GroupedRouting(1, 1, norms_shares=True, scaling=_scaling(fields))
    shared = MlpShape(fields.whole("shared_intermediate_size"), has_bias=False)
    experts = read_experts(fields, count="num_local_experts", inner_dim="intermediate_size")
    mixture = MixtureShape(experts, routing, shared)
    dense = MlpShape(fields.whole("dense_intermediate_size"), has_bias=False)
    trunk = read_trunk(fields)
    return MiniMaxM3Config(
        trunk=trunk,
        attention=attention,
        index=_read_index(fields, attention),
        is_sparse=read_layers(fields, "layer_types", {SPARSE: True, FULL: False}),
        feed_forwards=tuple(mixture if has else dense for has in read_mlp_types(fields, 0)),
        swiglu_alpha=fields.positive("swiglu_alpha"),
        swiglu_limit=fields.positive("swiglu_limit"),
    )


def _read_attention(fields: ConfigFields) -> AttentionShape:
    shape, name = read_rotary_attention(fields), "rotary_dim"
    turning = shape.positions
    if isinstance(turning, RotaryPositions) and fields.whole(name, turning.rotary_dim) != (
        turning.rotary_dim
    ):
        # transformers does not read it, and others read nothing else.
        raise fields.refusal(name, f"head_dim · partial_rotary_factor, {turning.rotary_dim}")
    return replace(shape, head_norm=HeadNorm.EACH_HEAD, has_bias=False, has_out_bias=False)


def _scaling(fields: ConfigFields) -> float:
    return fields.positive("routed_scaling_factor")


def _with_names_of_transformers(fields: ConfigFields) -> ConfigFields:
    """Published configs have objects and lists of 0 and 1 where transformers has fields."""
    sparse, num_layers = fields.inner("sparse_attention_config"), fields.whole("num_hidden_layers")
    _refuse_other_indexers(sparse, num_layers)
    renamed = {name: sparse.raw[old] for old, name in _PUBLISHED_NAMES.items() if old in sparse.raw}
    named = ConfigFields(fields.source, {**fields.raw, **renamed}).with_defaults(**DEFAULTS)
    attention = _words(sparse, "sparse_attention_freq", (FULL, SPARSE), num_layers)
    feed_forwards = _words(fields, "moe_layer_freq", ("dense", "sparse"), num_layers)
    return named.with_defaults(
        layer_types=attention or [FULL] * num_layers,
        mlp_layer_types=feed_forwards or ["sparse"] * num_layers,
    )


def _words(
    fields: ConfigFields, name: str, words: tuple[str, str], num_layers: int
) -> list[str] | None:
    """The layers' words by a list of 0 and 1, or None if the config has no such list."""
    if fields.raw.get(name) is None:
        return None
    flags = fields.whole_list(name)
    if len(flags) != num_layers or set(flags) - {0, 1}:
        raise fields.refusal(name, f"a list of {num_layers} of 0 and 1")
    return [words[flag] for flag in flags]


def _refuse_other_indexers(sparse: ConfigFields, num_layers: int) -> None:
    """An index that also yields values, scores other than a block's best, or first blocks that are
    always chosen: no published model has them, and transformers neither."""
    check_flags(sparse, use_sparse_attention=True)
    if sparse.raw.get("sparse_score_type", "max") != "max":
        raise sparse.refusal("sparse_score_type", "'max': the best score of a block")
    if sparse.whole("sparse_init_block", 0, least=0):
        raise sparse.refusal("sparse_init_block", "0: no first block is always chosen")
    freq, without = "sparse_attention_freq", "sparse_disable_index_value"
    chosen = _words(sparse, freq, ("full", "sparse"), num_layers) or []
    scores_alone = _words(sparse, without, ("values", "alone"), num_layers) or []
    if ("sparse", "values") in zip(chosen, scores_alone, strict=False):
        raise sparse.refusal(without, f"1 where {freq} is 1: an index has scores alone")


def _refuse_other_layers(fields: ConfigFields) -> None:
    check_activation(fields, known_as=("swigluoai", "silu"))
    check_flags(
        fields,
        attention_output_gate=False,
        use_gemma_norm=True,
        use_qk_norm=True,
        use_routing_bias=True,
    )
    expected = {"qk_norm_type": "per_head", "scoring_func": "sigmoid", "n_shared_experts": 1}
    check_values(fields, {**expected, "swiglu_beta": 1.0})


def _read_index(fields: ConfigFields, attention: AttentionShape) -> BlockIndexShape:
    heads, kv_heads = fields.whole("index_n_heads"), attention.kv_heads
    count = fields.whole("index_topk_blocks")
    num_local = fields.whole("index_local_blocks", least=0)
    head_dim = fields.whole("index_head_dim")
    if heads != kv_heads and SPARSE in fields.words("layer_types"):
        raise fields.refusal("index_n_heads", f"num_key_value_heads {kv_heads}: one for each")
    if num_local > count:
        raise fields.refusal("index_local_blocks", f"at most index_topk_blocks {count}")
    turning = attention.positions
    if isinstance(turning, RotaryPositions) and head_dim < turning.rotary_dim:
        raise fields.refusal("index_head_dim", f"at least {turning.rotary_dim}, which turn")
    return BlockIndexShape(heads, head_dim, fields.whole("index_block_size"), count, num_local)


def load_minimax_m3(config: MiniMaxM3Config, manifest: StateManifest, weights: Weights) -> Decoder:
    """The model, or the text model of a folder whose model also reads images."""
    text, norm = text_weights(weights), partial(load_norm, origin=NORM_ORIGIN)
    ends = load_embedding_and_head(
        text, config.trunk, "model.norm.weight", EndScales(), load_norm=norm
    )
    layer = partial(_layer, config)
    return load_decoder(config, manifest, ends, text.under("model.layers"), layer, NORM_ORIGIN)


def _layer(config: MiniMaxM3Config, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mixer = _mixer(config, weights.under("self_attn"), place)
    return load_decoder_layer(weights, place, mixer, _feed_forward(config, weights, place))


def _mixer(config: MiniMaxM3Config, weights: Weights, place: LayerPlace) -> Mixer:
    attention = load_attention(weights, config.attention, place)
    if not config.is_sparse[place.layer]:
        return attention
    indexer = load_block_indexer(weights, config.index, config.attention, place)
    return BlockSparseAttention(attention, indexer)


def _feed_forward(config: MiniMaxM3Config, weights: Weights, place: LayerPlace) -> FeedForward:
    shape, hidden_dim = config.feed_forwards[place.layer], place.hidden_dim
    act = ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit, added=1.0)
    if isinstance(shape, MlpShape):
        return load_gated_mlp(weights.under("mlp"), shape, hidden_dim, act)
    names = ("block_sparse_moe.gate.weight", "mlp.gate.weight")
    inside = weights.under(weights.first_of(*names).partition(".")[0])
    bias = ("e_score_correction_bias", "gate.e_score_correction_bias")
    router = RouterNames(("gate.weight",), bias)
    experts = ("w1", "w3", "w2")
    return load_grouped_mixture(
        inside, shape, hidden_dim, router, names=experts, act=act, shared_act=act
    )
