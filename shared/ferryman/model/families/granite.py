"""Granite 3 and 4 and Bamba: transformers with multipliers, and hybrids of Mamba-2 and attention.

hidden += residual_multiplier · mixer(norm(hidden))
hidden += residual_multiplier · (experts + shared)(norm(hidden))

The embedding and the logits have multipliers of their own; those of Bamba are 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    load_decoder_layer,
)
from ferryman.model.layers.mixers import MixerShape, load_mixer
from ferryman.model.layers.mlp import GatedMlp, gate_and_up, load_gated_mlp
from ferryman.model.layers.moe import ExpertsBesideShared, load_experts
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    read_attention,
    read_layers,
    read_mamba,
    read_mlp,
    read_rotary,
    read_trunk,
    read_used,
)
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions, RotaryPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    MixtureShape,
    MlpShape,
    MoeShape,
    SoftmaxRouting,
)
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.ranks import slice_of
from ferryman.model.shapes.rotary import read_theta
from ferryman.model.weights.matrix import join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights

WITH_EXPERTS = "GraniteMoeForCausalLM"
WITH_SHARED = "GraniteMoeSharedForCausalLM"
EXPERTS_IN_WINDOWS = "GraniteMoeSWAForCausalLM"
GRANITE_SWA_PERIOD = 4


def read_granite3(fields: ConfigFields) -> TransformerConfig:
    """Granite 3, dense or with experts: Llama with multipliers at its ends and residual paths.

    GraniteMoeShared has an MLP beside its experts that every token goes through.
    """
    check_activation(fields)
    attention = _attention(fields, uses_rope=True)
    return replace(
        uniform_transformer(read_trunk(fields), attention, _feed_forward(fields)),
        scales=_end_scales(fields),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
    )


def read_granite_swa(fields: ConfigFields) -> TransformerConfig:
    """Granite with sinks and windows in three of four layers, dense or with experts.

    "layer_rope_theta" has the base of each layer's waves; a layer of base 0 has no positions.
    """
    period = GRANITE_SWA_PERIOD
    full = replace(_attention(fields, uses_rope=True), has_sinks=True)
    windows = read_windows(fields, full, lambda layer: layer % period != 0)
    positions = _positions_of_layers(fields)
    return replace(
        read_granite3(fields),
        attention=tuple(
            replace(shape, positions=turning)
            for shape, turning in zip(windows, positions, strict=True)
        ),
    )


def _positions_of_layers(fields: ConfigFields) -> tuple[RotaryPositions | NoPositions, ...]:
    num_layers, common = fields.whole("num_hidden_layers"), read_rotary(fields, default_factor=1.0)
    bases = fields.raw.get("layer_rope_theta")
    if bases is None:
        return (common,) * num_layers
    if not isinstance(bases, list) or len(bases) != num_layers:
        raise fields.refusal("layer_rope_theta", f"a list of {num_layers} numbers")
    # Zero is no base, and `positive` refuses it: those layers are told apart before.
    turning = [ConfigFields(fields.source, {"layer_rope_theta": base}) for base in bases]
    return tuple(
        replace(common, theta=read_theta(base, 0.0, "layer_rope_theta"))
        if base.raw["layer_rope_theta"]
        else NoPositions()
        for base in turning
    )


def _attention(fields: ConfigFields, *, uses_rope: bool) -> AttentionShape:
    positions = read_rotary(fields, default_factor=1.0) if uses_rope else NoPositions()
    return read_attention(fields, fields.positive("attention_multiplier", 1.0), positions)


def _end_scales(fields: ConfigFields) -> EndScales:
    return EndScales(
        fields.positive("embedding_multiplier", 1.0), fields.positive("logits_scaling", 1.0)
    )


def _feed_forward(fields: ConfigFields) -> FeedForwardShape:
    names = fields.words("architectures")
    if not {WITH_EXPERTS, WITH_SHARED, EXPERTS_IN_WINDOWS} & set(names):
        return read_mlp(fields)
    routing, shared_dim = SoftmaxRouting(shares_sum_to_one=True), 0
    if WITH_EXPERTS not in names:
        shared_dim = fields.whole("shared_intermediate_size", 0, least=0)
    shared = MlpShape(shared_dim, has_bias=False) if shared_dim else None
    return MixtureShape(_experts(fields), routing, shared)


def _experts(fields: ConfigFields) -> MoeShape:
    return read_experts(fields, count="num_local_experts", inner_dim="intermediate_size")


def _load_mlp_or_mixture(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MixtureShape):
        return load_gated_mlp(weights.under("mlp"), shape, hidden_dim)
    routed = load_experts(weights.under("block_sparse_moe"), shape.experts, hidden_dim)
    if shape.shared is None:
        return routed
    return ExpertsBesideShared(routed, _load_shared_mlp(weights, shape.shared, hidden_dim))


def _load_shared_mlp(weights: Weights, shape: MlpShape, hidden_dim: int) -> GatedMlp:
    """The MLP that every token goes through; gate and up are one product, input_linear."""
    weights = weights.under("shared_mlp")
    group = weights.group
    gate_up = weights.matrix("input_linear.weight", 2 * shape.inner_dim, hidden_dim)
    down = weights.matrix("output_linear.weight", hidden_dim, shape.inner_dim)
    return GatedMlp(
        join_linear(gate_and_up(gate_up, group)),
        summed_linear(slice_of(down, group, axis=1), None, group),
    )


load_granite3 = partial(load_transformer, feed_forward=_load_mlp_or_mixture)


@dataclass(frozen=True, slots=True)
class GraniteHybridConfig:
    """`moe` is None for a dense model; the shared MLP is always there."""

    trunk: TrunkShape
    mixers: tuple[MixerShape, ...]
    shared_mlp: MlpShape
    moe: MoeShape | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    @property
    def states(self) -> tuple[tuple[MixerShape], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def read_granite(fields: ConfigFields) -> GraniteHybridConfig:
    """Granite 4 H (GraniteMoeHybrid): Mamba-2 and attention, experts beside a shared MLP."""
    check_activation(fields)
    # transformers renamed the layer types; both spellings are on disk.
    name = "layer_types" if "layer_types" in fields.raw else "layers_block_type"
    attention = partial(_attention, fields, uses_rope=_uses_rope(fields))
    mamba = partial(read_mamba, fields)
    readers: dict[str, Callable[[], MixerShape]] = {
        "mamba": mamba,
        "linear_attention": mamba,
        "attention": attention,
        "full_attention": attention,
    }
    scales = _end_scales(fields)
    counted = fields.with_defaults(num_local_experts=8, num_experts_per_tok=2)
    return GraniteHybridConfig(
        trunk=read_trunk(fields),
        mixers=read_used(read_layers(fields, name, readers)),
        shared_mlp=MlpShape(fields.whole("shared_intermediate_size"), has_bias=False),
        moe=_experts(counted) if counted.whole("num_local_experts", least=0) else None,
        embedding_multiplier=scales.embedding_multiplier,
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_scaling=scales.logits_scaling,
    )


def _uses_rope(fields: ConfigFields) -> bool:
    """Whether the layers of attention have rotary positions; they have none unless asked for."""
    word = fields.raw.get("position_embedding_type")
    if word not in ("rope", "nope", None):
        raise fields.refusal("position_embedding_type", "'rope', 'nope' or null")
    return word == "rope"


def load_granite(config: GraniteHybridConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    scales = EndScales(config.embedding_multiplier, config.logits_scaling)
    layer = partial(_granite_layer, config)
    return load_model_decoder(config, manifest, weights, layer, scales)


def _granite_layer(
    config: GraniteHybridConfig, weights: Weights, place: LayerPlace
) -> DecoderLayer:
    feed_forward: FeedForward = _load_shared_mlp(weights, config.shared_mlp, place.hidden_dim)
    if config.moe is not None:
        experts = load_experts(weights.under("block_sparse_moe"), config.moe, place.hidden_dim)
        feed_forward = ExpertsBesideShared(experts, feed_forward)
    mixer, residual = (
        load_mixer(weights, config.mixers[place.layer], place),
        config.residual_multiplier,
    )
    return load_decoder_layer(weights, place, mixer, feed_forward, residual_multiplier=residual)


@dataclass(frozen=True, slots=True)
class BambaConfig:
    """One mixer and one MLP a layer."""

    trunk: TrunkShape
    mixers: tuple[MixerShape, ...]
    mlp: MlpShape

    @property
    def states(self) -> tuple[tuple[MixerShape], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def read_bamba(fields: ConfigFields) -> BambaConfig:
    """Bamba: Mamba-2 and attention with partly rotary heads, a gated MLP in every layer.

    Attention is in the layers that the config lists, Mamba-2 in all others.
    """
    check_activation(fields)
    indices = fields.whole_list("attn_layer_indices")
    num_layers = fields.whole("num_hidden_layers")
    if any(index >= num_layers for index in indices):
        raise fields.refusal("attn_layer_indices", f"layer indices below {num_layers}")
    attention = read_rotary_attention(fields, default_factor=0.5)
    mamba = read_mamba(fields)
    mixers = tuple(attention if index in indices else mamba for index in range(num_layers))
    return BambaConfig(trunk=read_trunk(fields), mixers=mixers, mlp=read_mlp(fields))


def load_bamba(config: BambaConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    layer = partial(_bamba_layer, config)
    return load_model_decoder(
        config, manifest, weights, layer, EndScales(), final_norm="final_layernorm"
    )


def _bamba_layer(config: BambaConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mixer = load_mixer(weights, config.mixers[place.layer], place)
    mlp = load_gated_mlp(weights.under("feed_forward"), config.mlp, place.hidden_dim)
    norms = ("input_layernorm", "pre_ff_layernorm")
    return load_decoder_layer(weights, place, mixer, mlp, norms=norms)
