"""Kimi Delta Attention (Kimi Linear, 2025) over slot-indexed state: a decay for each channel.

q, k, v    = silu(conv(u · Wqkv));   q, k scaled to length one in each head;   q / √head_dim
β          = sigmoid(u · Wb)
g          = -exp(A_log)·softplus(u · Wfa · Wfb + dt_bias)              by channel of the key
y          = delta rule of q, k, v with decay exp(g) and rate β
out        = norm(y) · sigmoid(u · Wga · Wgb) · Wout                    a norm for each head

In Ling 3 one product stands for the two of g and of the gate, and
g          = least · sigmoid(exp(A_log)·(u · Wf + dt_bias))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace, RmsNorm, load_norm
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.delta_shapes import KimiDeltaShape
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.matrix import Matrix, join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import sigmoid, softplus
from ferryman_kernels.elementwise.rms_norm import rms_norm
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode, causal_conv_prefill
from ferryman_kernels.recurrence.channel_delta_scan import channel_delta_decode, channel_delta_scan
from ferryman_kernels.recurrence.loops.unit_heads import LENGTH_EPS


@dataclass(frozen=True, slots=True)
class ChannelDecay:
    """The log decay g of each channel, at most 0.

    `decay` (exp(A_log)) [heads, 1] and `dt_bias` [heads, head_dim] are in the accumulation dtype.
    `least` is the least g, or 0.0 where there is none.
    """

    up: Linear
    decay: Tensor
    dt_bias: Tensor
    least: float = 0.0

    def __call__(self, projected: Tensor) -> Tensor:
        """[tokens, heads, head_dim] in the accumulation dtype."""
        steps = self.up(projected).to(self.decay.dtype).view(-1, *self.dt_bias.shape)
        steps = steps + self.dt_bias
        if self.least:
            return sigmoid(steps * self.decay) * self.least
        return softplus(steps) * -self.decay


def as_projected(x: Tensor) -> Tensor:
    """x itself: the in-projection has all channels already."""
    return x


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """The recurrent mixer of layer `layer`.

    `project_in` yields q, k, v and b of a rank's heads, and `gate_dim` channels each of decay and
    gate.
    `conv_weight` [conv_dim, conv_width] and `unit` [head_dim], all 1/√head_dim, are in the
    accumulation dtype. `shape` is a rank's share.
    """

    layer: int
    shape: KimiDeltaShape
    project_in: Linear
    conv_weight: Tensor
    unit: Tensor
    decay: ChannelDecay
    gate_up: Linear
    norm: RmsNorm
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        mixed, beta, g, gate = self._project(hidden)
        conv, ssm = state.conv[self.layer], state.ssm[self.layer]
        if isinstance(batch, PrefillBatch):
            mixed = causal_conv_prefill(mixed, conv, self.conv_weight, None, *batch.scans)
            y = channel_delta_scan(*self._heads(mixed), g, beta, ssm, *batch.scans)
            return self._finish(y, gate)

        def advance(mixed: Tensor, g: Tensor, beta: Tensor, *slots: Tensor) -> Tensor:
            read, write = slots
            convolved = causal_conv_decode(mixed, conv, self.conv_weight, None, read, write)
            return channel_delta_decode(ssm, *self._heads(convolved), g, beta, *slots)

        return self._finish(batch.wave_by_wave(advance, mixed, g, beta), gate)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q k v [tokens, conv_dim]; β [tokens, heads] and g [tokens, heads, head_dim], both in the
        accumulation dtype; the gate [tokens, heads, head_dim]."""
        shape = self.shape
        sizes = shape.conv_dim, shape.heads, shape.gate_dim, shape.gate_dim
        mixed, b, steps, gate = self.project_in(hidden).split_with_sizes(sizes, dim=1)
        gate = self.gate_up(gate).view(len(hidden), shape.heads, shape.head_dim)
        return mixed, sigmoid(b.to(self.unit.dtype)), self.decay(steps), gate

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k of length 1/√head_dim and 1, in the accumulation dtype; v; all [tokens, heads,
        head_dim]."""
        dim = self.shape.head_dim
        heads = mixed.view(len(mixed), 3, self.shape.heads, dim)
        rows = heads[:, :2].to(self.unit.dtype).reshape(-1, dim)
        units = rms_norm(rows, self.unit, LENGTH_EPS / dim)
        q, k = units.view(len(mixed), 2, self.shape.heads, dim).unbind(1)
        return q * dim**-0.5, k, heads[:, 2].contiguous()

    def _finish(self, y: Tensor, gate: Tensor) -> Tensor:
        wide = self.norm.weight.dtype
        normed = self.norm(y.to(wide).reshape(-1, self.shape.head_dim)).view_as(y)
        gated = normed * sigmoid(gate.to(wide))
        return self.project_out(gated.to(y.dtype).flatten(1))


def load_kimi_delta(weights: Weights, shape: KimiDeltaShape, place: LayerPlace) -> KimiDelta:
    """The mixer with tensors under `weights`: a rank's heads; low ranks are on every rank."""
    inner_dim, hidden_dim, dim = shape.inner_dim, place.hidden_dim, shape.head_dim
    heads, group = shape.heads, weights.group
    rank_heads = partial(share_of, heads=heads, group=group)
    rows = [
        share_of(weights.matrix(f"{name}_proj.weight", size, hidden_dim), heads, group)
        for name, size in (("q", inner_dim), ("k", inner_dim), ("v", inner_dim), ("b", heads))
    ]
    downs, (f_up, g_up) = _gates(weights, shape, hidden_dim)
    convs = [
        weights.precise(f"{name}_conv1d.weight", inner_dim, 1, shape.conv_width, part=rank_heads)
        for name in ("q", "k", "v")
    ]
    dt_bias = weights.precise("dt_bias", inner_dim, part=rank_heads).view(-1, dim)
    conv = torch.cat(convs).squeeze(1)
    out = weights.matrix("o_proj.weight", hidden_dim, inner_dim)
    return KimiDelta(
        layer=place.layer,
        shape=shape.shard(group.num_ranks),
        project_in=join_linear([*rows, *downs]),
        conv_weight=conv,
        unit=conv.new_full((dim,), dim**-0.5),
        decay=ChannelDecay(f_up, _decay(weights, heads), dt_bias, shape.least_decay),
        gate_up=g_up,
        norm=load_norm(weights, "o_norm", dim, place.norm_eps),
        project_out=summed_linear(share_of(out, heads, group, axis=1), None, group),
    )


