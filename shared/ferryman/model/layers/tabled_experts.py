"""Experts measured by √softplus, in the first layers chosen by a table of token ids (DeepSeek-V4).

measure  = √softplus(x · Wᵀ)
chosen   = table[token id], or the experts with the greatest measure + bias
share    = scaling · measure / Σ measure of the chosen
y        = Σ_chosen share · expert(x) + shared(x)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.layers.decoder_layers import FeedForward, Mixer, ResidualPath
from ferryman.model.layers.expert_router import RankedRouter, WideScores
from ferryman.model.layers.experts import RoutedExperts
from ferryman.model.layers.mlp import ClampedSwiglu, load_gated_mlp
from ferryman.model.layers.moe import ExpertsBesideShared, load_gated_experts, load_mixture
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.feed_forward_shapes import MlpShape, MoeShape, SoftplusRouting
from ferryman.model.shapes.ranks import Group
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.expert_choice import (
    ExpertNumbers,
    ExpertRule,
    Measure,
    ShareSum,
)
from ferryman_kernels.elementwise.table_choice import look_up_experts

LEAST_SUM = 1e-20
"""A number that is added to the sum of shares, which may be zero."""


@dataclass(frozen=True, slots=True)
class TableRouter:
    """The experts of token ids in `table` [ids, experts_per_token], and their shares by `score`."""

    score: WideScores
    table: Tensor
    rule: ExpertRule

    def __call__(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(hidden)
        return look_up_experts(scores, token_ids, self.table, self.rule, hidden.dtype)


class TokenFeedForward(Protocol):
    """A feed-forward that depends on the tokens' ids [tokens], too."""

    def __call__(self, hidden: Tensor, token_ids: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TabledExperts:
    """Experts by a table of token ids, and one MLP that every token goes through."""

    router: TableRouter
    experts: RoutedExperts
    shared: FeedForward
    group: Group

    def __call__(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        shares, chosen = self.router(hidden, token_ids)
        routed = self.group.summed(self.experts(hidden, shares, chosen))
        return routed.add_(self.shared(hidden))


@dataclass(frozen=True, slots=True)
class TabledLayer:
    """A mixer and a feed-forward that depends on token ids, each with a path around it."""

    mixer_path: ResidualPath
    mixer: Mixer
    feed_forward_path: ResidualPath
    feed_forward: TokenFeedForward

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        x, residual = self.mixer_path.entered(hidden)
        hidden = residual.plus(self.mixer.forward(x, batch, state))
        x, residual = self.feed_forward_path.entered(hidden)
        return residual.plus(self.feed_forward(x, batch.token_ids))


@dataclass(frozen=True, slots=True)
class SoftplusMixture:
    """Experts measured by √softplus, and one MLP that every token goes through."""

    experts: MoeShape
    routing: SoftplusRouting
    shared: MlpShape

    @property
    def rule(self) -> ExpertRule:
        per_token, divisor = self.experts.experts_per_token, ShareSum(added=LEAST_SUM)
        return ExpertRule(
            per_token, Measure.SQRT_SOFTPLUS, sum=divisor, scaling=self.routing.scaling
        )


Act = Callable[[Tensor], Tensor] | ClampedSwiglu


def load_softplus_mixture(
    weights: Weights, shape: SoftplusMixture, hidden_dim: int, act: Act
) -> ExpertsBesideShared:
    """The mixture under `weights`, whose router has a bias; `act` is that of all experts."""
    num_experts = shape.experts.num_experts
    bias = weights.precise("gate.e_score_correction_bias", num_experts)
    score = _load_scores(weights, shape, hidden_dim)
    router = RankedRouter(score, shape.rule, ExpertNumbers(bias))
    experts = load_mixture(weights.under("experts"), shape.experts, hidden_dim, router, act=act)
    return ExpertsBesideShared(experts, _load_shared(weights, shape, hidden_dim, act))


def load_tabled_experts(
    weights: Weights, shape: SoftplusMixture, hidden_dim: int, num_ids: int, act: Act
) -> TabledExperts:
    """The mixture under `weights` with a table of `num_ids`; `act` is that of all experts."""
    table = _load_table(weights.under("gate"), shape.experts, num_ids)
    return TabledExperts(
        TableRouter(_load_scores(weights, shape, hidden_dim), table, shape.rule),
        load_gated_experts(weights.under("experts"), shape.experts, hidden_dim, act=act),
        _load_shared(weights, shape, hidden_dim, act),
        weights.group,
    )


def _load_scores(weights: Weights, shape: SoftplusMixture, hidden_dim: int) -> WideScores:
    rows = shape.experts.num_experts
    return WideScores(make_linear(weights.precise("gate.weight", rows, hidden_dim)))


def _load_shared(
    weights: Weights, shape: SoftplusMixture, hidden_dim: int, act: Act
) -> FeedForward:
    return load_gated_mlp(weights.under("shared_experts"), shape.shared, hidden_dim, act)


def _load_table(weights: Weights, shape: MoeShape, num_ids: int) -> Tensor:
    """Raises ConfigError for an expert that the model does not have."""
    stored = weights.stored("tid2eid", (num_ids, shape.experts_per_token), ("I64", "I32"))
    if not stored.is_meta and not are_below(stored, shape.num_experts):
        raise ConfigError(
            f"{weights.checkpoint.folder}: tensor {weights.prefix}tid2eid names experts beyond the "
            f"{shape.num_experts} of config.json"
        )
    return stored.to(torch.int64, copy=True).to(weights.device)


def are_below(numbers: Tensor, end: int) -> bool:
    """Whether all `numbers` are from 0 on and below `end`."""
    return 0 <= int(numbers.min()) and int(numbers.max()) < end
