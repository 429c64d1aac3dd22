"""Lightning attention (Qin et al. 2024): linear attention with a fixed decay for each head.

state      ← exp(-slope)·state + v ⊗ k,    y = state·q              the scan of Mamba-2 with dt = 1
out        = (norm(y) · sigmoid(u · Wgate)) · Wout

MiniMax-Text-01: one norm over all heads;  q, k, v = silu(u · Wqkv), by head
slope of head h in layer l = 2^(-8 (h + 1) / heads) · (1 - l / (layers - 1 + 10⁻⁵) + 10⁻⁵)

Ling 2.5: a norm over each group of heads;  q = turned(norm(u · Wq)) / √head_dim,
                                            k = turned(norm(u · Wk)),  v = u · Wv
slope of head h in layer l = ALiBi's of h · (1 - l / (layers - 1) + 10⁻⁵)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace, RmsNorm, load_norm
from ferryman.model.layers.gating import ScanGate, SharedNorm, load_sigmoid_gate
from ferryman.model.layers.head_norms import NormedHeads, NormOfHeads
from ferryman.model.layers.rotation import load_rotary
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.recurrent_shapes import LightningShape, TurningLightningShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import join_linear, split_rows, summed_linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.elementwise.activations import sigmoid, silu

NORM_EPS = 1e-6
"""The eps of MiniMax's norm before the gate, independent of the other norms'."""


@dataclass(frozen=True, slots=True)
class LightningScan:
    """The recurrence of layer `layer`; `block` is the block of the scan.

    `rates` (-slope) and `skip` (zeros) [heads] are in the accumulation dtype.
    """

    layer: int
    block: int
    rates: Tensor
    skip: Tensor

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch, state: ModelState
    ) -> Tensor:
        """y of q, k and v, all [tokens, heads, head_dim]; every token has a step of length 1."""
        steps, ssm = self.rates.new_ones(len(v), len(self.rates)), state.ssm[self.layer]
        if isinstance(batch, PrefillBatch):
            inputs = v, steps, self.rates, k, q, self.skip
            return state.kernels.scan(*inputs, ssm, *batch.scans, self.block)

        def advance(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, *slots: Tensor) -> Tensor:
            inputs = v, steps, self.rates, k, q, self.skip
            return state.kernels.update(ssm, *inputs, *slots)

        return batch.wave_by_wave(advance, q, k, v, steps)


def _load_scan(weights: Weights, heads: int, place: LayerPlace, slopes: Tensor) -> LightningScan:
    """The recurrence of a rank's share of `slopes` [heads]."""
    wide = accumulation_dtype(weights.dtype)
    rates = share_of(-slopes, heads, weights.group).to(weights.device, wide)
    skip = torch.zeros(rates.shape, dtype=wide, device=weights.device)
    return LightningScan(place.layer, place.scan_block, rates, skip)


@dataclass(frozen=True, slots=True)
class LightningAttention:
    """MiniMax's mixer. `qkv` and `gate` are joined into one product; `shape` is a rank's share."""

    shape: LightningShape
    scan: LightningScan
    project_in: Linear
    norm: Callable[[Tensor], Tensor]
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        q, k, v, gate = self._project(hidden)
        y = self.scan(q, k, v, batch, state)
        return self.project_out(sigmoid(gate) * self.norm(y.flatten(1)))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v [tokens, heads, head_dim], and the gate [tokens, inner_dim]."""
        shape = self.shape
        sizes = 3 * shape.inner_dim, shape.inner_dim
        qkv, gate = self.project_in(hidden).split_with_sizes(sizes, dim=1)
        heads = silu(qkv).view(len(hidden), shape.heads, 3, shape.head_dim)
        q, k, v = (part.contiguous() for part in heads.unbind(2))
        return q, k, v, gate


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
    return LightningAttention(
        shape=shape.shard(group.num_ranks),
        scan=_load_scan(weights, shape.heads, place, slopes),
        project_in=join_linear([share_of(part, shape.heads, group) for part in (qkv, gate)]),
        norm=_joint_norm(weights, norm_weight),
        project_out=summed_linear(share_of(out, shape.heads, group, axis=1), None, group),
    )


def _slopes(heads: int, layer: int, num_layers: int) -> Tensor:
    """The slope of each head, in float64."""
    return _falling(heads) * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)


def _falling(heads: int) -> Tensor:
    """2^(-8 / heads), the square of it, and so on, as many as there are heads."""
    numbers = torch.arange(1, heads + 1, dtype=torch.float64)
    return torch.exp2(-8.0 * numbers / heads)


def _joint_norm(weights: Weights, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The norm over all heads; `weight` is that of a rank's channels, in the accumulation dtype."""
    if weights.group.num_ranks == 1:
        return RmsNorm(weight, NORM_EPS)
    shared = SharedNorm(weight, NORM_EPS, num_groups=1, group=weights.group)
    return lambda y: shared(y.to(weight.dtype)).to(y.dtype)


