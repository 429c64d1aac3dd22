"""A mixture of experts: each token goes through the few experts its router likes best.

weights = softmax over the chosen experts' router logits
y       = Σ_chosen weight · expert(x)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.layers import FeedForward, GatedMlp
from ferryman.model.linear import Linear, make_linear
from ferryman.model.shapes import MoeShape
from ferryman.model.weights import Weights, accumulation_dtype


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts: one product per expert present in the batch, over all of its tokens."""

    router: Linear
    experts: tuple[GatedMlp, ...]
    experts_per_token: int

    def __call__(self, hidden: Tensor) -> Tensor:
        scores = self.router(hidden).to(accumulation_dtype(hidden.dtype))
        best, chosen = scores.topk(self.experts_per_token, dim=-1)  # [tokens, experts_per_token]
        shares = best.softmax(dim=-1).to(hidden.dtype).flatten()
        by_expert = chosen.flatten().argsort(stable=True)  # indices into token-expert pairs
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        pairs = by_expert.split_with_sizes(counts)
        mixed = torch.zeros_like(hidden)
        for expert, pair in zip(self.experts, pairs, strict=True):
            if len(pair):
                tokens = pair // self.experts_per_token
                fed = expert(hidden[tokens]) * shares[pair, None]
                mixed.index_add_(0, tokens, fed)
        return mixed


@dataclass(frozen=True, slots=True)
class ExpertsBesideShared:
    """Routed experts, and one MLP that every token goes through."""

    routed: MixtureOfExperts
    shared: FeedForward

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.routed(hidden).add_(self.shared(hidden))


def load_experts(weights: Weights, shape: MoeShape, hidden_dim: int) -> MixtureOfExperts:
    """The experts under `weights`, in the published format or in the one transformers 5 holds."""
    num_experts, inner_dim = shape.num_experts, shape.inner_dim
    router = weights.first_of("router.layer.weight", "router.weight")
    gate_up = weights.first_of("input_linear.weight", "experts.gate_up_proj")
    down = weights.first_of("output_linear.weight", "experts.down_proj")
    gates = weights.tensor(gate_up, num_experts, 2 * inner_dim, hidden_dim)
    downs = weights.tensor(down, num_experts, hidden_dim, inner_dim)
    return MixtureOfExperts(
        router=make_linear(weights.tensor(router, num_experts, hidden_dim)),
        experts=tuple(
            GatedMlp(make_linear(gate), make_linear(down))
            for gate, down in zip(gates.unbind(), downs.unbind(), strict=True)
        ),
        experts_per_token=shape.experts_per_token,
    )
