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
from torch.nn import functional as F

from ferryman.model.feed_forward_shapes import (
    BEST_OF_GROUP,
    GroupedRouting,
    MixtureShape,
    MoeShape,
    SigmoidRouting,
    SoftmaxRouting,
)
from ferryman.model.linear import Linear, make_linear
from ferryman.model.weights import Weights, accumulation_dtype


class ExpertRouter(Protocol):
    """Routes tokens to experts: from hidden [tokens, hidden_dim] to shares, in the accumulation
    dtype, and to indices of the chosen experts, both [tokens, experts_per_token]."""

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]: ...


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
    """The experts with the best scores have their sigmoids as shares (Llama 4)."""

    score: Linear
    experts_per_token: int

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(hidden).to(accumulation_dtype(hidden.dtype))
        best, chosen = scores.topk(self.experts_per_token, dim=-1)
        return best.sigmoid(), chosen


@dataclass(frozen=True, slots=True)
class SharesOfBestGroups:
    """As SharesOfAll, but experts are chosen within the groups whose best expert is likeliest.

    `weight` [experts, hidden_dim] in the accumulation dtype.
    """

    weight: Tensor
    experts_per_token: int
    routing: SoftmaxRouting

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        shares = F.linear(hidden.to(self.weight.dtype), self.weight).softmax(dim=-1)
        grouped = shares.view(len(shares), self.routing.num_groups, -1)
        best = grouped.amax(-1).topk(self.routing.groups_per_token, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        inside = grouped.masked_fill(outside[:, :, None], 0.0).flatten(1)
        found, chosen = inside.topk(self.experts_per_token, dim=-1)
        return found * self.routing.scaling, chosen


_TINY = 1e-20  # avoids a division by zero if all shares vanish


@dataclass(frozen=True, slots=True)
class GroupedRouter:
    """`weight` [experts, hidden_dim] and `bias` [experts] in the accumulation dtype."""

    weight: Tensor
    bias: Tensor
    routing: GroupedRouting
    experts_per_token: int

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(hidden.to(self.weight.dtype), self.weight).sigmoid()
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


def load_grouped_router(
    weights: Weights, moe: MoeShape, routing: GroupedRouting, hidden_dim: int
) -> GroupedRouter:
    """The router with weight and e_score_correction_bias under `weights`."""
    return GroupedRouter(
        weight=weights.precise("weight", moe.num_experts, hidden_dim),
        bias=weights.precise("e_score_correction_bias", moe.num_experts),
        routing=routing,
        experts_per_token=moe.experts_per_token,
    )


def load_router(weights: Weights, shape: MixtureShape, hidden_dim: int) -> ExpertRouter:
    """The router of `shape` with its weight under "gate"."""
    experts, routing = shape.experts, shape.routing
    if isinstance(routing, GroupedRouting):
        return load_grouped_router(weights.under("gate"), experts, routing, hidden_dim)
    if isinstance(routing, SoftmaxRouting) and routing.num_groups > 1:
        weight = weights.precise("gate.weight", experts.num_experts, hidden_dim)
        return SharesOfBestGroups(weight, experts.experts_per_token, routing)
    score = make_linear(weights.tensor("gate.weight", experts.num_experts, hidden_dim))
    if isinstance(routing, SigmoidRouting):
        return SigmoidOfChosen(score, experts.experts_per_token)
    if not routing.shares_sum_to_one:
        return SharesOfAll(score, experts.experts_per_token, routing.scaling)
    if routing.scaling != 1.0:
        raise ValueError("shares that sum to one are not scaled by any family")
    return SharesOfChosen(score, experts.experts_per_token)
