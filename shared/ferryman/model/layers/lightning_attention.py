"""Lightning attention (Qin et al. 2024): linear attention with a fixed decay for each head.

q, k, v    = silu(u · Wqkv), by head
state      ← exp(-slope)·state + v ⊗ k,    y = state·q              the scan of Mamba-2 with dt = 1
out        = (norm(y) · sigmoid(u · Wgate)) · Wout                  one norm over all heads

slope of head h in layer l = 2^(-8 (h + 1) / heads) · (1 - l / (layers - 1 + 10⁻⁵) + 10⁻⁵)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace, RmsNorm
from ferryman.model.layers.gating import SharedNorm
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.recurrent_shapes import LightningShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import sigmoid, silu

NORM_EPS = 1e-6
"""The eps of the norm before the gate, independent of the other norms'."""


@dataclass(frozen=True, slots=True)
class LightningAttention:
    """The recurrent mixer of layer `layer`. `scan_block` is the block of the scan.

    `qkv` and `gate` are joined into one product. `rates` (-slope) and `skip` (zeros) [heads] are in
    the accumulation dtype. `shape` is a rank's share.
    """

    layer: int
    shape: LightningShape
    scan_block: int
    project_in: Linear
    rates: Tensor
    skip: Tensor
    norm: Callable[[Tensor], Tensor]
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        q, k, v, gate = self._project(hidden)
        steps, ssm = self._steps(hidden), state.ssm[self.layer]
        if isinstance(batch, PrefillBatch):
            inputs = v, steps, self.rates, k, q, self.skip
            y = state.kernels.scan(*inputs, ssm, *batch.scans, self.scan_block)
            return self._finish(y, gate)

        def advance(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, *slots: Tensor) -> Tensor:
            inputs = v, steps, self.rates, k, q, self.skip
            return state.kernels.update(ssm, *inputs, *slots)

        return self._finish(batch.wave_by_wave(advance, q, k, v, steps), gate)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v [tokens, heads, head_dim], and the gate [tokens, inner_dim]."""
        shape = self.shape
        sizes = 3 * shape.inner_dim, shape.inner_dim
        qkv, gate = self.project_in(hidden).split_with_sizes(sizes, dim=1)
        heads = silu(qkv).view(len(hidden), shape.heads, 3, shape.head_dim)
        q, k, v = (part.contiguous() for part in heads.unbind(2))
        return q, k, v, gate

    def _steps(self, hidden: Tensor) -> Tensor:
        """One step of length 1 for each token and head."""
        return self.rates.new_ones(len(hidden), self.shape.heads)

    def _finish(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.project_out(sigmoid(gate) * self.norm(y.flatten(1)))


def load_lightning(
    weights: Weights, shape: LightningShape, place: LayerPlace, num_layers: int
) -> LightningAttention:
    """The lightning attention with tensors under `weights`: a rank's heads."""
    hidden_dim, inner_dim, group = place.hidden_dim, shape.inner_dim, weights.group
    rank_heads = partial(share_of, heads=shape.heads, group=group)
    qkv = weights.matrix("qkv_proj.weight", 3 * inner_dim, hidden_dim)
    gate = weights.matrix("output_gate.weight", inner_dim, hidden_dim)
    out = weights.matrix("out_proj.weight", hidden_dim, inner_dim)
    norm_weight = weights.precise("norm.weight", inner_dim, part=rank_heads)
    slopes = _slopes(shape.heads, place.layer, num_layers)
    rates = share_of(-slopes, shape.heads, group).to(norm_weight)
    return LightningAttention(
        layer=place.layer,
        shape=shape.shard(group.num_ranks),
        scan_block=place.scan_block,
        project_in=join_linear([share_of(part, shape.heads, group) for part in (qkv, gate)]),
        rates=rates,
        skip=torch.zeros_like(rates),
        norm=_joint_norm(weights, norm_weight),
        project_out=summed_linear(share_of(out, shape.heads, group, axis=1), None, group),
    )


def _slopes(heads: int, layer: int, num_layers: int) -> Tensor:
    """The slope of each head, in float64."""
    numbers = torch.arange(1, heads + 1, dtype=torch.float64)
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return torch.exp2(-8.0 * numbers / heads) * factor


def _joint_norm(weights: Weights, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The norm over all heads; `weight` is that of a rank's channels, in the accumulation dtype."""
    if weights.group.num_ranks == 1:
        return RmsNorm(weight, NORM_EPS)
    shared = SharedNorm(weight, NORM_EPS, num_groups=1, group=weights.group)
    return lambda y: shared(y.to(weight.dtype)).to(y.dtype)
