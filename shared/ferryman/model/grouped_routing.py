"""Routing of tokens to experts in groups, balanced without a loss (DeepSeek-V3).

score   = sigmoid(x · Wᵀ)                                              [tokens, experts]
rank    = score + bias                  the bias chooses, but has no share
groups  = those whose two best ranks sum highest
chosen  = the best ranks within these groups
share   = scaling · score of the chosen (of which the sum may be brought to 1 before)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.shapes import BEST_OF_GROUP, GroupedRouting, MoeShape
from ferryman.model.weights import Weights

_TINY = 1e-20  # keeps a sum of shares that all vanished from dividing by zero


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
    """The router whose weight and e_score_correction_bias lie under `weights`."""
    return GroupedRouter(
        weight=weights.precise("weight", moe.num_experts, hidden_dim),
        bias=weights.precise("e_score_correction_bias", moe.num_experts),
        routing=routing,
        experts_per_token=moe.experts_per_token,
    )
