"""Qwen3-Next: gated delta nets, some layers of gated attention, experts beside a shared one.

Norm weights are stored as their distance from one, except in the norm inside a delta net. The
layer for multi-token prediction, under "mtp", has gated attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family, MtpSource
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import DecoderLayer, LayerPlace, load_norm
from ferryman.model.layers.mixers import load_mixer
from ferryman.model.layers.mtp import (
    QWEN_NAMES,
    MtpHead,
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
from ferryman.model.readers.transformer_readers import read_experts
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.delta_shapes import DeltaLayout, DeltaShape
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    MixtureShape,
    MlpShape,
    SoftmaxRouting,
)
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights

NORM_ORIGIN = 1.0


@dataclass(frozen=True, slots=True)
class QwenHybridConfig:
    """A mixer and a feed-forward for each layer."""

    trunk: TrunkShape
    mixers: tuple[AttentionShape | DeltaShape, ...]
    feed_forwards: tuple[FeedForwardShape, ...]

    @property
    def states(self) -> tuple[tuple[AttentionShape | DeltaShape], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def _read(fields: ConfigFields) -> QwenHybridConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    return QwenHybridConfig(
        trunk, read_mixers(fields, DeltaLayout.BY_KEY_HEAD), _feed_forwards(fields, trunk)
    )


def read_mixers(
    fields: ConfigFields, layout: DeltaLayout
) -> tuple[AttentionShape | DeltaShape, ...]:
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


def _feed_forwards(fields: ConfigFields, trunk: TrunkShape) -> tuple[FeedForwardShape, ...]:
    """Experts in every `decoder_sparse_step`-th layer that "mlp_only_layers" does not name."""
    step, dense = fields.whole("decoder_sparse_step", 1), fields.whole_list("mlp_only_layers")
    num_experts = fields.whole("num_experts", least=0)
    return tuple(
        read_mlp(fields)
        if num_experts == 0 or layer in dense or (layer + 1) % step
        else read_shared_moe(fields, shares_sum_to_one=fields.flag("norm_topk_prob", True))
        for layer in range(trunk.num_layers)
    )


def read_shared_moe(fields: ConfigFields, *, shares_sum_to_one: bool) -> MixtureShape:
    """Experts of `moe_intermediate_size` beside one of `shared_expert_intermediate_size`."""
    shared = MlpShape(fields.whole("shared_expert_intermediate_size"), has_bias=False)
    routing = SoftmaxRouting(shares_sum_to_one)
    return MixtureShape(read_experts(fields), routing, shared, gates_shared=True)


def load_qwen_hybrid(
    config: QwenHybridConfig, manifest: StateManifest, weights: Weights, root: str = "model"
) -> Decoder:
    """The decoder with layers under `root`."""
    ends = load_embedding_and_head(
        weights,
        config.trunk,
        f"{root}.norm.weight",
        EndScales(),
        embedded=f"{root}.embed_tokens.weight",
        load_norm=partial(load_norm, origin=NORM_ORIGIN),
    )
    return load_decoder(
        config,
        manifest,
        ends,
        weights.under(f"{root}.layers"),
        partial(_layer, config),
        NORM_ORIGIN,
    )


def _layer(config: QwenHybridConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    dim, eps = place.hidden_dim, place.norm_eps
    return DecoderLayer(
        mixer_norm=load_norm(weights, "input_layernorm", dim, eps, place.norm_origin),
        mixer=load_mixer(weights, config.mixers[place.layer], place),
        feed_forward_norm=load_norm(
            weights, "post_attention_layernorm", dim, eps, place.norm_origin
        ),
        feed_forward=load_feed_forward(weights, config.feed_forwards[place.layer], dim),
    )


def qwen_attention(config: QwenHybridConfig) -> AttentionShape:
    """The attention of the layer for multi-token prediction."""
    return attention_like(config.states)


def load_qwen_mtp(config: QwenHybridConfig, weights: Weights, place: LayerPlace) -> MtpHead:
    """The layer for multi-token prediction under "mtp"."""
    place, inside = replace(place, norm_origin=NORM_ORIGIN), weights.under("mtp")
    longer = replace(
        config,
        mixers=(*config.mixers, qwen_attention(config)),
        # Published code numbers this layer 0 where it asks which layers have experts.
        feed_forwards=(*config.feed_forwards, config.feed_forwards[0]),
    )
    return MtpHead(
        load_entry_input(inside, QWEN_NAMES, place),
        _layer(longer, inside.under("layers.0"), place),
        load_norm(inside, "norm", place.hidden_dim, place.norm_eps, NORM_ORIGIN),
    )


# Published configs do not count the layer; a checkpoint without it lacks its tensors.
MTP = MtpSource(
    partial(check_one_layer, name="num_nextn_predict_layers", default=1),
    qwen_attention,
    load_qwen_mtp,
)
FAMILY = Family(("Qwen3NextForCausalLM",), _read, load_qwen_hybrid, mtp=MTP)
