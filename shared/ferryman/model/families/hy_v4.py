"""HY V4: DeepSeek-V3.2 with hyper-connections, and gates and sinks in its attention.

`hyper_connections.py` has the formulas of the residual path. Indexers are shared as in GLM-5.2.
Gate and up of routed experts are cut at a limit. Neighbouring channels turn, as in other servers of
the published model; transformers turns halves (docs/decisions/0201). The layer for multi-token
prediction is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.deepseek import (
    SparseDeepseekConfig,
    read_deepseek_v3,
    with_whole_turns,
)
from ferryman.model.layers.decoder import Decoder, EmbeddingAndHead, EndScales, load_layers
from ferryman.model.layers.decoder_layers import FeedForward, LayerPlace, load_norm
from ferryman.model.layers.expert_router import RouterNames
from ferryman.model.layers.hidden_streams import SpreadLayer
from ferryman.model.layers.hyper_connections import (
    CopiedStreams,
    GateNames,
    HyperPath,
    HyperShape,
    ReadStreamsNorm,
    load_end_gates,
    load_part_gates,
)
from ferryman.model.layers.mlp import ClampedSwiglu, load_gated_mlp
from ferryman.model.layers.moe import load_grouped_mixture
from ferryman.model.layers.sparse_latent import (
    PlacedLayer,
    SparsePart,
    joined_by_index,
    load_indexer,
    load_placed_attention,
)
from ferryman.model.readers.config_readers import check_flags, read_layers
from ferryman.model.shapes.attention_shapes import GateActivation, GateShape, IndexShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MixtureShape
from ferryman.model.shapes.model_shapes import StateShape, TrunkShape
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.token_table import load_embedding, load_wide_head

GATE = "gate_proj"
STORED_GATE = "linear_gate"
"""The published name of the attention's gate. transformers calls it `gate_proj`, and writes the
published name for gates of MLPs, too."""

PATHS = {"mixer": ("hc_attn_layer", "attn_hc"), "feed_forward": ("hc_mlp_layer", "ffn_hc")}
"""The published names of a path's gates, and the names of its module in transformers."""

DEFAULTS: Mapping[str, Any] = {
    "rope_interleave": True,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.827,
    "hc_magnitude": 2.0,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
}
"""The meaning of fields that a config leaves out."""


@dataclass(frozen=True, slots=True)
class HyV4Config:
    """`sparse` is the model without its streams; experts are cut at `swiglu_limit`."""

    sparse: SparseDeepseekConfig
    streams: HyperShape
    swiglu_limit: float

    @property
    def trunk(self) -> TrunkShape:
        return self.sparse.trunk

    @property
    def states(self) -> tuple[tuple[StateShape, ...], ...]:
        return self.sparse.states


def read_hy_v4(config: ConfigFields) -> HyV4Config:
    """HY V4: DeepSeek-V3.2 with four residual streams, gated attention with sinks, cut experts."""
    fields = _with_meanings(config)
    check_flags(
        fields,
        enable_ihc=True,
        gated_mla=True,
        learnable_sink=True,
        enable_lm_head_fp32=True,
    )
    if fields.raw.get("gating_type", "elementwise") != "elementwise":
        raise fields.refusal("gating_type", "'elementwise'")
    streams = HyperShape(
        fields.whole("hc_mult", 4), fields.positive("hc_magnitude"), fields.positive("hc_eps")
    )
    return HyV4Config(_read_sparse(fields), streams, fields.positive("swiglu_limit"))


def _with_meanings(config: ConfigFields) -> ConfigFields:
    """The fields as DeepSeek's readers understand them. The number of key heads says nothing:
    transformers takes that of all heads, and the published config has another one."""
    fields = with_whole_turns(config.with_defaults(**DEFAULTS))
    raw = {name: value for name, value in fields.raw.items() if name != "num_key_value_heads"}
    return ConfigFields(config.source, raw)


def _read_indexers(fields: ConfigFields) -> tuple[bool, ...]:
    """True for layers with an indexer: by a list, or else the first two and every fourth."""
    name = "indexer_types"
    if fields.raw.get(name) is None:
        layers = range(fields.whole("num_hidden_layers"))
        return tuple(layer == 0 or layer % 4 == 1 for layer in layers)
    has_indexer = read_layers(fields, name, {"full": True, "shared": False})
    if not has_indexer[0]:
        raise fields.refusal(name, "such that the first layer has an indexer")
    return has_indexer


