"""Inkling, its text: scores with profiles of distance, and four convolutions in each layer.

`profiled_attention.py` has the formulas of the attention, `sink_experts.py` those of experts and of
a layer. Norms follow the embedding; logits are of the vocabulary without its padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder, EmbeddingAndHead, EndScales, load_decoder
from ferryman.model.layers.decoder_layers import LayerPlace, Norm, load_norm
from ferryman.model.layers.profiled_attention import load_profiled_attention
from ferryman.model.layers.sink_experts import (
    ConvolvedLayer,
    load_convolved_layer,
    load_scaled_mlp,
    load_sink_mixture,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    read_layers,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import read_experts
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    DistanceShape,
    HeadNorm,
    LogGrowth,
    NoPositions,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape, MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import LayerConvShape
from ferryman.model.weights.linear import make_joined, padded_rows
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields, text_weights
from ferryman.model.weights.token_table import Embedding, PlainEmbedding

FULL, WINDOW = "hybrid", "hybrid_sliding"
PERIOD = 6
"""The last layer of six sees all positions, if a config does not list the layers."""

DEFAULTS: Mapping[str, Any] = {
    "head_dim": 128,
    "conv_kernel_size": 4,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 128,
    "sliding_window_size": 512,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 131072,
}
"""The meaning of fields that a config leaves out."""

_NAMES: Mapping[str, str] = {
    ".embed_norm.": ".embed_tokens.embed_norm.",
    ".embed.": ".embed_tokens.",
    "model.unembed.": "lm_head.",
    ".attn_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".attn.": ".self_attn.",
    ".wq_du.": ".q_proj.",
    ".wk_dv.": ".k_proj.",
    ".wv_dv.": ".v_proj.",
    ".wr_du.": ".r_proj.",
    ".wo_ud.": ".o_proj.",
    "_sconv.weight": "_sconv.conv1d.weight",
    ".w2_md.": ".down_proj.",
    ".experts.w2_weight": ".experts.down_proj",
    ".shared_w2_weight": ".down_proj",
    ".gate.bias": ".gate.e_score_correction_bias",
}
"""Parts of the names in published folders, and in those of transformers. Rows of gate and of up
take turns where a published name has "w13"."""

_PUBLISHED = "model.llm."


@dataclass(frozen=True, slots=True)
class InklingConfig:
    """Each layer's attention and term of distance. `has_experts` says which layers have experts,
    beside which a token always goes to `num_shared` more."""

    trunk: TrunkShape
    padded_vocab: int
    attentions: tuple[AttentionShape, ...]
    distances: tuple[DistanceShape, ...]
    conv_width: int
    mlp: MlpShape
    moe: MoeShape
    has_experts: tuple[bool, ...]
    num_shared: int
    scaling: float
    logits_scaling: float

    def conv(self, layer: int) -> LayerConvShape:
        attention = self.attentions[layer]
        return LayerConvShape(
            attention.kv_heads, attention.head_dim, self.trunk.hidden_dim, self.conv_width
        )

    @property
    def states(self) -> tuple[tuple[AttentionShape, LayerConvShape], ...]:
        return tuple(
            (attention, self.conv(layer)) for layer, attention in enumerate(self.attentions)
        )


def read_inkling(fields: ConfigFields) -> InklingConfig:
    """Inkling, its text: scores with profiles of distance, convolutions behind keys and layers."""
    fields = text_fields(fields)
    fields = fields.with_former(
        conv_kernel_size="sconv_kernel_size", max_position_embeddings="model_max_length"
    ).with_defaults(**DEFAULTS)
    _check(fields)
    # The rows behind the vocabulary are of no token, so no logit is made of them.
    padded_vocab = fields.whole("vocab_size")
    vocab_size = fields.with_defaults(unpadded_vocab_size=padded_vocab).whole("unpadded_vocab_size")
    trunk = read_trunk(
        replace(fields, raw={**fields.raw, "vocab_size": min(vocab_size, padded_vocab)})
    )
    mlp, moe = _widths(fields)
    are_windows = _windows(fields)
    readers = {True: _window(fields), False: _full(fields)}
    return InklingConfig(
        trunk=trunk,
        padded_vocab=padded_vocab,
        attentions=tuple(readers[is_window][0] for is_window in are_windows),
        distances=tuple(readers[is_window][1] for is_window in are_windows),
        conv_width=fields.whole("conv_kernel_size", least=2),
        mlp=mlp,
        moe=moe,
        has_experts=_experts(fields),
        num_shared=fields.whole("n_shared_experts", 2),
        scaling=fields.positive("route_scale", 8.0),
        logits_scaling=fields.positive("logits_mup_width_multiplier", 24.0),
    )


def _check(fields: ConfigFields) -> None:
    check_activation(fields)
    check_flags(
        fields,
        tie_word_embeddings=False,
        shared_expert_sink=True,
        use_sconv=True,
        use_embed_norm=True,
        use_gate_bias=True,
        use_global_scale=True,
        norm_after_topk=True,
        q_bias=False,
        o_bias=False,
    )
    if fields.raw.get("gate_activation", "sigmoid") != "sigmoid":
        raise fields.refusal("gate_activation", "'sigmoid', the one that routers here have")
    if fields.raw.get("final_logit_softcapping") is not None:
        raise fields.refusal("final_logit_softcapping", "null; no logits of Inkling are capped")


def _widths(fields: ConfigFields) -> tuple[MlpShape, MoeShape]:
    """Published configs have the experts' width in the field that is elsewhere the MLP's."""
    inner_dim = "moe_intermediate_size"
    dense = "intermediate_size"
    if fields.raw.get("dense_intermediate_size") is not None:
        inner_dim, dense = "intermediate_size", "dense_intermediate_size"
    moe = read_experts(fields, count="n_routed_experts", inner_dim=inner_dim)
    return MlpShape(fields.whole(dense), has_bias=False), moe


def _windows(fields: ConfigFields) -> tuple[bool, ...]:
    """True for each layer with a window."""
    if fields.raw.get("layer_types") is not None:
        return read_layers(fields, "layer_types", {WINDOW: True, FULL: False})
    num_layers = fields.whole("num_hidden_layers")
    if fields.raw.get("local_layer_ids") is None:
        return tuple((layer + 1) % PERIOD != 0 for layer in range(num_layers))
    local = fields.whole_list("local_layer_ids")
    if any(layer >= num_layers for layer in local):
        raise fields.refusal("local_layer_ids", f"a list of layers below {num_layers}")
    return tuple(layer in local for layer in range(num_layers))


def _experts(fields: ConfigFields) -> tuple[bool, ...]:
    """True for each layer with experts."""
    if fields.raw.get("mlp_layer_types") is not None:
        return read_layers(fields, "mlp_layer_types", {"sparse": True, "dense": False})
    num_dense = fields.whole("dense_mlp_idx", 0, least=0)
    return tuple(layer >= num_dense for layer in range(fields.whole("num_hidden_layers")))


Reader = tuple[AttentionShape, DistanceShape]


def _full(fields: ConfigFields) -> Reader:
    growth = None
    if fields.raw.get("log_scaling_n_floor") is not None:
        alpha = fields.positive("log_scaling_alpha", 0.1)
        growth = LogGrowth(alpha, fields.whole("log_scaling_n_floor"))
    distance = DistanceShape(fields.whole("d_rel", 16), fields.whole("rel_extent", 1024), growth)
    return _attention(fields, "", 0), distance


def _window(fields: ConfigFields) -> Reader:
    window_len = fields.whole("sliding_window_size")
    distance = DistanceShape(fields.whole("d_rel", 16), window_len, None)
    return _attention(fields, "swa_", window_len), distance


def _attention(fields: ConfigFields, prefix: str, window_len: int) -> AttentionShape:
    q_heads = fields.whole(f"{prefix}num_attention_heads")
    kv_heads = fields.whole(f"{prefix}num_key_value_heads")
    head_dim = fields.whole(f"{prefix}head_dim")
    if q_heads % kv_heads:
        raise fields.refusal(f"{prefix}num_key_value_heads", f"a divisor of {q_heads}")
    return AttentionShape(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=1.0 / head_dim,
        has_bias=False,
        positions=NoPositions(),
        window_len=window_len,
        head_norm=HeadNorm.EACH_HEAD,
    )


@dataclass(frozen=True, slots=True)
class NormedEmbedding:
    """The norm of a token's row of `inner`."""

    inner: Embedding
    norm: Norm

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.norm(self.inner(token_ids))


