"""Routers of tokens to experts: a product makes scores, and a rule chooses by them.

The rules are named by the models that brought them; `expert_choice.py` has their formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.model.shapes.feed_forward_shapes import (
    BEST_OF_GROUP,
    BiasedScoreRouting,
    BiasedSoftmaxRouting,
    GroupedRouting,
    MixtureShape,
    MoeShape,
    OneByOneRouting,
    SigmoidRouting,
    SoftmaxRouting,
)
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.elementwise.expert_choice import (
    NO_NUMBERS,
    ExpertGroups,
    ExpertNumbers,
    ExpertRule,
    Measure,
    ShareSum,
    choose_experts,
    choose_one_by_one,
)

_TINY = 1e-20  # avoids a division by zero if all shares vanish


class ExpertRouter(Protocol):
    """Routes tokens to experts: from hidden [tokens, hidden_dim] to shares, in hidden's dtype, and
    to indices of the chosen experts, both [tokens, experts_per_token]."""

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class WideScores:
    """The product `score` of a router whose weight is in the accumulation dtype."""

    score: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.score(x.to(accumulation_dtype(x.dtype)))


@dataclass(frozen=True, slots=True)
class RankedRouter:
    """Experts by the ranks that `rule` makes of their scores; `numbers` are in the accumulation
    dtype."""

    score: Linear
    rule: ExpertRule
    numbers: ExpertNumbers = NO_NUMBERS

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return choose_experts(self.score(hidden), self.rule, self.numbers, hidden.dtype)


def shares_of_chosen(score: Linear, experts_per_token: int, scaling: float = 1.0) -> RankedRouter:
    """The likeliest experts share the token by a softmax over their own scores.

    This equals a softmax over all experts whose chosen shares are then normalised to a sum of 1
    (`norm_topk_prob`). They are multiplied by `scaling`.
    """
    rule = ExpertRule(experts_per_token, Measure.SOFTMAX_OF_CHOSEN, scaling=scaling)
    return RankedRouter(score, rule)


def scaled_shares_of_chosen(score: Linear, experts_per_token: int, scales: Tensor) -> RankedRouter:
    """`shares_of_chosen`, times the scale of each expert; `scales` [experts] are in the
    accumulation dtype."""
    rule = ExpertRule(experts_per_token, Measure.SOFTMAX_OF_CHOSEN)
    return RankedRouter(score, rule, ExpertNumbers(scales=scales))


def shares_of_all(score: Linear, experts_per_token: int, scaling: float = 1.0) -> RankedRouter:
    """The likeliest experts keep their shares of a softmax over all experts, times `scaling`; the
    rest is lost."""
    return RankedRouter(score, ExpertRule(experts_per_token, Measure.SOFTMAX, scaling=scaling))


def sigmoid_of_chosen(
    score: Linear, experts_per_token: int, routing: SigmoidRouting
) -> RankedRouter:
    """The experts with the best scores have their sigmoids as shares."""
    divisor = ShareSum() if routing.shares_sum_to_one else None
    return RankedRouter(score, ExpertRule(experts_per_token, Measure.SIGMOID, sum=divisor))


def shares_of_best_groups(
    score: Linear,
    experts_per_token: int,
    routing: SoftmaxRouting,
    numbers: ExpertNumbers = NO_NUMBERS,
) -> RankedRouter:
    """Shares as in `shares_of_all`, but of experts in the groups whose best experts are likeliest;
    they may be divided by their sum.

    `score` takes the accumulation dtype. `numbers` have a bias of zeros where a group has several
    best experts: what is added up are shares then, not scores.
    """
    groups = ExpertGroups(routing.num_groups, routing.groups_per_token, routing.best_of_group)
    rule = ExpertRule(
        experts_per_token,
        Measure.SOFTMAX,
        groups,
        ShareSum(added=_TINY) if routing.shares_sum_to_one else None,
        routing.scaling,
    )
    return RankedRouter(WideScores(score), rule, numbers)


def shares_by_biased_rank(
    score: Linear, bias: Tensor, experts_per_token: int, routing: BiasedSoftmaxRouting
) -> RankedRouter:
    """The experts with the highest share plus bias; their shares are divided by their sum.

    `score` takes the accumulation dtype, `bias` [experts] is in it.
    """
    divisor = ShareSum(least=routing.least_sum)
    rule = ExpertRule(experts_per_token, Measure.SOFTMAX, sum=divisor)
    return RankedRouter(WideScores(score), rule, ExpertNumbers(bias))


def shares_by_biased_measure(
    score: Linear, bias: Tensor, experts_per_token: int, scaling: float
) -> RankedRouter:
    """The experts with the highest share plus bias; their shares are multiplied by `scaling`.

    `score` takes the accumulation dtype, `bias` [experts] is in it.
    """
    rule = ExpertRule(experts_per_token, Measure.SOFTMAX, scaling=scaling)
    return RankedRouter(WideScores(score), rule, ExpertNumbers(bias))


def sigmoid_by_biased_score(
    score: Linear, bias: Tensor, experts_per_token: int, routing: BiasedScoreRouting
) -> RankedRouter:
    """The experts with the highest score plus bias have the sigmoids of their scores as shares.

    `score` takes the accumulation dtype, `bias` [experts] is in it.
    """
    divisor = ShareSum() if routing.shares_sum_to_one else None
    rule = ExpertRule(experts_per_token, Measure.SIGMOID_OF_CHOSEN, sum=divisor)
    return RankedRouter(WideScores(score), rule, ExpertNumbers(bias))


@dataclass(frozen=True, slots=True)
class OneByOneRouter:
    """The best expert, then the best of the others; `jitter` as in OneByOneRouting."""

    score: Linear
    jitter: float

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return choose_one_by_one(self.score(hidden), self.jitter, hidden.dtype)


def grouped_router(
    score: Linear, bias: Tensor, routing: GroupedRouting, experts_per_token: int
) -> RankedRouter:
    """Routing in groups, balanced without a loss (DeepSeek-V3): the bias affects the choice, not
    the share. `score` takes the accumulation dtype, `bias` [experts] is in it."""
    rule = ExpertRule(
        experts_per_token,
        Measure.SIGMOID,
        ExpertGroups(routing.num_groups, routing.groups_per_token, BEST_OF_GROUP),
        ShareSum(added=_TINY) if routing.norms_shares else None,
        routing.scaling,
    )
    return RankedRouter(WideScores(score), rule, ExpertNumbers(bias))


@dataclass(frozen=True, slots=True)
class RouterNames:
    """The names of a router's weight and bias; of several the first that a checkpoint has."""

    weight: tuple[str, ...] = ("weight",)
    bias: tuple[str, ...] = ("e_score_correction_bias",)


