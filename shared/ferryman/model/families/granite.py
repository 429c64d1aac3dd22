"""Granite 4 H (GraniteMoeHybrid): Mamba-2 and attention, experts beside a shared MLP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.decoder import Decoder, EndScales, load_decoder, load_ends
from ferryman.model.family import Family
from ferryman.model.fields import Fields
from ferryman.model.layers import (
    DecoderLayer,
    FeedForward,
    GatedMlp,
    Place,
    gate_up_slice,
    load_norm,
)
from ferryman.model.linear import make_linear, make_summed
from ferryman.model.mixers import MixerShape, load_mixer
from ferryman.model.moe import ExpertsBesideShared, load_experts
from ferryman.model.ranks import slice_of
from ferryman.model.reading import (
    check_activation,
    read_attention,
    read_layers,
    read_mamba,
    read_rotary,
    read_trunk,
)
from ferryman.model.shapes import MlpShape, MoeShape, NoPositions, TrunkShape
from ferryman.model.weights import Weights


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


def _read(fields: Fields) -> GraniteHybridConfig:
    check_activation(fields)
    uses_rope = fields.raw.get("position_embedding_type") == "rope"
    positions = read_rotary(fields, default_factor=1.0) if uses_rope else NoPositions()
    attention = read_attention(fields, fields.real("attention_multiplier", 1.0), positions)
    mamba = read_mamba(fields)
    # transformers renamed the layer types; both spellings are on disk.
    name = "layer_types" if "layer_types" in fields.raw else "layers_block_type"
    meanings: dict[str, MixerShape] = {
        "mamba": mamba,
        "linear_attention": mamba,
        "attention": attention,
        "full_attention": attention,
    }
    return GraniteHybridConfig(
        trunk=read_trunk(fields),
        mixers=read_layers(fields, name, meanings),
        shared_mlp=MlpShape(fields.whole("shared_intermediate_size"), has_bias=False),
        moe=_moe(fields),
        embedding_multiplier=fields.real("embedding_multiplier", 1.0),
        residual_multiplier=fields.real("residual_multiplier", 1.0),
        logits_scaling=fields.real("logits_scaling", 1.0),
    )


def _moe(fields: Fields) -> MoeShape | None:
    num_experts = fields.whole("num_local_experts", 8, least=0)
    if num_experts == 0:
        return None
    chosen = fields.whole("num_experts_per_tok", 2)
    if chosen > num_experts:
        raise fields.refusal("num_experts_per_tok", f"at most num_local_experts {num_experts}")
    return MoeShape(num_experts, chosen, fields.whole("intermediate_size"))


def _load(config: GraniteHybridConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    scales = EndScales(config.embedding_multiplier, config.logits_scaling)
    ends = load_ends(weights, config.trunk, "model.norm.weight", scales)
    return load_decoder(
        config, manifest, ends, weights.under("model.layers"), partial(_layer, config)
    )


def _layer(config: GraniteHybridConfig, weights: Weights, place: Place) -> DecoderLayer:
    dim, eps = place.hidden_dim, place.norm_eps
    return DecoderLayer(
        mixer_norm=load_norm(weights, "input_layernorm", dim, eps),
        mixer=load_mixer(weights, config.mixers[place.layer], place),
        feed_forward_norm=load_norm(weights, "post_attention_layernorm", dim, eps),
        feed_forward=_feed_forward(config, weights),
        residual_multiplier=config.residual_multiplier,
    )


def _feed_forward(config: GraniteHybridConfig, weights: Weights) -> FeedForward:
    hidden_dim, inner_dim = config.trunk.hidden_dim, config.shared_mlp.inner_dim
    group = weights.group
    gate_up = weights.tensor("shared_mlp.input_linear.weight", 2 * inner_dim, hidden_dim)
    down = weights.tensor("shared_mlp.output_linear.weight", hidden_dim, inner_dim)
    shared = GatedMlp(
        make_linear(gate_up_slice(gate_up, group)),
        make_summed(slice_of(down, group, axis=1), None, group),
    )
    if config.moe is None:
        return shared
    routed = load_experts(weights.under("block_sparse_moe"), config.moe, hidden_dim)
    return ExpertsBesideShared(routed, shared)


FAMILY = Family(("GraniteMoeHybridForCausalLM",), _read, _load)
