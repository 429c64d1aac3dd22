"""Qwen3-Next: gated delta nets, some layers of gated attention, experts beside a shared one.

Norm weights are stored as their distance from one, but for the norm inside a delta net. What
checkpoints hold for the prediction of several tokens ("mtp") is not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.decoder import Decoder, EndScales, load_decoder, load_ends
from ferryman.model.family import Family
from ferryman.model.fields import Fields
from ferryman.model.layers import DecoderLayer, FeedForward, Place, load_gated_mlp, load_norm
from ferryman.model.linear import make_linear
from ferryman.model.mixers import load_mixer
from ferryman.model.moe import (
    ExpertsBesideShared,
    SharesOfAll,
    SharesOfChosen,
    SigmoidGated,
    load_mixture,
)
from ferryman.model.reading import (
    check_activation,
    read_attention,
    read_delta,
    read_layers,
    read_mlp,
    read_rotary,
    read_trunk,
)
from ferryman.model.shapes import (
    AttentionShape,
    DeltaLayout,
    DeltaShape,
    MlpShape,
    MoeShape,
    TrunkShape,
)
from ferryman.model.weights import Weights

NORM_ORIGIN = 1.0


@dataclass(frozen=True, slots=True)
class SharedMoeShape:
    """Routed experts beside a gated one; the chosen experts' shares sum to one, or to less."""

    routed: MoeShape
    shared: MlpShape
    shares_sum_to_one: bool


@dataclass(frozen=True, slots=True)
class QwenHybridConfig:
    """A mixer and a feed-forward for each layer."""

    trunk: TrunkShape
    mixers: tuple[AttentionShape | DeltaShape, ...]
    feed_forwards: tuple[MlpShape | SharedMoeShape, ...]

    @property
    def states(self) -> tuple[tuple[AttentionShape | DeltaShape], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def _read(fields: Fields) -> QwenHybridConfig:
    check_activation(fields)
    trunk = read_trunk(fields)
    return QwenHybridConfig(
        trunk, read_mixers(fields, DeltaLayout.BY_KEY_HEAD), _feed_forwards(fields, trunk)
    )


def read_mixers(fields: Fields, layout: DeltaLayout) -> tuple[AttentionShape | DeltaShape, ...]:
    """By "layer_types", or attention in every `full_attention_interval`-th layer."""
    scale = fields.whole("head_dim") ** -0.5
    plain = read_attention(fields, scale, read_rotary(fields, default_factor=0.25))
    attention = replace(plain, norms_heads=True, gates_output=True)
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


def _feed_forwards(fields: Fields, trunk: TrunkShape) -> tuple[MlpShape | SharedMoeShape, ...]:
    """Experts in every `decoder_sparse_step`-th layer that "mlp_only_layers" does not name."""
    step, dense = fields.whole("decoder_sparse_step", 1), fields.whole_list("mlp_only_layers")
    num_experts = fields.whole("num_experts", least=0)
    return tuple(
        read_mlp(fields)
        if num_experts == 0 or layer in dense or (layer + 1) % step
        else read_shared_moe(fields)
        for layer in range(trunk.num_layers)
    )


def read_shared_moe(fields: Fields) -> SharedMoeShape:
    """Experts of `moe_intermediate_size` beside one of `shared_expert_intermediate_size`."""
    num_experts, chosen = fields.whole("num_experts"), fields.whole("num_experts_per_tok")
    if chosen > num_experts:
        raise fields.refusal("num_experts_per_tok", f"at most num_experts {num_experts}")
    return SharedMoeShape(
        routed=MoeShape(num_experts, chosen, fields.whole("moe_intermediate_size")),
        shared=MlpShape(fields.whole("shared_expert_intermediate_size"), has_bias=False),
        shares_sum_to_one=fields.flag("norm_topk_prob", True),
    )


def load_qwen_hybrid(
    config: QwenHybridConfig, manifest: StateManifest, weights: Weights, root: str = "model"
) -> Decoder:
    """The decoder whose layers' tensors lie under `root`."""
    ends = load_ends(
        weights,
        config.trunk,
        f"{root}.norm.weight",
        EndScales(),
        embedded=f"{root}.embed_tokens.weight",
        norm_origin=NORM_ORIGIN,
    )
    return load_decoder(
        config,
        manifest,
        ends,
        weights.under(f"{root}.layers"),
        partial(_layer, config),
        NORM_ORIGIN,
    )


def _layer(config: QwenHybridConfig, weights: Weights, place: Place) -> DecoderLayer:
    dim, eps = place.hidden_dim, place.norm_eps
    return DecoderLayer(
        mixer_norm=load_norm(weights, "input_layernorm", dim, eps, place.norm_origin),
        mixer=load_mixer(weights, config.mixers[place.layer], place),
        feed_forward_norm=load_norm(
            weights, "post_attention_layernorm", dim, eps, place.norm_origin
        ),
        feed_forward=_feed_forward(weights.under("mlp"), config.feed_forwards[place.layer], dim),
    )


def _feed_forward(
    weights: Weights, shape: MlpShape | SharedMoeShape, hidden_dim: int
) -> FeedForward:
    if isinstance(shape, MlpShape):
        return load_gated_mlp(weights, shape, hidden_dim)
    routed = shape.routed
    score = make_linear(weights.tensor("gate.weight", routed.num_experts, hidden_dim))
    sharing = SharesOfChosen if shape.shares_sum_to_one else SharesOfAll
    router = sharing(score, routed.experts_per_token)
    return ExpertsBesideShared(
        load_mixture(weights.under("experts"), routed, hidden_dim, router),
        SigmoidGated(
            make_linear(weights.tensor("shared_expert_gate.weight", 1, hidden_dim)),
            load_gated_mlp(weights.under("shared_expert"), shape.shared, hidden_dim),
        ),
    )


FAMILY = Family(("Qwen3NextForCausalLM",), _read, load_qwen_hybrid)
