"""The Mamba-2 mixer (Dao & Gu 2024) over slot-indexed state.

z, xBC, dt = u · Win
x, B, C    = silu(conv(xBC))
dt         = clamp(softplus(dt + dt_bias))
y          = scan of  state ← exp(dt·A)·state + dt·(x ⊗ B),  y = state·C + D·x
out        = norm(y · silu(z)) · Wout              (or another way for the gate, see `Gating`)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.gating import ScanGate, load_gate
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.ranks import Cuttable, Group, share_of
from ferryman.model.shapes.recurrent_shapes import MambaShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import join_linear, split_rows, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.recurrence.causal_conv import causal_conv_prefill
from ferryman_kernels.recurrence.mamba_step import StepWeights


@dataclass(frozen=True, slots=True)
class MambaMixer:
    """The recurrent mixer of layer `layer`. `scan_block` is the block of the scan.

    The weights of the convolution and the norm are in the accumulation dtype, which the kernels
    take: converting them at every call cost as much as the norm. `shape` is a rank's share.
    """

    layer: int
    shape: MambaShape
    scan_block: int
    project_in: Linear
    step: StepWeights
    gate: ScanGate
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        gate, mixed, dt = self._project(hidden)
        step, conv, ssm = self.step, state.conv[self.layer], state.ssm[self.layer]
        if isinstance(batch, PrefillBatch):
            mixed = causal_conv_prefill(mixed, conv, step.conv_weight, step.conv_bias, *batch.scans)
            x, B, C = self._parts(mixed)
            dt = step.time_steps(dt)
            inputs = x, dt, step.A, B, C, step.D
            y = state.kernels.scan(*inputs, ssm, *batch.scans, self.scan_block)
            return self._finish(y, gate)

        def advance(mixed: Tensor, dt: Tensor, *slots: Tensor) -> Tensor:
            return state.kernels.mamba_step(mixed, dt, step, conv, ssm, *slots)

        return self._finish(batch.wave_by_wave(advance, mixed, dt), gate)

    def _finish(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.project_out(self.gate(y.flatten(1), gate))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate [tokens, inner_dim], x B C [tokens, conv_dim], dt [tokens, ssm_heads]."""
        shape = self.shape
        gate, mixed, dt = self.project_in(hidden).split_with_sizes(
            (shape.inner_dim, shape.conv_dim, shape.ssm_heads), dim=1
        )
        return gate, mixed, dt

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, ssm_heads, ssm_head_dim], B and C [tokens, ssm_groups, ssm_state]."""
        shape = self.shape
        x, B, C = mixed.split_with_sizes((shape.inner_dim, shape.group_dim, shape.group_dim), dim=1)
        return (
            x.view(-1, shape.ssm_heads, shape.ssm_head_dim),
            B.view(-1, shape.ssm_groups, shape.ssm_state),
            C.view(-1, shape.ssm_groups, shape.ssm_state),
        )


def load_mamba(weights: Weights, shape: MambaShape, place: LayerPlace) -> MambaMixer:
    """The Mamba-2 mixer with tensors under `weights`: a rank's heads, and their groups."""
    hidden_dim, inner_dim, heads = place.hidden_dim, shape.inner_dim, shape.ssm_heads
    group, rank_parts = weights.group, _Own(shape, weights.group)
    conv_dims = shape.conv_dim, 1, shape.conv_width
    conv = weights.precise("conv1d.weight", *conv_dims, part=rank_parts.joined_conv)
    in_bias, out_bias, conv_bias = None, None, None
    if shape.has_in_bias:
        in_bias = weights.tensor("in_proj.bias", shape.proj_dim, part=rank_parts.joined_projected)
    if shape.has_out_bias:
        out_bias = weights.tensor("out_proj.bias", hidden_dim)
    if shape.has_conv_bias:
        conv_bias = weights.precise("conv1d.bias", shape.conv_dim, part=rank_parts.joined_conv)
    project_in = weights.matrix("in_proj.weight", shape.proj_dim, hidden_dim)
    project_out = weights.matrix("out_proj.weight", hidden_dim, inner_dim)
    return MambaMixer(
        layer=place.layer,
        shape=shape.shard(group.num_ranks),
        scan_block=place.scan_block,
        project_in=join_linear(rank_parts.projected(project_in), in_bias),
        step=StepWeights(
            conv_weight=conv.squeeze(1).contiguous(),
            conv_bias=conv_bias,
            A=-weights.precise("A_log", heads, part=rank_parts.heads).exp(),
            D=weights.precise("D", heads, part=rank_parts.heads),
            dt_bias=weights.precise("dt_bias", heads, part=rank_parts.heads),
            dt_limit=shape.dt_limit,
        ),
        gate=load_gate(weights, shape, place.norm_eps),
        project_out=summed_linear(share_of(project_out, heads, group, axis=1), out_bias, group),
    )


@dataclass(frozen=True, slots=True)
class _Own:
    """A rank's part of a mixer's tensors, along their first axis; `shape` is the whole mixer's."""

    shape: MambaShape
    group: Group

    def heads(self, tensor: Tensor) -> Tensor:
        """The part of a tensor with the same number of rows for every head."""
        return share_of(tensor, self.shape.ssm_heads, self.group)

    def conv(self, whole: Cuttable) -> list[Cuttable]:
        """The parts of the channels x, B, C, each divided separately: B and C by their groups."""
        shape = self.shape
        parts = split_rows(whole, (shape.inner_dim, shape.group_dim, shape.group_dim))
        counts = (shape.ssm_heads, shape.ssm_groups, shape.ssm_groups)
        return [
            share_of(part, count, self.group) for part, count in zip(parts, counts, strict=True)
        ]

    def projected(self, whole: Cuttable) -> list[Cuttable]:
        """The parts of the in-projection's outputs: gate, x B C, dt."""
        shape, heads = self.shape, self.shape.ssm_heads
        gate, mixed, dt = split_rows(whole, (shape.inner_dim, shape.conv_dim, heads))
        ends = [share_of(part, heads, self.group) for part in (gate, dt)]
        return [ends[0], *self.conv(mixed), ends[1]]

    def joined_conv(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.conv(tensor))

    def joined_projected(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.projected(tensor))
