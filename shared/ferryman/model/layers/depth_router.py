"""Experts whose router reads its own states of the layer before (ZAYA).

r        = x · Wdown + bdown + scale · r of the layer before
scores   = gelu(gelu(norm(r) · W1 + b1) · W2 + b2) · Wout     one more than there are experts
share    = softmax(scores) of the one with the greatest share + bias

A token whose best score is the last one skips the experts of its layer. The routers' states travel
behind the channels of the hidden states, from layer to layer.

A layer's two sums, of hidden states and what is added to them, are learned by channel, and in the
accumulation dtype:

hidden   = (f(norm(hidden)) + b_new) · s_new + (hidden + b_old) · s_old
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace, Mixer, Norm, load_norm
from ferryman.model.layers.moe import MixtureOfExperts, load_mixture
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.feed_forward_shapes import MoeShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.elementwise.activations import gelu
from ferryman_kernels.elementwise.expert_choice import (
    ExpertNumbers,
    ExpertRule,
    Measure,
    choose_experts,
)


@dataclass(frozen=True, slots=True)
class LearnedChannels:
    """(x + bias) · scale in the dtype of both, which are [hidden_dim] in the accumulation dtype."""

    bias: Tensor
    scale: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return (x.to(self.bias.dtype) + self.bias) * self.scale


@dataclass(frozen=True, slots=True)
class LearnedSum:
    """The sum of hidden states and of what is added to them, each by channels of its own."""

    added: LearnedChannels
    kept: LearnedChannels

    def __call__(self, added: Tensor, kept: Tensor) -> Tensor:
        return self.added(added) + self.kept(kept)


@dataclass(frozen=True, slots=True)
class RouterStates:
    """A router's states [tokens, router_dim]; `scale` [router_dim] is that of the states before,
    zeros in the first layer. Both are in the accumulation dtype."""

    down: Linear
    scale: Tensor

    def __call__(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self.down(hidden) + before * self.scale


@dataclass(frozen=True, slots=True)
class SkippingRouter:
    """The best expert by a router's states [tokens, router_dim], or none: a share of zero."""

    norm: Norm
    hidden: tuple[Linear, Linear]
    score: Linear
    bias: Tensor

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        states = self.norm(hidden)
        for product in self.hidden:
            states = gelu(product(states))
        rule, numbers = ExpertRule(1, Measure.SOFTMAX), ExpertNumbers(self.bias)
        shares, chosen = choose_experts(self.score(states), rule, numbers, hidden.dtype)
        skips = chosen == len(self.bias) - 1
        return shares.masked_fill(skips, 0.0), chosen.masked_fill(skips, 0)


@dataclass(frozen=True, slots=True)
class DepthRoutedLayer:
    """A mixer and experts; hidden states [tokens, hidden_dim + router_dim], in and out, end with
    the states of the layer's router, and are in the accumulation dtype.

    `dtype` is the model's: norms, mixer and experts get the hidden state in it.
    """

    mixer_norm: Norm
    mixer: Mixer
    mixed_sum: LearnedSum
    expert_norm: Norm
    states: RouterStates
    experts: MixtureOfExperts
    expert_sum: LearnedSum
    dtype: torch.dtype

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        router_dim = len(self.states.scale)
        kept, before = hidden.split_with_sizes((hidden.shape[1] - router_dim, router_dim), dim=1)
        mixed = self.mixer.forward(self.mixer_norm(self._narrow(kept)), batch, state)
        kept = self.mixed_sum(mixed, kept)
        normed = self.expert_norm(self._narrow(kept))
        states = self.states(normed, before)
        shares, chosen = self.experts.router(states.to(self.dtype))
        kept = self.expert_sum(self.experts.mixed(normed, shares, chosen), kept)
        return torch.cat((kept, states), dim=1)

    def _narrow(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.dtype).contiguous()


@dataclass(frozen=True, slots=True)
class FirstRoutedLayer:
    """The first layer: its input [tokens, hidden_dim] in the model's dtype is widened, and no
    router was before its own."""

    entering: LearnedChannels
    inner: DepthRoutedLayer

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        wide = self.entering(hidden)
        none = wide.new_zeros(len(wide), len(self.inner.states.scale))
        return self.inner.forward(torch.cat((wide, none), dim=1), batch, state)


@dataclass(frozen=True, slots=True)
class NormWithoutStates:
    """The final norm: of the first `hidden_dim` channels, in the model's dtype."""

    hidden_dim: int
    norm: Norm
    dtype: torch.dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden[:, : self.hidden_dim].to(self.dtype).contiguous())


def load_learned_sum(weights: Weights, hidden_dim: int) -> LearnedSum:
    return LearnedSum(
        load_learned_channels(weights, "hidden_states", hidden_dim),
        load_learned_channels(weights, "residual", hidden_dim),
    )


def load_learned_channels(weights: Weights, name: str, hidden_dim: int) -> LearnedChannels:
    """The bias and the scale called `name`_bias and `name`_scale."""
    bias = weights.precise(f"{name}_bias", hidden_dim)
    return LearnedChannels(bias, weights.precise(f"{name}_scale", hidden_dim))


def load_depth_routed_layer(
    weights: Weights, place: LayerPlace, mixer: Mixer, shape: MoeShape, router_dim: int
) -> DepthRoutedLayer:
    """The layer under `weights` around its `mixer`; every rank computes the whole router."""
    dim, gate = place.hidden_dim, weights.under("mlp.gate")
    mixer_norm, expert_norm = (
        load_norm(weights, name, dim, place.norm_eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    router = _load_router(gate, shape, router_dim, place.norm_eps)
    return DepthRoutedLayer(
        mixer_norm=mixer_norm,
        mixer=mixer,
        mixed_sum=load_learned_sum(weights.under("post_attention_residual_scale"), dim),
        expert_norm=expert_norm,
        states=_load_states(gate, place, router_dim),
        experts=load_mixture(weights.under("mlp.experts"), shape, dim, router),
        expert_sum=load_learned_sum(weights.under("post_mlp_residual_scale"), dim),
        dtype=weights.dtype,
    )


def _load_states(gate: Weights, place: LayerPlace, router_dim: int) -> RouterStates:
    bias = gate.tensor("down_proj.bias", router_dim)
    down = gate.matrix("down_proj.weight", router_dim, place.hidden_dim).linear(bias)
    if place.layer:
        return RouterStates(down, gate.precise("router_states_scale", router_dim))
    wide = accumulation_dtype(gate.dtype)
    return RouterStates(down, torch.zeros(router_dim, dtype=wide, device=gate.device))


def _load_router(gate: Weights, shape: MoeShape, router_dim: int, eps: float) -> SkippingRouter:
    inner, num_scores = gate.under("router_mlp"), shape.num_experts + 1
    first, second = (
        inner.matrix(f"{name}.weight", router_dim, router_dim).linear(
            inner.tensor(f"{name}.bias", router_dim)
        )
        for name in ("fc1", "fc2")
    )
    return SkippingRouter(
        norm=load_norm(inner, "norm", router_dim, eps),
        hidden=(first, second),
        score=inner.matrix("out_proj.weight", num_scores, router_dim).linear(None),
        bias=gate.precise("balancing_biases", num_scores),
    )
