"""Granite 4 H (GraniteMoeHybrid): Mamba-2 and attention, experts beside a shared MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.family import Family
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    GatedMlp,
    LayerPlace,
    gate_and_up,
    load_norm,
)
from ferryman.model.layers.mixers import MixerShape, load_mixer
from ferryman.model.layers.moe import ExpertsBesideShared, load_experts
from ferryman.model.readers.config_readers import (
    check_activation,
    read_attention,
    read_layers,
    read_mamba,
    read_rotary,
    read_trunk,
    read_used,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape, MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.ranks import slice_of
from ferryman.model.weights.matrix import join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights


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


def _read(fields: ConfigFields) -> GraniteHybridConfig:
    check_activation(fields)
    # transformers renamed the layer types; both spellings are on disk.
    name = "layer_types" if "layer_types" in fields.raw else "layers_block_type"
    attention, mamba = partial(_attention, fields), partial(read_mamba, fields)
    readers: dict[str, Callable[[], MixerShape]] = {
        "mamba": mamba,
        "linear_attention": mamba,
        "attention": attention,
        "full_attention": attention,
    }
    return GraniteHybridConfig(
        trunk=read_trunk(fields),
        mixers=read_used(read_layers(fields, name, readers)),
        shared_mlp=MlpShape(fields.whole("shared_intermediate_size"), has_bias=False),
        moe=_moe(fields),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_scaling=fields.positive("logits_scaling", 1.0),
    )


def _attention(fields: ConfigFields) -> AttentionShape:
    uses_rope = fields.raw.get("position_embedding_type") == "rope"
    positions = read_rotary(fields, default_factor=1.0) if uses_rope else NoPositions()
    return read_attention(fields, fields.positive("attention_multiplier", 1.0), positions)


def _moe(fields: ConfigFields) -> MoeShape | None:
    num_experts = fields.whole("num_local_experts", 8, least=0)
    if num_experts == 0:
        return None
    chosen = fields.whole("num_experts_per_tok", 2)
    if chosen > num_experts:
        raise fields.refusal("num_experts_per_tok", f"at most num_local_experts {num_experts}")
    return MoeShape(num_experts, chosen, fields.whole("intermediate_size"))


def _load(config: GraniteHybridConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    scales = EndScales(config.embedding_multiplier, config.logits_scaling)
    ends = load_embedding_and_head(weights, config.trunk, "model.norm.weight", scales)
    return load_decoder(
        config, manifest, ends, weights.under("model.layers"), partial(_layer, config)
    )


def _layer(config: GraniteHybridConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    dim, eps = place.hidden_dim, place.norm_eps
    return DecoderLayer(
        mixer_norm=load_norm(weights, "input_layernorm", dim, eps),
        mixer=load_mixer(weights, config.mixers[place.layer], place),
        feed_forward_norm=load_norm(weights, "post_attention_layernorm", dim, eps),
        feed_forward=_feed_forward(config, weights),
        residual_multiplier=config.residual_multiplier,
    )


def _feed_forward(config: GraniteHybridConfig, weights: Weights) -> FeedForward:
    hidden_dim = config.trunk.hidden_dim
    shared = load_shared_mlp(weights.under("shared_mlp"), config.shared_mlp, hidden_dim)
    if config.moe is None:
        return shared
    routed = load_experts(weights.under("block_sparse_moe"), config.moe, hidden_dim)
    return ExpertsBesideShared(routed, shared)


def load_shared_mlp(weights: Weights, shape: MlpShape, hidden_dim: int) -> GatedMlp:
    """The MLP that every token goes through; gate and up are one product, input_linear."""
    group = weights.group
    gate_up = weights.matrix("input_linear.weight", 2 * shape.inner_dim, hidden_dim)
    down = weights.matrix("output_linear.weight", hidden_dim, shape.inner_dim)
    return GatedMlp(
        join_linear(gate_and_up(gate_up, group)),
        summed_linear(slice_of(down, group, axis=1), None, group),
    )


FAMILY = Family(("GraniteMoeHybridForCausalLM",), _read, _load)