def _gates(
    weights: Weights, shape: KimiDeltaShape, hidden_dim: int
) -> tuple[list[Matrix], tuple[Linear, Linear]]:
    """The rows of decay and gate in the in-projection, and the products behind it."""
    heads, inner_dim, dim, group = shape.heads, shape.inner_dim, shape.head_dim, weights.group
    if shape.has_wide_gates:
        wide = [weights.matrix(f"{name}_proj.weight", inner_dim, hidden_dim) for name in "fg"]
        return [share_of(rows, heads, group) for rows in wide], (as_projected, as_projected)
    low = [weights.matrix(f"{name}_a_proj.weight", dim, hidden_dim) for name in "fg"]
    rank_heads = partial(share_of, heads=heads, group=group)
    f_up, g_up = (
        make_linear(weights.tensor(f"{name}_b_proj.weight", inner_dim, dim, part=rank_heads))
        for name in "fg"
    )
    return low, (f_up, g_up)


def _decay(weights: Weights, heads: int) -> Tensor:
    """exp(A_log) [heads, 1] of a rank, which checkpoints store with axes of length one or not."""
    stored = weights.header("A_log").shape
    axis = len(stored) // 2
    shape = (heads,) if len(stored) == 1 else (1, 1, heads, 1)
    part = partial(share_of, heads=heads, group=weights.group, axis=axis)
    return weights.precise("A_log", *shape, part=part).exp().view(-1, 1)