def _read_sparse(fields: ConfigFields) -> SparseDeepseekConfig:
    fields.whole("q_lora_rank")  # the indexer computes its queries from that latent
    if fields.raw.get("layer_types") is not None:
        words = ("indexed_attention", "deepseek_sparse_attention")
        read_layers(fields, "layer_types", dict.fromkeys(words))
    dense = read_deepseek_v3(fields)
    gate = GateShape(GATE, GateActivation.SIGMOID)
    attention = replace(dense.attention, gate=gate, has_sinks=True)
    index = IndexShape(
        heads=fields.whole("index_n_heads"),
        head_dim=fields.whole("index_head_dim"),
        count=fields.whole("index_topk"),
        is_interleaved=fields.flag("indexer_rope_interleave", True),
        turns_last=True,
        norm_eps=dense.trunk.norm_eps,
    )
    if index.head_dim < attention.rope_dim:
        raise fields.refusal("index_head_dim", f"at least {attention.rope_dim}, which turn")
    return SparseDeepseekConfig(replace(dense, attention=attention), index, _read_indexers(fields))


def load_hy_v4(config: HyV4Config, manifest: StateManifest, weights: Weights) -> Decoder:
    model = weights.under("model")
    parts = load_layers(config, manifest, model.under("layers"), partial(_load_part, config))
    first, *others = joined_by_index(parts)
    spread = SpreadLayer(CopiedStreams(config.streams.count), first)
    return Decoder(config, manifest, _load_ends(config, weights), (spread, *others))


def _load_ends(config: HyV4Config, weights: Weights) -> EmbeddingAndHead:
    """The head's weight is in the accumulation dtype, as in transformers."""
    trunk, model = config.trunk, weights.under("model")
    names = _gate_names(model, "hc_head.hc_head_{}", "hc_pre.hc_head.hc_head_{}", "hc_head.hc_{}")
    norm = ReadStreamsNorm(
        load_end_gates(model, names, config.streams, trunk),
        load_norm(model, "norm", trunk.hidden_dim, trunk.norm_eps),
    )
    embedding = load_embedding(model, "embed_tokens.weight", trunk)
    head = load_wide_head(weights, embedding, trunk)
    return EmbeddingAndHead(embedding, norm, head, EndScales())


def _gate_names(weights: Weights, *forms: str) -> GateNames:
    """The tensors of gates, by the first of `forms` that the checkpoint has: those of a published
    folder, of one that transformers wrote, and of its modules."""
    form = next((form for form in forms if weights.has(form.format("fn"))), forms[0])
    return form.format("fn"), form.format("base"), form.format("scale")


def _load_part(config: HyV4Config, weights: Weights, place: LayerPlace) -> SparsePart:
    sparse, under = config.sparse, _with_gate_name(weights.under("self_attn"))
    shape = sparse.dense.attention
    attention = load_placed_attention(under, shape, place)
    path = partial(_load_path, config, weights, place)
    layer = PlacedLayer(
        mixer_path=path("mixer", "input_layernorm"),
        attention=attention,
        feed_forward_path=path("feed_forward", "post_attention_layernorm"),
        feed_forward=_load_feed_forward(config, weights.under("mlp"), place),
    )
    if not sparse.has_indexer[place.layer]:
        return layer, None
    return layer, load_indexer(under.under("indexer"), attention, shape, sparse.index, place)


def _with_gate_name(weights: Weights, *parts: str) -> Weights:
    """The weights, whose gates may have the published name; `parts` lead to a module with one."""
    module = weights
    for part in parts:
        module = module.under(part)
    return weights.called({GATE: STORED_GATE}) if module.has_module(STORED_GATE) else weights


def _load_path(
    config: HyV4Config, weights: Weights, place: LayerPlace, part: str, norm: str
) -> HyperPath:
    published, module = PATHS[part]
    forms = (f"{published}.hc_pre.hc_{{}}", f"hc_pre.{published}.hc_{{}}", f"{module}.{{}}")
    names = _gate_names(weights, *forms)
    gates = load_part_gates(weights, names, config.streams, config.trunk)
    return HyperPath(gates, load_norm(weights, norm, place.hidden_dim, place.norm_eps))


def _load_feed_forward(config: HyV4Config, weights: Weights, place: LayerPlace) -> FeedForward:
    dense = config.sparse.dense
    if not dense.has_experts[place.layer]:
        return load_gated_mlp(_with_gate_name(weights), dense.mlp, place.hidden_dim)
    shape = MixtureShape(dense.experts, dense.routing, dense.shared_mlp)
    return load_grouped_mixture(
        _with_gate_name(weights, "shared_experts"),
        shape,
        place.hidden_dim,
        RouterNames(("gate.weight",), ("gate.e_score_correction_bias",)),
        act=ClampedSwiglu(alpha=1.0, limit=config.swiglu_limit, added=0.0),
    )