def load_grouped_router(
    weights: Weights,
    moe: MoeShape,
    routing: GroupedRouting,
    hidden_dim: int,
    names: RouterNames = RouterNames(),
) -> RankedRouter:
    """The router with the tensors `names` under `weights`."""
    weight, bias = weights.first_of(*names.weight), weights.first_of(*names.bias)
    score = make_linear(weights.precise(weight, moe.num_experts, hidden_dim))
    bias_of_ranks = weights.precise(bias, moe.num_experts)
    return grouped_router(score, bias_of_ranks, routing, moe.experts_per_token)


def _load_biased_router(
    weights: Weights, moe: MoeShape, routing: BiasedSoftmaxRouting, hidden_dim: int
) -> RankedRouter:
    name = "moe_statics.e_score_correction_bias"
    bias = weights.precise(weights.first_of(name, f"gate.{name}"), 1, moe.num_experts)
    score = make_linear(weights.precise("gate.weight", moe.num_experts, hidden_dim))
    return shares_by_biased_rank(score, bias[0], moe.experts_per_token, routing)


def load_router(weights: Weights, shape: MixtureShape, hidden_dim: int) -> ExpertRouter:
    """The router of `shape` with its weight under "gate"."""
    experts, routing = shape.experts, shape.routing
    if isinstance(routing, GroupedRouting):
        return load_grouped_router(weights.under("gate"), experts, routing, hidden_dim)
    if isinstance(routing, BiasedSoftmaxRouting):
        return _load_biased_router(weights, experts, routing, hidden_dim)
    if isinstance(routing, OneByOneRouting | BiasedScoreRouting):
        raise TypeError("experts that are chosen so have names of their own")
    if isinstance(routing, SoftmaxRouting) and routing.num_groups > 1:
        score = make_linear(weights.precise("gate.weight", experts.num_experts, hidden_dim))
        numbers = NO_NUMBERS
        if routing.best_of_group > 1:
            wide = accumulation_dtype(weights.dtype)
            zeros = torch.zeros(experts.num_experts, dtype=wide, device=weights.device)
            numbers = ExpertNumbers(zeros)
        return shares_of_best_groups(score, experts.experts_per_token, routing, numbers)
    score = make_linear(weights.tensor("gate.weight", experts.num_experts, hidden_dim))
    if isinstance(routing, SigmoidRouting):
        return sigmoid_of_chosen(score, experts.experts_per_token, routing)
    if not routing.shares_sum_to_one:
        return shares_of_all(score, experts.experts_per_token, routing.scaling)
    return shares_of_chosen(score, experts.experts_per_token, routing.scaling)
