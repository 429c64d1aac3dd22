"""Nemotron-H: layers of one part each, by a pattern: Mamba-2, attention without positions, MLP or
experts.

hidden += part(norm(hidden))

Experts may work on a projection of the token that is narrower than the token (Nemotron 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ferryman.cache.manifest import StateManifest
from ferryman.model.attention import load_attention
from ferryman.model.decoder import Decoder, EndScales, load_decoder, load_ends
from ferryman.model.family import Family
from ferryman.model.fields import Fields
from ferryman.model.grouped_routing import load_grouped_router
from ferryman.model.layers import (
    FeedForward,
    FeedForwardLayer,
    Layer,
    MixerLayer,
    Place,
    load_norm,
)
from ferryman.model.linear import Linear, make_linear, make_summed
from ferryman.model.mamba import load_mamba
from ferryman.model.moe import ExpertsBesideShared, MixtureOfExperts
from ferryman.model.ranks import slice_of
from ferryman.model.reading import read_attention, read_grouped_routing, read_trunk
from ferryman.model.shapes import (
    AttentionShape,
    GroupedRouting,
    MambaShape,
    MlpShape,
    MoeShape,
    NoPositions,
    TrunkShape,
)
from ferryman.model.weights import Weights

# The letters of `hybrid_override_pattern`, as published, and the words that came later.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Experts beside a shared MLP; `latent_dim` is what they see of a token, 0 for all of it."""

    routed: MoeShape
    routing: GroupedRouting
    shared: MlpShape
    latent_dim: int


Part = AttentionShape | MambaShape | MlpShape | ExpertsShape


@dataclass(frozen=True, slots=True)
class NemotronHConfig:
    """One part for each layer."""

    trunk: TrunkShape
    parts: tuple[Part, ...]

    @property
    def states(self) -> tuple[tuple[AttentionShape | MambaShape, ...], ...]:
        return tuple(
            () if isinstance(part, MlpShape | ExpertsShape) else (part,) for part in self.parts
        )


def _read(fields: Fields) -> NemotronHConfig:
    _refuse_what_is_not_supported(fields)
    mlp = MlpShape(fields.whole("intermediate_size"), fields.flag("mlp_bias", False))
    scale = fields.whole("head_dim") ** -0.5
    attention, mamba = read_attention(fields, scale, NoPositions()), _mamba(fields)
    meanings: dict[str, Part] = {
        "mamba": mamba,
        "linear_attention": mamba,
        "attention": attention,
        "full_attention": attention,
        "mlp": mlp,
    }
    name, words = _pattern(fields)
    if "moe" in words:
        meanings["moe"] = _experts(fields)
    if any(word not in meanings for word in words):
        raise fields.refusal(name, f"made of {', '.join(meanings)}")
    parts = tuple(meanings[word] for word in words)
    trunk = read_trunk(fields, num_layers=len(parts), norm_eps="layer_norm_epsilon")
    return NemotronHConfig(trunk, parts)


def _pattern(fields: Fields) -> tuple[str, tuple[str, ...]]:
    """Which field says what each layer is, and what it says."""
    if isinstance(letters := fields.raw.get("hybrid_override_pattern"), str):
        return "hybrid_override_pattern", tuple(_LETTERS.get(each, each) for each in letters)
    name = "layer_types" if "layer_types" in fields.raw else "layers_block_type"
    return name, fields.words(name)


def _experts(fields: Fields) -> ExpertsShape:
    num_experts, chosen = fields.whole("n_routed_experts"), fields.whole("num_experts_per_tok")
    routed = MoeShape(num_experts, chosen, fields.whole("moe_intermediate_size"))
    shared_dim = fields.whole("moe_shared_expert_intermediate_size")
    return ExpertsShape(
        routed=routed,
        routing=read_grouped_routing(fields, routed),
        shared=MlpShape(shared_dim, fields.flag("mlp_bias", False)),
        latent_dim=fields.whole("moe_latent_size", 0, least=0),
    )


def _refuse_what_is_not_supported(fields: Fields) -> None:
    expected: Mapping[str, tuple[object, ...]] = {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "attention_bias": (False,),
        "sliding_window": (None,),
        "residual_in_fp32": (False,),
    }
    for name, values in expected.items():
        if fields.raw.get(name, values[0]) not in values:
            raise fields.refusal(name, f"{values[0]!r}; nothing else is supported")


