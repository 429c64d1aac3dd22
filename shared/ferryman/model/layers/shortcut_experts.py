"""Layers of two mixers and two MLPs, with experts beside the second mixer (LongCat-Flash).

hidden = hidden + mixer_1(norm(hidden))
x      = norm(hidden)
hidden = hidden + mlp_1(x)
hidden = hidden + mixer_2(norm(hidden))
hidden = hidden + mlp_2(norm(hidden)) + experts(x)

Some of the experts that a router chooses among are the identity ("zero-computation experts"):

experts(x) = Σ_chosen share · expert(x) + (Σ_chosen identities share) · x
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    OpenSum,
    add_and_norm,
)
from ferryman.model.layers.expert_router import ExpertRouter, shares_by_biased_measure
from ferryman.model.layers.moe import MixtureOfExperts, load_mixture
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.feed_forward_shapes import IdentityRouting, MoeShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.products.weighted_sum import weighted_sum

HalfLayer = DecoderLayer
"""A mixer and an MLP, each after a norm and with a residual path."""


@dataclass(frozen=True, slots=True)
class ShortcutLayer:
    """Two halves; `experts` read what the MLP of the first reads, and their output joins behind
    that of the second."""

    first: HalfLayer
    experts: FeedForward
    second: HalfLayer

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        first = self.first
        mixed = first.mixer.forward(first.mixer_norm(hidden), batch, state)
        hidden, normed = add_and_norm(hidden, mixed, 1.0, first.feed_forward_norm)
        fed = OpenSum(hidden, first.feed_forward(normed), 1.0)
        return self.second.left_open(fed, batch, state).closed() + self.experts(normed)


@dataclass(frozen=True, slots=True)
class ExpertsAndIdentities:
    """Routed experts, behind whose indices `router` has those of identities.

    A pair of a token and an identity goes to the lowest expert that the same token chose, with no
    share: products need no second sort of pairs, and read no weights that the token does not need.
    """

    router: ExpertRouter
    experts: MixtureOfExperts
    num_experts: int

    def __call__(self, hidden: Tensor) -> Tensor:
        shares, chosen = self.router(hidden)
        is_identity = chosen >= self.num_experts
        kept = shares.masked_fill(is_identity, 0.0)
        stand_in = chosen.amin(dim=1, keepdim=True).clamp(max=self.num_experts - 1)
        mixed = self.experts.mixed(hidden, kept, torch.where(is_identity, stand_in, chosen))
        return mixed.add_(hidden * _added_up(shares - kept))


def _added_up(shares: Tensor) -> Tensor:
    """Each token's sum [tokens, 1] of shares [tokens, experts_per_token], in their order."""
    return weighted_sum(torch.ones_like(shares)[:, :, None], shares)


def load_experts_and_identities(
    weights: Weights, shape: MoeShape, routing: IdentityRouting, hidden_dim: int
) -> ExpertsAndIdentities:
    """The experts and the router under `weights`. A checkpoint has no tensors of identities."""
    num_outputs = shape.num_experts + routing.num_identities
    under = weights.under("router")
    router = shares_by_biased_measure(
        make_linear(under.precise("classifier.weight", num_outputs, hidden_dim)),
        under.precise("e_score_correction_bias", num_outputs),
        shape.experts_per_token,
        routing.scaling,
    )
    experts = load_mixture(weights.under("experts"), shape, hidden_dim, router)
    return ExpertsAndIdentities(router, experts, shape.num_experts)