@dataclass(frozen=True, slots=True)
class TurningLightning:
    """Ling's mixer. q, k, v and the gate are one product; `heads` norms and turns q and k, and
    scales q. `shape` is a rank's share."""

    shape: TurningLightningShape
    scan: LightningScan
    project_in: Linear
    heads: NormedHeads
    gate: ScanGate
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        sizes = (self.shape.inner_dim,) * 4
        *qkv, gate = self.project_in(hidden).split_with_sizes(sizes, dim=1)
        q, k, v = (part.view(len(hidden), self.shape.heads, -1) for part in qkv)
        q, k = self.heads(q, k, batch.positions)
        y = self.scan(q.contiguous(), k.contiguous(), v.contiguous(), batch, state)
        return self.project_out(self.gate(y.flatten(1), gate))


def load_turning_lightning(
    weights: Weights, shape: TurningLightningShape, place: LayerPlace, num_layers: int
) -> TurningLightning:
    """Ling's lightning attention with tensors under `weights`: a rank's heads."""
    hidden_dim, inner_dim, group = place.hidden_dim, shape.inner_dim, weights.group
    qkv = weights.matrix("query_key_value.weight", 3 * inner_dim, hidden_dim)
    gate = weights.matrix("g_proj.weight", inner_dim, hidden_dim)
    out = weights.matrix("dense.weight", hidden_dim, inner_dim)
    rows = (*split_rows(qkv, [inner_dim] * 3), gate)
    depth = 1 - place.layer / max(num_layers - 1, 1) + 1e-5
    return TurningLightning(
        shape=shape.shard(group.num_ranks),
        scan=_load_scan(weights, shape.heads, place, _alibi_slopes(shape.heads) * depth),
        project_in=join_linear([share_of(part, shape.heads, group) for part in rows]),
        heads=_load_heads(weights, shape, place),
        gate=load_sigmoid_gate(
            weights, "g_norm.weight", inner_dim, shape.norm_groups, place.norm_eps
        ),
        project_out=summed_linear(share_of(out, shape.heads, group, axis=1), None, group),
    )


def _load_heads(weights: Weights, shape: TurningLightningShape, place: LayerPlace) -> NormedHeads:
    """The norms of q and k before they turn. A rotation is linear, so q is scaled by its norm."""
    q, k = (
        load_norm(weights, name, shape.head_dim, place.norm_eps)
        for name in ("query_layernorm", "key_layernorm")
    )
    scaled = replace(q, weight=q.weight * shape.head_dim**-0.5)
    turn = load_rotary(weights, shape.positions)
    return NormedHeads(NormOfHeads(scaled), NormOfHeads(k), turn)


def _alibi_slopes(heads: int) -> Tensor:
    """ALiBi's slope of each head, in float64: those of the power of two below their number, and
    for the rest every second one of the next power (Press et al. 2022)."""
    power = 1 << (heads.bit_length() - 1)
    return torch.cat((_falling(power), _falling(2 * power)[0::2][: heads - power]))