def _mamba(fields: Fields) -> MambaShape:
    heads, groups = fields.whole("mamba_num_heads"), fields.whole("n_groups")
    if heads % groups:
        raise fields.refusal("n_groups", f"a divisor of mamba_num_heads {heads}")
    has_bias = fields.flag("use_bias", False)
    return MambaShape(
        ssm_heads=heads,
        ssm_head_dim=fields.whole("mamba_head_dim"),
        ssm_groups=groups,
        ssm_state=fields.whole("ssm_state_size"),
        conv_width=fields.whole("conv_kernel", least=2),
        has_conv_bias=fields.flag("use_conv_bias", True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
        dt_limit=(fields.real("time_step_min", 0.001), float("inf")),
    )


@dataclass(frozen=True, slots=True)
class SquaredReluMlp:
    """down(relu(up)²): no gate."""

    up: Linear
    down: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(F.relu(self.up(hidden)).square())


@dataclass(frozen=True, slots=True)
class LatentMixture:
    """Experts between two projections. The router sees the token itself."""

    into: Linear
    experts: MixtureOfExperts
    out: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        routed = self.experts.router(hidden)
        return self.out(self.experts.mixed(self.into(hidden), *routed))


def _load(config: NemotronHConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    root = "backbone" if "backbone.embeddings.weight" in weights.checkpoint.tensors else "model"
    ends = load_ends(
        weights,
        config.trunk,
        f"{root}.norm_f.weight",
        EndScales(),
        embedded=f"{root}.embeddings.weight",
    )
    return load_decoder(
        config, manifest, ends, weights.under(f"{root}.layers"), partial(_layer, config)
    )


def _layer(config: NemotronHConfig, weights: Weights, place: Place) -> Layer:
    dim, eps = place.hidden_dim, place.norm_eps
    norm, inside = load_norm(weights, "norm", dim, eps), weights.under("mixer")
    match config.parts[place.layer]:
        case AttentionShape() as attention:
            return MixerLayer(norm, load_attention(inside, attention, place))
        case MambaShape() as mamba:
            return MixerLayer(norm, load_mamba(inside, mamba, place))
        case MlpShape() as mlp:
            return FeedForwardLayer(norm, _load_mlp(inside, mlp, dim))
        case ExpertsShape() as experts:
            shared = _load_mlp(inside.under("shared_experts"), experts.shared, dim)
            routed = _load_experts(inside, experts, dim)
            return FeedForwardLayer(norm, ExpertsBesideShared(routed, shared))


def _load_mlp(weights: Weights, shape: MlpShape, hidden_dim: int) -> SquaredReluMlp:
    group = weights.group
    up = weights.tensor("up_proj.weight", shape.inner_dim, hidden_dim)
    down = weights.tensor("down_proj.weight", hidden_dim, shape.inner_dim)
    bias, down_bias = None, None
    if shape.has_bias:
        bias = slice_of(weights.tensor("up_proj.bias", shape.inner_dim), group)
        down_bias = weights.tensor("down_proj.bias", hidden_dim)
    return SquaredReluMlp(
        make_linear(slice_of(up, group), bias),
        make_summed(slice_of(down, group, axis=1), down_bias, group),
    )


def _load_experts(weights: Weights, shape: ExpertsShape, hidden_dim: int) -> FeedForward:
    """Each rank has a part of every expert's inner channels; the mixture sums."""
    router = load_grouped_router(weights.under("gate"), shape.routed, shape.routing, hidden_dim)
    inside, group, seen = weights.under("experts"), weights.group, shape.latent_dim or hidden_dim
    experts = tuple(
        SquaredReluMlp(make_linear(slice_of(up, group)), make_linear(slice_of(down, group, axis=1)))
        for up, down in _expert_tensors(inside, shape.routed, seen)
    )
    mixture = MixtureOfExperts(router, experts, group)
    if not shape.latent_dim:
        return mixture
    into = _load_linear(weights, "fc1_latent_proj", seen, hidden_dim, shape.shared.has_bias)
    out = _load_linear(weights, "fc2_latent_proj", hidden_dim, seen, shape.shared.has_bias)
    return LatentMixture(into, mixture, out)


def _expert_tensors(
    weights: Weights, shape: MoeShape, seen_dim: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Up and down of each expert: from one tensor of all, or under each expert's number."""
    if weights.first_of("up_proj", "0.up_proj.weight") == "up_proj":
        ups = weights.tensor("up_proj", shape.num_experts, shape.inner_dim, seen_dim)
        downs = weights.tensor("down_proj", shape.num_experts, seen_dim, shape.inner_dim)
        yield from zip(ups.unbind(), downs.unbind(), strict=True)
        return
    for index in range(shape.num_experts):
        own = weights.under(str(index))
        up = own.tensor("up_proj.weight", shape.inner_dim, seen_dim)
        yield up, own.tensor("down_proj.weight", seen_dim, shape.inner_dim)


def _load_linear(weights: Weights, name: str, out_dim: int, in_dim: int, has_bias: bool) -> Linear:
    bias = weights.tensor(f"{name}.bias", out_dim) if has_bias else None
    return make_linear(weights.tensor(f"{name}.weight", out_dim, in_dim), bias)


FAMILY = Family(("NemotronHForCausalLM",), _read, _load)
