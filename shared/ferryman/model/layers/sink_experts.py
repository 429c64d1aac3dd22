"""Experts whose shares are those of a token's chosen and shared experts together (Inkling).

score  = sigmoid(x · Wᵀ)          of all experts; the last of them are shared, and always chosen
chosen = the best of score + bias, and the shared ones
share  = scale · score / Σ score of the chosen

A layer has a convolution, with a residual path around it, behind its mixer and its feed-forward:

hidden += conv(mixer(norm(hidden)));   hidden += conv(feed_forward(norm(hidden)))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from ferryman.model.layers.convolved_attention import ChannelConv
from ferryman.model.layers.decoder_layers import (
    FeedForward,
    LayerPlace,
    Mixer,
    Norm,
    add_and_norm,
    load_norm,
)
from ferryman.model.layers.expert_router import WideScores
from ferryman.model.layers.experts import ExpertMatrices, ShareOfOutput, load_experts_for
from ferryman.model.layers.mlp import GatedMlp, gated_by
from ferryman.model.layers.moe import MixtureOfExperts
from ferryman.model.layers.profiled_attention import load_residual_taps
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.feed_forward_shapes import MlpShape, MoeShape
from ferryman.model.shapes.ranks import slice_of
from ferryman.model.shapes.recurrent_shapes import LayerConvShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.matrix import Matrix, join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.elementwise.activations import sigmoid, silu
from ferryman_kernels.elementwise.expert_choice import (
    ExpertNumbers,
    ExpertRule,
    Measure,
    choose_experts,
)


@dataclass(frozen=True, slots=True)
class SinkRouter:
    """The shares of the chosen experts and of the shared ones, which are the last `num_shared`.

    `bias` [routed experts] and `scale` [1] are in the accumulation dtype.
    """

    score: WideScores
    bias: Tensor
    scale: Tensor
    num_chosen: int
    num_shared: int

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        num_routed, wide = len(self.bias), accumulation_dtype(hidden.dtype)
        scores = self.score(hidden)
        routed, sinks = scores.split_with_sizes((num_routed, self.num_shared), dim=1)
        rule = ExpertRule(self.num_chosen, Measure.SIGMOID)
        numbers = ExpertNumbers(self.bias)
        shares, chosen = choose_experts(routed.contiguous(), rule, numbers, wide)
        shares = torch.cat((shares, sigmoid(sinks.contiguous())), dim=1)
        # One after the other: torch's sum promises no order.
        total = reduce(torch.add, shares.unbind(1))
        shares = (shares / total[:, None] * self.scale).to(hidden.dtype)
        last = torch.arange(num_routed, num_routed + self.num_shared, device=chosen.device)
        return shares, torch.cat((chosen, last.expand(len(chosen), -1)), dim=1)


@dataclass(frozen=True, slots=True)
class ScaledFeedForward:
    """scale · inner(x); `scale` is [1] in the model's dtype."""

    inner: FeedForward
    scale: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) * self.scale


@dataclass(frozen=True, slots=True)
class ConvolvedLayer:
    """A mixer and a feed-forward, each after a norm, before a convolution, with a residual path.

    The convolutions' states are the last channels of the layer's own, those of `fed` behind those
    of `mixed`.
    """

    layer: int
    mixer_norm: Norm
    mixer: Mixer
    mixed: ChannelConv
    feed_forward_norm: Norm
    feed_forward: FeedForward
    fed: ChannelConv

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        states, dim = state.conv[self.layer], hidden.shape[1]
        mixed = self.mixer.forward(self.mixer_norm(hidden), batch, state)
        mixed = self.mixed(mixed, states[:, -2 * dim : -dim], batch)
        hidden, normed = add_and_norm(hidden, mixed, 1.0, self.feed_forward_norm)
        return hidden + self.fed(self.feed_forward(normed), states[:, -dim:], batch)


