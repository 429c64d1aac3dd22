"""Routers of tokens to experts.

Routing in groups, balanced without a loss (DeepSeek-V3):

score   = sigmoid(x · Wᵀ)                                              [tokens, experts]
rank    = score + bias                  the bias affects the choice, not the share
groups  = those with the highest sum of their two best ranks
chosen  = the best ranks within these groups
share   = scaling · score of the chosen (whose sum may first be normalised to 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.model.shapes.feed_forward_shapes import (
    BEST_OF_GROUP,
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
from ferryman_kernels.elementwise.activations import sigmoid


class ExpertRouter(Protocol):
    """Routes tokens to experts: from hidden [tokens, hidden_dim] to shares, in the accumulation
    dtype, and to indices of the chosen experts, both [tokens, experts_per_token]."""

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class WideScores:
    """The product `score` of a router whose weight is in the accumulation dtype."""

    score: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.score(x.to(accumulation_dtype(x.dtype)))


@dataclass(frozen=True, slots=True)
class SharesOfChosen:
    """The likeliest experts share the token by a softmax over their own scores.

    This equals a softmax over all experts whose chosen shares are then normalised to a sum of 1
    (`norm_topk_prob`).
    """

    score: Linear
    experts_per_token: int

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(hidden).to(accumulation_dtype(hidden.dtype))
        best, chosen = scores.topk(self.experts_per_token, dim=-1)
        return best.softmax(dim=-1), chosen


@dataclass(frozen=True, slots=True)
class SharesOfAll:
    """The likeliest experts keep their shares of a softmax over all experts, times `scaling`; the
    rest is lost."""

    score: Linear
    experts_per_token: int
    scaling: float = 1.0

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(hidden).to(accumulation_dtype(hidden.dtype))
        shares, chosen = scores.softmax(dim=-1).topk(self.experts_per_token, dim=-1)
        return shares * self.scaling, chosen


@dataclass(frozen=True, slots=True)
class SigmoidOfChosen:
    """The experts with the best scores have their sigmoids as shares (Llama 4).

    `norms_shares`: they are divided by their sum.
    """

    score: Linear
    experts_per_token: int
    norms_shares: bool = False

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(hidden).to(accumulation_dtype(hidden.dtype))
        best, chosen = scores.topk(self.experts_per_token, dim=-1)
        shares = sigmoid(best)
        return shares / shares.sum(-1, keepdim=True) if self.norms_shares else shares, chosen


@dataclass(frozen=True, slots=True)
class SharesOfBestGroups:
    """Shares as in SharesOfAll, but of experts in the groups whose best expert is likeliest.

    `score` is in the accumulation dtype.
    """

    score: Linear
    experts_per_token: int
    routing: SoftmaxRouting

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.score(hidden.to(accumulation_dtype(hidden.dtype))).softmax(dim=-1)
        grouped = shares.view(len(shares), self.routing.num_groups, -1)
        best = grouped.amax(-1).topk(self.routing.groups_per_token, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        inside = grouped.masked_fill(outside[:, :, None], 0.0).flatten(1)
        chosen_shares, chosen = inside.topk(self.experts_per_token, dim=-1)
        return chosen_shares * self.routing.scaling, chosen


@dataclass(frozen=True, slots=True)
class SharesByBiasedRank:
    """The experts with the highest share plus bias; their shares are divided by their sum.

    `score` and `bias` [experts] are in the accumulation dtype.
    """

    score: Linear
    bias: Tensor
    experts_per_token: int
    routing: BiasedSoftmaxRouting

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.score(hidden.to(accumulation_dtype(hidden.dtype))).softmax(dim=-1)
        chosen = (shares + self.bias).topk(self.experts_per_token, dim=-1).indices
        parts = shares.gather(1, chosen)
        return parts / parts.sum(-1, keepdim=True).clamp(min=self.routing.least_sum), chosen


@dataclass(frozen=True, slots=True)
class SharesOneByOne:
    """The best expert, then the best of the others; `jitter` as in OneByOneRouting."""

    score: Linear
    jitter: float

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(hidden).to(accumulation_dtype(hidden.dtype))
        first_share, first = self._best(scores, scores)
        left = scores.scatter(1, first, -torch.inf)
        second_share, second = self._best(scores, left)
        return torch.cat((first_share, second_share), 1), torch.cat((first, second), 1)

    def _best(self, scores: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """The best of `left` and its share, each [tokens, 1]."""
        best, chosen = left.max(dim=-1, keepdim=True)
        distance = (best - scores) / scores.abs().clamp(min=best)
        near = left.masked_fill(distance > 2 * self.jitter, -torch.inf)
        return near.softmax(dim=-1).gather(1, chosen), chosen


_TINY = 1e-20  # avoids a division by zero if all shares vanish


@dataclass(frozen=True, slots=True)
class GroupedRouter:
    """`score` and `bias` [experts] are in the accumulation dtype."""

    score: Linear
    bias: Tensor
    routing: GroupedRouting
    experts_per_token: int

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = sigmoid(self.score(hidden.to(accumulation_dtype(hidden.dtype))))
        ranks = self._in_best_groups(scores + self.bias)
        chosen = ranks.topk(self.experts_per_token, dim=-1).indices
        shares = scores.gather(1, chosen)
        if self.routing.norms_shares:
            shares = shares / (shares.sum(-1, keepdim=True) + _TINY)
        return shares * self.routing.scaling, chosen

    def _in_best_groups(self, ranks: Tensor) -> Tensor:
        """The ranks, -inf outside the groups that a token goes to."""
        grouped = ranks.view(len(ranks), self.routing.num_groups, -1)
        merits = grouped.topk(BEST_OF_GROUP, dim=-1).values.sum(-1)
        best = merits.topk(self.routing.groups_per_token, dim=-1).indices
        outside = torch.ones_like(merits, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(outside[:, :, None], -torch.inf).flatten(1)


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
) -> GroupedRouter:
    """The router with the tensors `names` under `weights`."""
    weight, bias = weights.first_of(*names.weight), weights.first_of(*names.bias)
    return GroupedRouter(
        score=make_linear(weights.precise(weight, moe.num_experts, hidden_dim)),
        bias=weights.precise(bias, moe.num_experts),
        routing=routing,
        experts_per_token=moe.experts_per_token,
    )


def _load_biased_router(
    weights: Weights, moe: MoeShape, routing: BiasedSoftmaxRouting, hidden_dim: int
) -> SharesByBiasedRank:
    name = "moe_statics.e_score_correction_bias"
    bias = weights.precise(weights.first_of(name, f"gate.{name}"), 1, moe.num_experts)
    score = make_linear(weights.precise("gate.weight", moe.num_experts, hidden_dim))
    return SharesByBiasedRank(score, bias[0], moe.experts_per_token, routing)


def load_router(weights: Weights, shape: MixtureShape, hidden_dim: int) -> ExpertRouter:
    """The router of `shape` with its weight under "gate"."""
    experts, routing = shape.experts, shape.routing
    if isinstance(routing, GroupedRouting):
        return load_grouped_router(weights.under("gate"), experts, routing, hidden_dim)
    if isinstance(routing, BiasedSoftmaxRouting):
        return _load_biased_router(weights, experts, routing, hidden_dim)
    if isinstance(routing, OneByOneRouting):
        raise TypeError("experts that are chosen one by one have names of their own")
    if isinstance(routing, SoftmaxRouting) and routing.num_groups > 1:
        score = make_linear(weights.precise("gate.weight", experts.num_experts, hidden_dim))
        return SharesOfBestGroups(score, experts.experts_per_token, routing)
    score = make_linear(weights.tensor("gate.weight", experts.num_experts, hidden_dim))
    if isinstance(routing, SigmoidRouting):
        return SigmoidOfChosen(score, experts.experts_per_token, routing.shares_sum_to_one)
    if not routing.shares_sum_to_one:
        return SharesOfAll(score, experts.experts_per_token, routing.scaling)
    if routing.scaling != 1.0:
        raise ValueError("shares that sum to one are not scaled by any family")
    return SharesOfChosen(score, experts.experts_per_token)
