"""A mixture of experts: each token goes through the few experts with its best scores.

y = Σ_chosen share · expert(x)                                    (Shazeer et al. 2017)

Gemma 4 has a gated MLP and experts side by side, each between norms of its own:

y = norm(mlp(norm(x))) + norm(Σ_chosen share · scale_expert · expert(norm(x)))

There the shares are a softmax over the scores of the chosen, by a norm of x without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ferryman.model.layers.decoder_layers import FeedForward, LayerPlace, Norm, RmsNorm, load_norm
from ferryman.model.layers.expert_router import (
    ExpertRouter,
    RankedRouter,
    RouterNames,
    load_grouped_router,
    load_router,
    scaled_shares_of_chosen,
    shares_of_chosen,
)
from ferryman.model.layers.experts import (
    Activation,
    ExpertMatrices,
    RoutedExperts,
    ShareOfOutput,
    Weighing,
    load_experts_for,
)
from ferryman.model.layers.mlp import ClampedSwiglu, gate_and_up, gated_by, load_gated_mlp
from ferryman.model.shapes.feed_forward_shapes import (
    GroupedRouting,
    MixtureShape,
    MlpShape,
    MoeShape,
)
from ferryman.model.shapes.ranks import Group, slice_of
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import gelu_tanh, silu
from ferryman_kernels.elementwise.gated_sum import add_gated_


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts.

    If the ranks of `group` each compute a summand of every expert, one sum over the ranks follows
    the last expert. So the routing does not change the number of collectives.
    """

    router: ExpertRouter
    experts: RoutedExperts
    group: Group

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.mixed(hidden, *self.router(hidden))

    def mixed(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """The outputs of the `chosen` experts for `hidden`, weighted by `shares`."""
        return self.group.summed(self.experts(hidden, shares, chosen))


@dataclass(frozen=True, slots=True)
class ExpertsBesideShared:
    """Routed experts, and one MLP that every token goes through."""

    routed: FeedForward
    shared: FeedForward

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.routed(hidden).add_(self.shared(hidden))


@dataclass(frozen=True, slots=True)
class ExpertsBesideGated:
    """Routed experts plus sigmoid(gate(x)) · shared(x); `gate` yields one number a token (Qwen)."""

    routed: FeedForward
    shared: FeedForward
    gate: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        return add_gated_(self.routed(hidden), self.shared(hidden), self.gate(hidden))


@dataclass(frozen=True, slots=True)
class MeanOfBoth:
    """Half of what a mixture of two parts yields."""

    both: FeedForward

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.both(hidden).mul_(0.5)


def load_experts(weights: Weights, shape: MoeShape, hidden_dim: int) -> MixtureOfExperts:
    """Granite's experts, in the published format or in that of transformers 5."""
    num_experts, inner_dim = shape.num_experts, shape.inner_dim
    router = weights.first_of("router.layer.weight", "router.weight")
    gate_up = weights.first_of("input_linear.weight", "experts.gate_up_proj")
    down = weights.first_of("output_linear.weight", "experts.down_proj")
    gates = weights.matrices(gate_up, num_experts, 2 * inner_dim, hidden_dim)
    downs = weights.matrices(down, num_experts, hidden_dim, inner_dim)
    score = make_linear(weights.tensor(router, num_experts, hidden_dim))
    parts = (
        (gate_and_up(gate_up, weights.group), down)
        for gate_up, down in zip(gates, downs, strict=True)
    )
    return MixtureOfExperts(
        shares_of_chosen(score, shape.experts_per_token),
        _gated_experts(weights, parts, gated_by(silu), ShareOfOutput()),
        weights.group,
    )


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def load_mixture(
    weights: Weights,
    shape: MoeShape,
    hidden_dim: int,
    router: ExpertRouter,
    names: tuple[str, str, str] = GATE_UP_DOWN,
    *,
    act: Callable[[Tensor], Tensor] | ClampedSwiglu = silu,
    weighing: Weighing | None = None,
) -> MixtureOfExperts:
    """`load_gated_experts` after `router`."""
    experts = load_gated_experts(weights, shape, hidden_dim, names, act=act, weighing=weighing)
    return MixtureOfExperts(router, experts, weights.group)


def load_gated_experts(
    weights: Weights,
    shape: MoeShape,
    hidden_dim: int,
    names: tuple[str, str, str] = GATE_UP_DOWN,
    *,
    act: Callable[[Tensor], Tensor] | ClampedSwiglu = silu,
    weighing: Weighing | None = None,
) -> RoutedExperts:
    """The experts under `weights`; each rank has a part of every expert.

    `names` are those of gate, up and down if each expert is stored under its number. Without
    `weighing` a share multiplies an expert's output.
    """
    if weights.has("gate_up_proj"):
        parts = _stacked_matrices(weights, shape, hidden_dim)
    elif weights.has("gate_proj.weight"):
        parts = _apart_in_stacks(weights, shape, hidden_dim)
    else:
        parts = _separate_matrices(weights, shape, hidden_dim, names)
    activation = gated_by(act, shape.limit)
    return _gated_experts(weights, parts, activation, weighing or ShareOfOutput())


def _stacked_matrices(
    weights: Weights, shape: MoeShape, hidden_dim: int
) -> Iterator[tuple[list[Matrix], Matrix]]:
    """A rank's rows of gate and up, and all of down, of each expert: from one tensor of all gates
    and ups and one of all downs, which some checkpoints hold transposed (Llama 4, Qwen3-VL)."""
    count, inner_dim = shape.num_experts, shape.inner_dim
    # One of the two may be square. Both cannot be.
    shapes = tuple(weights.header(name).shape for name in ("gate_up_proj", "down_proj"))
    is_transposed = shapes == ((count, hidden_dim, 2 * inner_dim), (count, inner_dim, hidden_dim))
    read = weights.transposed_matrices if is_transposed else weights.matrices
    gate_ups = read("gate_up_proj", count, 2 * inner_dim, hidden_dim)
    downs = read("down_proj", count, hidden_dim, inner_dim)
    for gate_up, down in zip(gate_ups, downs, strict=True):
        yield gate_and_up(gate_up, weights.group), down


def _apart_in_stacks(
    weights: Weights, shape: MoeShape, hidden_dim: int
) -> Iterator[tuple[list[Matrix], Matrix]]:
    """The same matrices, from a tensor each of all gates, of all ups and of all downs (Step)."""
    count, inner_dim = shape.num_experts, shape.inner_dim
    gates = weights.matrices("gate_proj.weight", count, inner_dim, hidden_dim)
    ups = weights.matrices("up_proj.weight", count, inner_dim, hidden_dim)
    downs = weights.matrices("down_proj.weight", count, hidden_dim, inner_dim)
    for gate, up, down in zip(gates, ups, downs, strict=True):
        yield [slice_of(part, weights.group) for part in (gate, up)], down


def _separate_matrices(
    weights: Weights, shape: MoeShape, hidden_dim: int, names: tuple[str, str, str]
) -> Iterator[tuple[list[Matrix], Matrix]]:
    """The same matrices, from a separate MLP under each expert's number."""
    for index in range(shape.num_experts):
        expert, (*rows, down_name) = weights.under(str(index)), names
        parts = [expert.matrix(f"{name}.weight", shape.inner_dim, hidden_dim) for name in rows]
        down = expert.matrix(f"{down_name}.weight", hidden_dim, shape.inner_dim)
        yield [slice_of(part, weights.group) for part in parts], down


def _gated_experts(
    weights: Weights,
    parts: Iterable[tuple[list[Matrix], Matrix]],
    activation: Activation,
    weighing: Weighing,
) -> RoutedExperts:
    """A rank's part of the inner channels of every expert; their outputs are summands."""
    cut = (
        ExpertMatrices(gate_up, slice_of(down, weights.group, axis=1)) for gate_up, down in parts
    )
    return load_experts_for(weights.device, cut, activation, weighing)


def load_routed(weights: Weights, shape: MixtureShape, hidden_dim: int) -> FeedForward:
    """A mixture by the tensor names of Qwen and DeepSeek: "gate", "experts", "shared_experts"."""
    router = load_router(weights, shape, hidden_dim)
    experts = load_mixture(weights.under("experts"), shape.experts, hidden_dim, router)
    if shape.shared is None:
        return experts
    both = _beside(experts, weights, shape, shape.shared, hidden_dim)
    return MeanOfBoth(both) if shape.is_mean else both


def load_grouped_mixture(
    weights: Weights,
    shape: MixtureShape,
    hidden_dim: int,
    router: RouterNames,
    *,
    names: tuple[str, str, str] = GATE_UP_DOWN,
    shared: tuple[str, ...] = ("shared_experts",),
    act: Callable[[Tensor], Tensor] | ClampedSwiglu = silu,
    shared_act: Callable[[Tensor], Tensor] | ClampedSwiglu = silu,
) -> FeedForward:
    """A mixture with the routing of DeepSeek-V3, whose router is called otherwise.

    `names` are those of an expert's products; `shared` those of the MLP that every token goes
    through, of which the first is read that a checkpoint has. `act` is that of routed experts,
    `shared_act` that of the MLP.
    """
    if not isinstance(shape.routing, GroupedRouting):
        raise TypeError(f"these experts are routed in groups, not by {shape.routing}")
    routing = load_grouped_router(weights, shape.experts, shape.routing, hidden_dim, router)
    under = weights.under("experts")
    experts = load_mixture(under, shape.experts, hidden_dim, routing, names, act=act)
    if shape.shared is None:
        return experts
    name = next((name for name in shared if weights.has_module(f"{name}.down_proj")), shared[0])
    inner = load_gated_mlp(weights.under(name), shape.shared, hidden_dim, shared_act)
    return ExpertsBesideShared(experts, inner)


def _beside(
    experts: FeedForward, weights: Weights, shape: MixtureShape, shared: MlpShape, hidden_dim: int
) -> FeedForward:
    """`experts` and the shared one, with or without its gate."""
    if not shape.gates_shared:
        inner = load_gated_mlp(weights.under("shared_experts"), shared, hidden_dim)
        return ExpertsBesideShared(experts, inner)
    return ExpertsBesideGated(
        experts,
        load_gated_mlp(weights.under("shared_expert"), shared, hidden_dim),
        make_linear(weights.tensor("shared_expert_gate.weight", 1, hidden_dim)),
    )


@dataclass(frozen=True, slots=True)
class NormedMixture:
    """norm(mlp(norm(x))) + norm(experts(norm(x))); the router sees x by a norm of its own."""

    mlp_norms: tuple[Norm, Norm]
    mlp: FeedForward
    expert_norms: tuple[Norm, Norm]
    experts: MixtureOfExperts

    def __call__(self, hidden: Tensor) -> Tensor:
        (mlp_before, mlp_after), (before, after) = self.mlp_norms, self.expert_norms
        mixed = self.experts.mixed(before(hidden), *self.experts.router(hidden))
        return mlp_after(self.mlp(mlp_before(hidden))) + after(mixed)


@dataclass(frozen=True, slots=True)
class NormedRouter:
    """`choose` by the normed hidden states."""

    norm: Norm
    choose: RankedRouter

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.choose(self.norm(hidden))


def load_normed_mixture(
    weights: Weights, shape: MoeShape, place: LayerPlace, mlp_norm: Norm, mlp: FeedForward
) -> NormedMixture:
    """The experts, their router and their norms under `weights`, plus `mlp` after `mlp_norm`."""
    norm = partial(load_norm, weights, dim=place.hidden_dim, eps=place.norm_eps)
    router = _router(weights.under("router"), shape, place)
    under = weights.under("experts")
    return NormedMixture(
        mlp_norms=(mlp_norm, norm("post_feedforward_layernorm_1")),
        mlp=mlp,
        expert_norms=(
            norm("pre_feedforward_layernorm_2"),
            norm("post_feedforward_layernorm_2"),
        ),
        experts=load_mixture(under, shape, place.hidden_dim, router, act=gelu_tanh),
    )


def _router(weights: Weights, shape: MoeShape, place: LayerPlace) -> ExpertRouter:
    """The scale of its inputs, and 1 / √hidden_dim, are the weights of its norm."""
    scale = weights.precise("scale", place.hidden_dim) * place.hidden_dim**-0.5
    score = make_linear(weights.tensor("proj.weight", shape.num_experts, place.hidden_dim))
    return NormedRouter(
        norm=RmsNorm(scale, place.norm_eps),
        choose=scaled_shares_of_chosen(
            score,
            shape.experts_per_token,
            weights.precise("per_expert_scale", shape.num_experts),
        ),
    )
