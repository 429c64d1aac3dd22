"""A mixture of experts: each token goes through the few experts its router likes best.

y = Σ_chosen share · expert(x)                                    (Shazeer et al. 2017)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.model.layers import FeedForward, GatedMlp, gate_up_slice
from ferryman.model.linear import Linear, make_linear
from ferryman.model.ranks import Group, slice_of
from ferryman.model.shapes import MoeShape
from ferryman.model.weights import Weights, accumulation_dtype


class Router(Protocol):
    """Sends tokens to experts: from hidden [tokens, hidden_dim] the shares, in the accumulation
    dtype, and the indices of the chosen experts, both [tokens, experts_per_token].
    """

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class SharesOfChosen:
    """The likeliest experts share the token by a softmax over their own scores.

    That is also the softmax over all experts with the shares of the chosen brought to a sum of 1
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
    """The likeliest experts keep what a softmax over all experts gives them; the rest is lost."""

    score: Linear
    experts_per_token: int

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(hidden).to(accumulation_dtype(hidden.dtype))
        shares, chosen = scores.softmax(dim=-1).topk(self.experts_per_token, dim=-1)
        return shares, chosen


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts: one product per expert present in the batch, over all of its tokens.

    Experts that give `group`'s ranks a summand each are summed once, behind the last of them: who
    routes where decides nothing about collectives.
    """

    router: Router
    experts: tuple[FeedForward, ...]
    group: Group

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.mixed(hidden, *self.router(hidden))

    def mixed(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """What the `chosen` experts make of `hidden`, by their `shares`."""
        per_token, pair_shares = chosen.shape[1], shares.to(hidden.dtype).flatten()
        by_expert = chosen.flatten().argsort(stable=True)  # indices into token-expert pairs
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        pairs = by_expert.split_with_sizes(counts)
        mixed = torch.zeros_like(hidden)
        for expert, pair in zip(self.experts, pairs, strict=True):
            if len(pair):
                tokens = pair // per_token
                fed = expert(hidden[tokens]) * pair_shares[pair, None]
                mixed.index_add_(0, tokens, fed)
        return self.group.summed(mixed)


@dataclass(frozen=True, slots=True)
class ExpertsBesideShared:
    """Routed experts, and one MLP that every token goes through."""

    routed: FeedForward
    shared: FeedForward

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.routed(hidden).add_(self.shared(hidden))


@dataclass(frozen=True, slots=True)
class SigmoidGated:
    """sigmoid(gate(x)) · inner(x); `gate` yields one number a token (Qwen's shared expert)."""

    gate: Linear
    inner: FeedForward

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden).mul_(self.gate(hidden).sigmoid())


def load_experts(weights: Weights, shape: MoeShape, hidden_dim: int) -> MixtureOfExperts:
    """Granite's experts, in the published format or in the one transformers 5 holds."""
    num_experts, inner_dim = shape.num_experts, shape.inner_dim
    router = weights.first_of("router.layer.weight", "router.weight")
    gate_up = weights.first_of("input_linear.weight", "experts.gate_up_proj")
    down = weights.first_of("output_linear.weight", "experts.down_proj")
    gates = weights.tensor(gate_up, num_experts, 2 * inner_dim, hidden_dim)
    downs = weights.tensor(down, num_experts, hidden_dim, inner_dim)
    score = make_linear(weights.tensor(router, num_experts, hidden_dim))
    return MixtureOfExperts(
        SharesOfChosen(score, shape.experts_per_token),
        tuple(
            _expert(gate_up, down, weights.group)
            for gate_up, down in zip(gates.unbind(), downs.unbind(), strict=True)
        ),
        weights.group,
    )


def load_mixture(
    weights: Weights, shape: MoeShape, hidden_dim: int, router: Router
) -> MixtureOfExperts:
    """The experts under `weights` behind `router`; each rank has a part of every expert."""
    pairs = _expert_tensors(weights, shape, hidden_dim)
    experts = tuple(_expert(*pair, weights.group) for pair in pairs)
    return MixtureOfExperts(router, experts, weights.group)


def _expert_tensors(
    weights: Weights, shape: MoeShape, hidden_dim: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Gate and up, and down, of each expert: from one tensor of all gates and ups and one of all
    downs, or from an MLP of its own under each expert's number.
    """
    num_experts, inner_dim = shape.num_experts, shape.inner_dim
    if weights.first_of("gate_up_proj", "0.gate_proj.weight") == "gate_up_proj":
        gate_ups = weights.tensor("gate_up_proj", num_experts, 2 * inner_dim, hidden_dim)
        downs = weights.tensor("down_proj", num_experts, hidden_dim, inner_dim)
        yield from zip(gate_ups.unbind(), downs.unbind(), strict=True)
        return
    for index in range(num_experts):
        own, names = weights.under(str(index)), ("gate_proj.weight", "up_proj.weight")
        gate_up = torch.cat([own.tensor(name, inner_dim, hidden_dim) for name in names])
        yield gate_up, own.tensor("down_proj.weight", hidden_dim, inner_dim)


def _expert(gate_up: Tensor, down: Tensor, group: Group) -> GatedMlp:
    """A rank's part of an expert's inner channels; what it gives is a summand."""
    return GatedMlp(
        make_linear(gate_up_slice(gate_up, group)), make_linear(slice_of(down, group, axis=1))
    )
