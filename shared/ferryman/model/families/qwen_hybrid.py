"""Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in some layers.

Norm weights are stored as their distance from one, except in the norm inside a delta net. The
layer for multi-token prediction, under "mtp", has gated attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.qwen import read_shared_moe
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    LayerPlace,
    load_decoder_layer,
    load_norm,
)
from ferryman.model.layers.mixers import load_mixer
from ferryman.model.layers.mtp import (
    QWEN_NAMES,
    MtpHead,
    MtpSource,
    attention_like,
    check_one_layer,
    load_entry_input,
)
from ferryman.model.layers.transformer import load_feed_forward
from ferryman.model.readers.config_readers import (
    check_activation,
    read_attention,
    read_delta,
    read_layers,
    read_mlp,
    read_rotary,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import read_sparse_layers
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.delta_shapes import DeltaLayout, DeltaShape
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights

NORM_ORIGIN = 1.0
NESTED_ROOT = "model.language_model"


@dataclass(frozen=True, slots=True)
class QwenHybridConfig:
    """A mixer and a feed-forward for each layer."""

    trunk: TrunkShape
    mixers: tuple[AttentionShape | DeltaShape, ...]
    feed_forwards: tuple[FeedForwardShape, ...]

    @property
    def states(self) -> tuple[tuple[AttentionShape | DeltaShape], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def read_qwen3_next(fields: ConfigFields) -> QwenHybridConfig:
    """Qwen3-Next: gated delta nets, some layers of gated attention, experts beside a shared one."""
    check_activation(fields)
    trunk, num_experts = read_trunk(fields), fields.whole("num_experts", least=0)
    feed_forwards = tuple(
        read_shared_moe(fields, shares_sum_to_one=fields.flag("norm_topk_prob", True))
        if is_sparse and num_experts
        else read_mlp(fields)
        for is_sparse in read_sparse_layers(fields)
    )
    return QwenHybridConfig(trunk, _mixers(fields, DeltaLayout.BY_KEY_HEAD), feed_forwards)


def read_qwen3_5(fields: ConfigFields) -> QwenHybridConfig:
    """Qwen3.5, its text part: Qwen3-Next with other in-projections, dense or all with experts.

    It is published as a model that also reads images: the text config is in "text_config", the
    tensors are under "model.language_model", and the vision tower is not read. A text token has one
    position where an image has three, so the interleaved rotary positions of three axes become
    plain ones.
    """
    fields = fields.merged_with("text_config")
    check_activation(fields)
    trunk = read_trunk(fields)
    has_experts = "num_experts" in fields.raw
    feed_forward = (
        read_shared_moe(fields, shares_sum_to_one=True) if has_experts else read_mlp(fields)
    )
    return QwenHybridConfig(
        trunk, _mixers(fields, DeltaLayout.BY_ROLE), (feed_forward,) * trunk.num_layers
    )


def _mixers(fields: ConfigFields, layout: DeltaLayout) -> tuple[AttentionShape | DeltaShape, ...]:
    """The mixers by "layer_types", or attention in every `full_attention_interval`-th layer."""
    scale = fields.whole("head_dim") ** -0.5
    plain = read_attention(fields, scale, read_rotary(fields, default_factor=0.25))
    attention = replace(plain, head_norm=HeadNorm.EACH_HEAD, gates_output=True)
    delta = read_delta(fields, layout)
    if fields.raw.get("layer_types") is not None:
        meanings: dict[str, AttentionShape | DeltaShape] = {
            "full_attention": attention,
            "linear_attention": delta,
        }
        return read_layers(fields, "layer_types", meanings)
    interval = fields.whole("full_attention_interval", 4)
    return tuple(
        delta if (layer + 1) % interval else attention
        for layer in range(fields.whole("num_hidden_layers"))
    )


def load_qwen_hybrid(
    config: QwenHybridConfig, manifest: StateManifest, weights: Weights
) -> Decoder:
    """The decoder with layers under "model", or where an image model has its text model."""
    is_nested = f"{NESTED_ROOT}.embed_tokens.weight" in weights.checkpoint.tensors
    root = NESTED_ROOT if is_nested else "model"
    ends = load_embedding_and_head(
        weights,
        config.trunk,
        f"{root}.norm.weight",
        EndScales(),
        embedded=f"{root}.embed_tokens.weight",
        load_norm=partial(load_norm, origin=NORM_ORIGIN),
    )
    layers, load_layer = weights.under(f"{root}.layers"), partial(_layer, config)
    return load_decoder(config, manifest, ends, layers, load_layer, NORM_ORIGIN)


def _layer(config: QwenHybridConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mixer = load_mixer(weights, config.mixers[place.layer], place)
    shape = config.feed_forwards[place.layer]
    feed_forward = load_feed_forward(weights, shape, place.hidden_dim)
    return load_decoder_layer(weights, place, mixer, feed_forward)


def _mtp_attention(config: QwenHybridConfig) -> AttentionShape:
    """The attention of the layer for multi-token prediction."""
    return attention_like(config.states)


def _load_mtp(config: QwenHybridConfig, weights: Weights, place: LayerPlace) -> MtpHead:
    """The layer for multi-token prediction under "mtp"."""
    place, inside = replace(place, norm_origin=NORM_ORIGIN), weights.under("mtp")
    longer = replace(
        config,
        mixers=(*config.mixers, _mtp_attention(config)),
        # Published code numbers this layer 0 where it asks which layers have experts.
        feed_forwards=(*config.feed_forwards, config.feed_forwards[0]),
    )
    return MtpHead(
        load_entry_input(inside, QWEN_NAMES, place),
        _layer(longer, inside.under("layers.0"), place),
        load_norm(inside, "norm", place.hidden_dim, place.norm_eps, NORM_ORIGIN),
    )


def _check_nested_mtp(fields: ConfigFields) -> None:
    fields = fields.merged_with("text_config")
    check_one_layer(fields, "mtp_num_hidden_layers")
    if fields.flag("mtp_use_dedicated_embeddings", False):
        raise fields.refusal("mtp_use_dedicated_embeddings", "false for --draft mtp")


# Published configs of Qwen3-Next do not count the layer; a checkpoint without it lacks its tensors.
QWEN3_NEXT_MTP = MtpSource(
    partial(check_one_layer, name="num_nextn_predict_layers", default=1), _mtp_attention, _load_mtp
)
QWEN3_5_MTP = MtpSource(_check_nested_mtp, _mtp_attention, _load_mtp)
