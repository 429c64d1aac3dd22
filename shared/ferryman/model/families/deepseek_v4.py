"""DeepSeek-V4: rows that are key and value, streams that are mixed, experts by token ids at first.

`row_attention.py`, `hyper_connections.py` and `tabled_experts.py` have the formulas. Gate and up of
all experts are cut at a limit. The layers for multi-token prediction are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.block_row_attention import load_block_row_attention
from ferryman.model.layers.decoder import (
    Decoder,
    EmbeddingAndHead,
    EndScales,
    load_embedding_and_head,
    load_layers,
)
from ferryman.model.layers.decoder_layers import Layer, LayerPlace, Mixer, PathLayer, load_norm
from ferryman.model.layers.hidden_streams import SpreadLayer
from ferryman.model.layers.hyper_connections import (
    CopiedStreams,
    HyperPath,
    MixedShape,
    ReadStreamsNorm,
    load_end_gates,
    load_mixed_gates,
)
from ferryman.model.layers.mlp import ClampedSwiglu
from ferryman.model.layers.row_attention import load_row_attention
from ferryman.model.layers.tabled_experts import (
    SoftplusMixture,
    TabledLayer,
    load_softplus_mixture,
    load_tabled_experts,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    check_values,
    read_layers,
    read_rotary,
    read_trunk,
    read_used,
)
from ferryman.model.readers.transformer_readers import WINDOW, read_experts
from ferryman.model.shapes.attention_shapes import RotaryPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape, SoftplusRouting
from ferryman.model.shapes.model_shapes import StateShape, TrunkShape
from ferryman.model.shapes.row_shapes import BlockRowsShape, RowAttentionShape, RowIndexShape
from ferryman.model.weights.named_weights import Weights

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
TYPES_BY_RATIO = {0: WINDOW, 4: CSA, 128: HCA}
"""The type of a layer by the number of tokens that share a compressed key, in published configs."""

MAIN, COMPRESS = "main", "compress"
"""The names of the rotations of layers with windows alone, and of all others."""

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "rms_norm_eps": 1e-6,
}
"""The meaning of fields that a config leaves out."""

TURNING_PART = 64 / 512

MEANT = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
}
"""Fields that have one meaning here."""


@dataclass(frozen=True, slots=True)
class MixerShape:
    """The attention of a layer, and its rows of blocks (None: it has a window alone)."""

    attention: RowAttentionShape
    blocks: BlockRowsShape | None

    @property
    def states(self) -> tuple[StateShape, ...]:
        if self.blocks is None:
            return (self.attention,)
        return self.attention, self.blocks, self.blocks.means


@dataclass(frozen=True, slots=True)
class DeepseekV4Config:
    """`has_table` is True for layers whose experts a table of token ids chooses."""

    trunk: TrunkShape
    mixers: tuple[MixerShape, ...]
    streams: MixedShape
    mixture: SoftplusMixture
    has_table: tuple[bool, ...]
    swiglu_limit: float

    @property
    def states(self) -> tuple[tuple[StateShape, ...], ...]:
        return tuple(mixer.states for mixer in self.mixers)


def read_deepseek_v4(config: ConfigFields) -> DeepseekV4Config:
    """DeepSeek-V4: a row is key and value, mixed streams, experts by token ids"""
    fields = config.with_defaults(**DEFAULTS)
    _refuse_other_parts(fields)
    experts = read_experts(fields, count="n_routed_experts")
    routing = SoftplusRouting(fields.positive("routed_scaling_factor"))
    shared = MlpShape(experts.inner_dim, has_bias=False)
    return DeepseekV4Config(
        trunk=read_trunk(fields),
        mixers=_read_mixers(fields),
        streams=MixedShape(
            fields.whole("hc_mult"), fields.whole("hc_sinkhorn_iters"), fields.positive("hc_eps")
        ),
        mixture=SoftplusMixture(experts, routing, shared),
        has_table=_read_tables(fields),
        swiglu_limit=fields.positive("swiglu_limit"),
    )


def _refuse_other_parts(fields: ConfigFields) -> None:
    check_activation(fields)
    check_flags(fields, attention_bias=False, mlp_bias=False, norm_topk_prob=True)
    check_values(fields, MEANT)
    if fields.raw.get("expert_dtype") not in (None, "fp4", "fp8", "bf16"):
        raise fields.refusal("expert_dtype", "'fp4', 'fp8' or 'bf16'")


def _read_tables(fields: ConfigFields) -> tuple[bool, ...]:
    if fields.raw.get("mlp_layer_types") is not None:
        return read_layers(fields, "mlp_layer_types", {"hash_moe": True, "moe": False})
    num_tables = fields.whole("num_hash_layers", least=0)
    return tuple(layer < num_tables for layer in range(fields.whole("num_hidden_layers")))


def _read_types(fields: ConfigFields) -> tuple[str, ...]:
    """The type of each layer: by name, or by the numbers of tokens that share a key, behind which
    published configs have those of drafting layers."""
    num_layers = fields.whole("num_hidden_layers")
    if fields.raw.get("layer_types") is not None:
        return read_layers(fields, "layer_types", {word: word for word in TYPES_BY_RATIO.values()})
    if fields.raw.get("compress_ratios") is None:
        interleaved = [CSA if layer % 2 else HCA for layer in range(max(num_layers - 2, 0))]
        return (*[HCA] * min(num_layers, 2), *interleaved)
    ratios = fields.raw["compress_ratios"]
    types = [_type_of(ratio) for ratio in ratios[:num_layers]] if isinstance(ratios, list) else []
    if len(types) != num_layers or not all(types):
        raise fields.refusal("compress_ratios", f"a list of {num_layers} of 0, 4 and 128")
    return tuple(types)


def _type_of(ratio: object) -> str:
    """The type of layers with this ratio; empty where there are none. `false` is no ratio of 0."""
    if isinstance(ratio, bool) or not isinstance(ratio, int):
        return ""
    return TYPES_BY_RATIO.get(ratio, "")


def _read_mixers(fields: ConfigFields) -> tuple[MixerShape, ...]:
    readers = {WINDOW: _read_window, CSA: _read_sparse, HCA: _read_heavy}
    return read_used([partial(readers[word], fields) for word in _read_types(fields)])


def _read_window(fields: ConfigFields) -> MixerShape:
    return MixerShape(_read_attention(fields, MAIN), None)


def _read_sparse(fields: ConfigFields) -> MixerShape:
    attention, block_len = _read_attention(fields, COMPRESS), _read_rate(fields, CSA, "csa", 4)
    index = RowIndexShape(
        fields.whole("index_n_heads"), fields.whole("index_head_dim"), fields.whole("index_topk")
    )
    if index.head_dim < attention.positions.rotary_dim:
        turning = attention.positions.rotary_dim
        raise fields.refusal("index_head_dim", f"at least {turning}, which turn")
    return MixerShape(attention, BlockRowsShape(block_len, attention.head_dim, True, index))


def _read_heavy(fields: ConfigFields) -> MixerShape:
    attention, block_len = _read_attention(fields, COMPRESS), _read_rate(fields, HCA, "hca", 128)
    return MixerShape(attention, BlockRowsShape(block_len, attention.head_dim, False, None))


def _read_rate(fields: ConfigFields, word: str, short: str, default: int) -> int:
    """The number of tokens that share a key in layers of the type `word`."""
    rate = fields.inner("compress_rates").whole(word, default)
    return fields.whole(f"compress_rate_{short}", rate)


def _read_attention(fields: ConfigFields, turning: str) -> RowAttentionShape:
    heads, groups = fields.whole("num_attention_heads"), fields.whole("o_groups")
    if heads % groups:
        raise fields.refusal("o_groups", f"a divisor of num_attention_heads {heads}")
    return RowAttentionShape(
        q_heads=heads,
        head_dim=fields.whole("head_dim"),
        query_rank=fields.whole("q_lora_rank"),
        window_len=fields.whole("sliding_window"),
        positions=_read_positions(fields, turning),
        out_groups=groups,
        out_rank=fields.whole("o_lora_rank"),
        norm_eps=fields.positive("rms_norm_eps"),
    )


def _read_positions(fields: ConfigFields, name: str) -> RotaryPositions:
    """The rotation `name`: of its own parameters, or as published, where a scaling is that of
    layers with compressed keys alone, and does not lengthen what it turns."""
    source = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    rope = fields.raw.get(source) or {}
    if not isinstance(rope, Mapping):
        raise fields.refusal(source, "an object")
    if isinstance(rope.get(MAIN), Mapping) and isinstance(rope.get(COMPRESS), Mapping):
        turning = dict(rope[name])
    elif name == MAIN:
        turning = {"rope_theta": fields.raw["rope_theta"]}
    else:
        theta = fields.raw["compress_rope_theta"]
        turning = {"attention_factor": 1.0, **rope, "rope_theta": theta}
    rest = {key: value for key, value in fields.raw.items() if key != "rope_scaling"}
    turning.setdefault("partial_rotary_factor", _turning_part(fields))
    rope_fields = ConfigFields(fields.source, {**rest, "rope_parameters": turning})
    return replace(read_rotary(rope_fields, TURNING_PART), is_interleaved=True)


def _turning_part(fields: ConfigFields) -> float:
    if fields.raw.get("partial_rotary_factor") is not None:
        return fields.positive("partial_rotary_factor")
    head_dim = fields.whole("head_dim")
    return fields.whole("qk_rope_head_dim", int(head_dim * TURNING_PART)) / head_dim


def load_deepseek_v4(
    config: DeepseekV4Config, manifest: StateManifest, weights: Weights
) -> Decoder:
    named = with_module_names(weights)
    layers = named.under("model.layers")
    first, *others = load_layers(config, manifest, layers, partial(_load_layer, config))
    spread = SpreadLayer(CopiedStreams(config.streams.count), first)
    return Decoder(config, manifest, _load_ends(config, named), (spread, *others))


def _load_ends(config: DeepseekV4Config, weights: Weights) -> EmbeddingAndHead:
    def load(weights: Weights, name: str, dim: int, eps: float) -> ReadStreamsNorm:
        names = ("model.hc_head.hc_fn", "model.hc_head.hc_base", "model.hc_head.hc_scale")
        gates = load_end_gates(weights, names, config.streams, config.trunk)
        return ReadStreamsNorm(gates, load_norm(weights, name, dim, eps))

    trunk = config.trunk
    return load_embedding_and_head(weights, trunk, "model.norm.weight", EndScales(), load_norm=load)


def _load_layer(config: DeepseekV4Config, weights: Weights, place: LayerPlace) -> Layer:
    path = partial(_load_path, config, weights, place)
    mixer_path = path("attn_hc", "input_layernorm")
    feed_forward_path = path("ffn_hc", "post_attention_layernorm")
    mixer = _load_mixer(weights.under("self_attn"), place, config.mixers[place.layer])
    mlp, mixture, dim = weights.under("mlp"), config.mixture, place.hidden_dim
    act = ClampedSwiglu(alpha=1.0, limit=config.swiglu_limit, added=0.0)
    if not config.has_table[place.layer]:
        experts = load_softplus_mixture(mlp, mixture, dim, act)
        return PathLayer(mixer_path, mixer, feed_forward_path, experts)
    tabled = load_tabled_experts(mlp, mixture, dim, config.trunk.vocab_size, act)
    return TabledLayer(mixer_path, mixer, feed_forward_path, tabled)


def _load_mixer(weights: Weights, place: LayerPlace, shape: MixerShape) -> Mixer:
    if shape.blocks is None:
        return load_row_attention(weights, place, shape.attention)
    return load_block_row_attention(weights, place, shape.attention, shape.blocks)


def _load_path(
    config: DeepseekV4Config, weights: Weights, place: LayerPlace, module: str, norm: str
) -> HyperPath:
    names = (f"{module}.fn", f"{module}.base", f"{module}.scale")
    gates = load_mixed_gates(weights, names, config.streams, config.trunk)
    return HyperPath(gates, load_norm(weights, norm, place.hidden_dim, place.norm_eps))


_WORDS = {
    **{"embed": "embed_tokens", "head": "lm_head", "attn": "self_attn", "ffn": "mlp"},
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{"attn_sink": "sinks", "wq_a": "q_a_proj", "wq_b": "q_b_proj", "q_norm": "q_a_norm"},
    **{"wkv": "kv_proj", "wgate": "gate_proj", "ape": "position_bias"},
    **{"wo_a": "o_a_proj", "wo_b": "o_b_proj"},
    **{"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
    **{f"hc_attn_{part}": f"attn_hc.{part}" for part in ("fn", "base", "scale")},
    **{f"hc_ffn_{part}": f"ffn_hc.{part}" for part in ("fn", "base", "scale")},
    **{f"hc_head_{part}": f"hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}
"""The names of modules in transformers for published ones, part by part."""

_PLACES = {
    "self_attn.indexer.compressor.": "self_attn.compressor.indexer.",
    "self_attn.indexer.weights_proj.": "self_attn.compressor.indexer.scorer.weights_proj.",
    "self_attn.indexer.": "self_attn.compressor.indexer.",
    "self_attn.norm.": "self_attn.kv_norm.",
    "compressor.norm.": "compressor.kv_norm.",
    "indexer.norm.": "indexer.kv_norm.",
    "gate.bias": "gate.e_score_correction_bias",
}
"""Other names of modules by their places, replaced in this order; transformers writes
`attn.norm` for the published `attn.kv_norm`."""


def with_module_names(weights: Weights) -> Weights:
    """The weights by the names of transformers' modules: those of a published folder, of one that
    transformers wrote, or of its modules. Scales of codes are `weight_scale_inv`."""
    stored = weights.checkpoint.tensors
    tensors = {_module_name(name, stored): tensor for name, tensor in stored.items()}
    return replace(weights, checkpoint=replace(weights.checkpoint, tensors=tensors))


def _module_name(name: str, stored: Mapping[str, object]) -> str:
    base = name.removesuffix(".scale")
    if base != name and f"{base}.weight" in stored:
        name = f"{base}.weight_scale_inv"
    path = ".".join(_WORDS.get(part, part) for part in name.split("."))
    for published, module in _PLACES.items():
        path = path.replace(published, module)
    return path if path.startswith(("model.", "lm_head.")) else f"model.{path}"
