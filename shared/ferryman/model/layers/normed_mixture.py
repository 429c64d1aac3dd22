"""A gated MLP and experts side by side, each between norms of its own (Gemma 4).

y = norm(mlp(norm(x))) + norm(Σ_chosen share · scale_expert · expert(norm(x)))

The shares are a softmax over the scores of the chosen, by a norm of x without weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ferryman.model.layers.decoder_layers import (
    FeedForward,
    LayerPlace,
    Norm,
    RmsNorm,
    gelu_tanh,
    load_norm,
)
from ferryman.model.layers.expert_router import ExpertRouter, SharesOfChosen
from ferryman.model.layers.moe import MixtureOfExperts, load_mixture
from ferryman.model.shapes.feed_forward_shapes import MoeShape
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.named_weights import Weights


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
    """`chosen` by the normed hidden states; an expert's shares are multiplied by its `scales`
    [experts]."""

    norm: Norm
    chosen: SharesOfChosen
    scales: Tensor

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = self.chosen(self.norm(hidden))
        return shares * self.scales[chosen], chosen


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
        chosen=SharesOfChosen(score, shape.experts_per_token),
        scales=weights.precise("per_expert_scale", shape.num_experts),
    )
