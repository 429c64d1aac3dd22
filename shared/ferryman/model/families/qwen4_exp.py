"""Qwen 4 Exp's text: gated delta nets, attention to blocks that an indexer chooses, mixed streams.

Residual streams are mixed by products, which stand in place of the norms before a layer's parts.
Some layers look up n-grams of the last tokens. Norms store the distance of their weights from one,
but for those inside delta nets. The layer for multi-token prediction, under "mtp", is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.qwen import read_shared_moe
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.block_sparse import BlockSparseAttention
from ferryman.model.layers.decoder import Decoder, EmbeddingAndHead, EndScales, load_layers
from ferryman.model.layers.decoder_layers import Layer, LayerPlace, Mixer, PathLayer
from ferryman.model.layers.delta import load_delta
from ferryman.model.layers.gated_streams import (
    GatedStreamsShape,
    MixedStreamsNorm,
    MixedStreamsPath,
    load_stream_mixer,
)
from ferryman.model.layers.hidden_streams import SpreadLayer
from ferryman.model.layers.hyper_connections import CopiedStreams
from ferryman.model.layers.mean_index import load_mean_indexer
from ferryman.model.layers.moe import load_routed
from ferryman.model.layers.ngrams import NgramLayer, load_ngrams
from ferryman.model.readers.config_readers import (
    check_activation,
    read_attention,
    read_delta,
    read_layers,
    read_rotary,
    read_trunk,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm, RotaryPositions
from ferryman.model.shapes.config_fields import TOKEN_IDS, ConfigFields
from ferryman.model.shapes.delta_shapes import DeltaGate, DeltaLayout, DeltaShape
from ferryman.model.shapes.feed_forward_shapes import MixtureShape
from ferryman.model.shapes.model_shapes import StateShape, TrunkShape
from ferryman.model.shapes.ngram_shapes import ID_BYTES, NgramShape
from ferryman.model.shapes.row_shapes import MeanIndexShape
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields, text_weights
from ferryman.model.weights.token_table import load_embedding, load_head

NORM_ORIGIN = 1.0
IS_SPARSE = {"full_attention": True, "indexed_attention": True, "linear_attention": False}
GATES = {"silu": DeltaGate.SILU, "sigmoid": DeltaGate.SIGMOID}
NGRAM_IDS = "ple_layer_ids"

DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4,
    "hc_count": 4,
    "hc_lowrank": 320,
    "output_gate_type": "silu",
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 512,
    "seed": 1234,
    "ple_conv_kernel_size": 4,
}
"""The meaning of fields that a config leaves out."""


@dataclass(frozen=True, slots=True)
class Qwen4ExpConfig:
    """`mixers` and `ngrams` have an entry for each layer; `index` is the indexer beside
    attention."""

    trunk: TrunkShape
    mixers: tuple[AttentionShape | DeltaShape, ...]
    index: MeanIndexShape
    ngrams: tuple[NgramShape | None, ...]
    experts: MixtureShape
    streams: GatedStreamsShape

    @property
    def states(self) -> tuple[tuple[StateShape, ...], ...]:
        return tuple(
            (mixer, self.index) if isinstance(mixer, AttentionShape) else _with_ngrams(mixer, ngram)
            for mixer, ngram in zip(self.mixers, self.ngrams, strict=True)
        )


def _with_ngrams(mixer: DeltaShape, ngrams: NgramShape | None) -> tuple[StateShape, ...]:
    return (mixer,) if ngrams is None else (mixer, ngrams)


def read_qwen4_exp(whole: ConfigFields) -> Qwen4ExpConfig:
    """Qwen 4 Exp's text: delta nets, attention to blocks chosen by their mean, mixed streams"""
    fields = text_fields(whole).with_defaults(**DEFAULTS)
    check_activation(fields)
    trunk, mixers = read_trunk(fields), _read_mixers(fields)
    streams = GatedStreamsShape(fields.whole("hc_count", least=2), fields.whole("hc_lowrank"))
    return Qwen4ExpConfig(
        trunk=trunk,
        mixers=mixers,
        index=_read_index(fields),
        ngrams=_read_ngrams(fields, trunk, streams, mixers),
        experts=read_shared_moe(fields, shares_sum_to_one=fields.flag("norm_topk_prob", True)),
        streams=streams,
    )


def _read_positions(fields: ConfigFields) -> RotaryPositions:
    """A text token has one position where an image has three, so those of three axes are plain."""
    return read_rotary(fields, default_factor=1.0)


def _read_mixers(fields: ConfigFields) -> tuple[AttentionShape | DeltaShape, ...]:
    """The mixers by "layer_types", or attention in every `full_attention_interval`-th layer."""
    plain = read_attention(fields, fields.whole("head_dim") ** -0.5, _read_positions(fields))
    attention = replace(plain, head_norm=HeadNorm.EACH_HEAD, gates_output=True)
    word = fields.raw["output_gate_type"]
    if word not in tuple(GATES):
        raise fields.refusal("output_gate_type", f"one of {', '.join(GATES)}")
    delta = replace(read_delta(fields, DeltaLayout.BY_ROLE), gate=GATES[word])
    if fields.raw.get("layer_types") is None:
        interval = fields.whole("full_attention_interval")
        layers = range(fields.whole("num_hidden_layers"))
        return tuple(delta if (layer + 1) % interval else attention for layer in layers)
    is_sparse = read_layers(fields, "layer_types", IS_SPARSE)
    return tuple(attention if has_index else delta for has_index in is_sparse)