def load_inkling(config: InklingConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    weights = _in_one_layout(text_weights(weights))
    ends = _load_ends(config, weights)
    return load_decoder(
        config, manifest, ends, weights.under("model.layers"), partial(_layer, config)
    )


def _in_one_layout(weights: Weights) -> Weights:
    """Adds the names of transformers to the tensors of a published folder."""
    renamed = {}
    for name, stored in weights.checkpoint.tensors.items():
        if name.startswith(_PUBLISHED):
            ours = "model." + name.removeprefix(_PUBLISHED)
            for published, plain in _NAMES.items():
                ours = ours.replace(published, plain)
            renamed[ours] = stored
    tensors = {**weights.checkpoint.tensors, **renamed}
    return replace(weights, checkpoint=replace(weights.checkpoint, tensors=tensors))


def _load_ends(config: InklingConfig, weights: Weights) -> EmbeddingAndHead:
    """Both tables have rows behind the vocabulary, which no token and no logit has."""
    trunk, group = config.trunk, weights.group
    size, dim, eps = trunk.vocab_size, trunk.hidden_dim, trunk.norm_eps

    def rows(table: Tensor) -> Tensor:
        return table.narrow(0, 0, size)

    shape = config.padded_vocab, dim
    embedded = weights.tensor("model.embed_tokens.weight", *shape, part=rows)
    head = weights.tensor(
        "lm_head.weight", *shape, part=lambda table: padded_rows(rows(table), group)
    )
    return EmbeddingAndHead(
        embedding=NormedEmbedding(
            PlainEmbedding(embedded), load_norm(weights, "model.embed_tokens.embed_norm", dim, eps)
        ),
        norm=load_norm(weights, "model.norm", dim, eps),
        head=make_joined(head, size, group, None),
        scales=EndScales(logits_scaling=config.logits_scaling),
    )


def _layer(config: InklingConfig, weights: Weights, place: LayerPlace) -> ConvolvedLayer:
    layer, dim, inside = place.layer, place.hidden_dim, weights.under("mlp")
    conv = config.conv(layer)
    mixer = load_profiled_attention(
        weights.under("self_attn"),
        config.attentions[layer],
        config.distances[layer],
        conv,
        place,
    )
    if config.has_experts[layer]:
        mixture = load_sink_mixture(inside, config.moe, config.num_shared, config.scaling, dim)
        return load_convolved_layer(weights, place, mixer, mixture, conv)
    mlp = load_scaled_mlp(inside, config.mlp, dim)
    return load_convolved_layer(weights, place, mixer, mlp, conv)