def load_convolved_layer(
    weights: Weights,
    place: LayerPlace,
    mixer: Mixer,
    feed_forward: FeedForward,
    conv: LayerConvShape,
) -> ConvolvedLayer:
    dim = place.hidden_dim
    mixed, fed = (
        ChannelConv(load_residual_taps(weights, f"{name}_sconv.conv1d", dim, conv.conv_width), None)
        for name in ("attn", "mlp")
    )
    norm = partial(load_norm, weights, dim=dim, eps=place.norm_eps)
    return ConvolvedLayer(
        layer=place.layer,
        mixer_norm=norm("input_layernorm"),
        mixer=mixer,
        mixed=mixed,
        feed_forward_norm=norm("post_attention_layernorm"),
        feed_forward=feed_forward,
        fed=fed,
    )


def load_scaled_mlp(weights: Weights, shape: MlpShape, hidden_dim: int) -> ScaledFeedForward:
    """The MLP under `weights`, whose gate and up may be interleaved by rows."""
    group, inner_dim = weights.group, shape.inner_dim
    if weights.has_module("w13_dn"):
        whole = weights.matrix("w13_dn.weight", 2 * inner_dim, hidden_dim)
        parts = [slice_of(part, group) for part in _apart(whole)]
    else:
        parts = [
            slice_of(weights.matrix(f"{name}_proj.weight", inner_dim, hidden_dim), group)
            for name in ("gate", "up")
        ]
    down = weights.matrix("down_proj.weight", hidden_dim, inner_dim)
    mlp = GatedMlp(join_linear(parts), summed_linear(slice_of(down, group, axis=1), None, group))
    return ScaledFeedForward(mlp, weights.tensor("global_scale", 1))


def _apart(whole: Matrix) -> list[Matrix]:
    """Gate and up of rows that take turns."""
    rows = torch.arange(whole.shape[0])
    return [whole.with_rows(rows[first::2]) for first in (0, 1)]


def load_sink_mixture(
    weights: Weights, moe: MoeShape, num_shared: int, scaling: float, hidden_dim: int
) -> MixtureOfExperts:
    """Routed and shared experts under `weights` as one list of experts."""
    group, gate = weights.group, weights.under("gate")
    router = SinkRouter(
        score=WideScores(
            make_linear(gate.precise("weight", moe.num_experts + num_shared, hidden_dim))
        ),
        bias=gate.precise("e_score_correction_bias", moe.num_experts),
        scale=gate.precise("global_scale", 1) * scaling,
        num_chosen=moe.experts_per_token,
        num_shared=num_shared,
    )
    parts = [
        *_routed(weights.under("experts"), moe, hidden_dim),
        *_shared(weights.under("shared_experts"), num_shared, moe.inner_dim, hidden_dim),
    ]
    cut = (
        ExpertMatrices([slice_of(row, group) for row in rows], slice_of(down, group, axis=1))
        for rows, down in parts
    )
    experts = load_experts_for(weights.device, cut, gated_by(silu), ShareOfOutput())
    return MixtureOfExperts(router, experts, group)


Parts = list[tuple[list[Matrix], Matrix]]
"""Gate and up, and down, of each expert."""


def _routed(weights: Weights, moe: MoeShape, hidden_dim: int) -> Parts:
    count, inner_dim = moe.num_experts, moe.inner_dim
    downs = weights.matrices("down_proj", count, hidden_dim, inner_dim)
    if weights.has("w13_weight"):
        wholes = weights.matrices("w13_weight", count, 2 * inner_dim, hidden_dim)
        return list(zip(map(_apart, wholes), downs, strict=True))
    wholes = weights.matrices("gate_up_proj", count, 2 * inner_dim, hidden_dim)
    halves = ([whole.narrow(0, at, inner_dim) for at in (0, inner_dim)] for whole in wholes)
    return list(zip(halves, downs, strict=True))


def _shared(weights: Weights, count: int, inner_dim: int, hidden_dim: int) -> Parts:
    downs = weights.matrices("down_proj", count, hidden_dim, inner_dim)
    if weights.has("shared_w13_weight"):
        wholes = weights.matrices("shared_w13_weight", count, 2 * inner_dim, hidden_dim)
        return list(zip(map(_apart, wholes), downs, strict=True))
    gates, ups = (
        weights.matrices(f"{name}_proj", count, inner_dim, hidden_dim) for name in ("gate", "up")
    )
    return [([gate, up], down) for gate, up, down in zip(gates, ups, downs, strict=True)]