def _read_index(fields: ConfigFields) -> MeanIndexShape:
    if fields.whole("indexer_kv_heads") != 1:
        raise fields.refusal("indexer_kv_heads", "1: one index key a token")
    length, budget = fields.whole("indexer_compress_ratio"), fields.whole("indexer_budget")
    if budget % length:
        raise fields.refusal("indexer_budget", f"a multiple of indexer_compress_ratio {length}")
    head_dim, turning = fields.whole("indexer_head_dim"), _read_positions(fields).rotary_dim
    if head_dim < turning:
        expected = f"at least {turning}, which turn by head_dim and partial_rotary_factor"
        raise fields.refusal("indexer_head_dim", expected)
    return MeanIndexShape(fields.whole("indexer_n_heads"), head_dim, length, budget // length)


def _read_ngrams(
    fields: ConfigFields,
    trunk: TrunkShape,
    streams: GatedStreamsShape,
    mixers: tuple[AttentionShape | DeltaShape, ...],
) -> tuple[NgramShape | None, ...]:
    """The n-grams of the layers that "ple_layer_ids" counts from 1."""
    ids = sorted(set(fields.whole_list(NGRAM_IDS)))
    is_delta = [isinstance(mixer, DeltaShape) for mixer in mixers]
    if any(not 0 < number <= len(mixers) or not is_delta[number - 1] for number in ids):
        raise fields.refusal(NGRAM_IDS, "numbers of layers with linear attention, from 1 on")
    ngrams = {number - 1: _read_ngram(fields, trunk, streams, at) for at, number in enumerate(ids)}
    return tuple(ngrams.get(layer) for layer in range(len(mixers)))


def _read_ngram(
    fields: ConfigFields, trunk: TrunkShape, streams: GatedStreamsShape, number: int
) -> NgramShape:
    order, heads = fields.whole("ngram_size", least=2), fields.whole("heads_per_ngram")
    embed_dim = fields.whole("ple_embed_dim", trunk.hidden_dim)
    if embed_dim % ((order - 1) * heads):
        raise fields.refusal("ple_embed_dim", f"a multiple of {(order - 1) * heads} heads")
    separators = fields.whole_list("eos_token_id", TOKEN_IDS)
    # A slot keeps so many bytes of an id.
    most = 256**ID_BYTES
    if not separators or separators[0] >= trunk.vocab_size:
        # N-grams begin anew behind it.
        raise fields.refusal("eos_token_id", f"a token id below vocab_size beside {NGRAM_IDS}")
    if trunk.vocab_size > most:
        raise fields.refusal("vocab_size", f"at most {most} beside {NGRAM_IDS}")
    return NgramShape(
        number=number,
        order=order,
        heads=heads,
        least_rows=fields.whole("ngram_vocab_size_base"),
        row_multiple=fields.whole("make_ngram_vocab_size_divisible_by"),
        table_parts=fields.whole("split_ngram_parts"),
        seed=fields.whole("seed", least=0),
        vocab_size=trunk.vocab_size,
        separator=separators[0],
        embed_dim=embed_dim,
        conv_taps=fields.whole("ple_conv_kernel_size", least=2),
        streams=streams.count,
        hidden_dim=trunk.hidden_dim,
    )


def load_qwen4_exp(config: Qwen4ExpConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    """The model, or the text model of a folder whose model also reads images."""
    text = text_weights(weights)
    model, layer = text.under("model"), partial(_layer, config)
    loaded = load_layers(config, manifest, model.under("layers"), layer, NORM_ORIGIN)
    first, *others = loaded
    spread = SpreadLayer(CopiedStreams(config.streams.count), first)
    return Decoder(config, manifest, _load_ends(config, text), (spread, *others))


def _load_ends(config: Qwen4ExpConfig, weights: Weights) -> EmbeddingAndHead:
    trunk, model = config.trunk, weights.under("model")
    place = LayerPlace(trunk.num_layers, trunk.hidden_dim, trunk.norm_eps, 1, NORM_ORIGIN)
    mixer = load_stream_mixer(
        model.under("hyper_connection_mixer"), config.streams, place, writes=False
    )
    embedding = load_embedding(model, "embed_tokens.weight", trunk)
    head = load_head(weights, embedding, trunk)
    return EmbeddingAndHead(embedding, MixedStreamsNorm(mixer), head, EndScales())


def _layer(config: Qwen4ExpConfig, weights: Weights, place: LayerPlace) -> Layer:
    mixer_path, feed_forward_path = (
        MixedStreamsPath(load_stream_mixer(weights.under(name), config.streams, place))
        for name in ("attn_hyper_connection", "mlp_hyper_connection")
    )
    feed_forward = load_routed(weights.under("mlp"), config.experts, place.hidden_dim)
    mixer = _mixer(config, weights, place)
    layer = PathLayer(mixer_path, mixer, feed_forward_path, feed_forward)
    ngrams = config.ngrams[place.layer]
    if ngrams is None:
        return layer
    return NgramLayer(load_ngrams(weights.under("ple"), ngrams, place), layer)


def _mixer(config: Qwen4ExpConfig, weights: Weights, place: LayerPlace) -> Mixer:
    shape = config.mixers[place.layer]
    if isinstance(shape, DeltaShape):
        return load_delta(weights.under("linear_attn"), shape, place)
    under = weights.under("self_attn")
    indexer = load_mean_indexer(under.under("indexer"), config.index, shape, place)
    return BlockSparseAttention(load_attention(under, shape, place), indexer)
