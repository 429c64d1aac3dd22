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
from torch.nn import functional as F

from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.gating import Gate, load_gate
from ferryman.model.layers import Place
from ferryman.model.linear import Linear, make_linear, make_summed
from ferryman.model.ranks import Group, share_of
from ferryman.model.shapes import MambaShape
from ferryman.model.state import ModelState
from ferryman.model.weights import Weights
from ferryman_kernels.causal_conv import causal_conv_decode, causal_conv_prefill
from ferryman_kernels.ssd_chunk_scan import chunk_scan
from ferryman_kernels.ssd_decode import selective_state_update


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The parameters of the scan: `A`, `D`, `dt_bias` [ssm_heads], in the accumulation dtype."""

    A: Tensor
    D: Tensor
    dt_bias: Tensor
    dt_limit: tuple[float, float]

    def time_steps(self, dt: Tensor) -> Tensor:
        """dt [tokens, ssm_heads] behind its bias, softplus and clamp, in the accumulation dtype."""
        return F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias).clamp_(*self.dt_limit)


@dataclass(frozen=True, slots=True)
class Mamba:
    """The recurrent mixer of layer `layer`. `scan_chunk` is the absolute grid of the scan.

    The convolution's and the norm's weights are in the accumulation dtype, in which kernels want
    them: converting them at every call cost as much as the norm. `shape` is a rank's share.
    """

    layer: int
    shape: MambaShape
    scan_chunk: int
    project_in: Linear
    conv_weight: Tensor
    conv_bias: Tensor | None
    recurrence: Recurrence
    gate: Gate
    project_out: Linear

    def prefill(self, hidden: Tensor, batch: PrefillBatch, state: ModelState) -> Tensor:
        slots, ssm = state.recurrent[self.layer], self.recurrence
        gate, mixed, dt = self._project(hidden)
        mixed = causal_conv_prefill(
            mixed,
            slots.conv_states,
            self.conv_weight,
            self.conv_bias,
            batch.spans,
            batch.working_slots,
            batch.snapshots,
        )
        x, B, C = self._parts(mixed)
        y = chunk_scan(
            x,
            ssm.time_steps(dt),
            ssm.A,
            B,
            C,
            ssm.D,
            slots.ssm_states,
            batch.spans,
            batch.working_slots,
            batch.snapshots,
            self.scan_chunk,
        )
        return self.project_out(self.gate(y.flatten(1), gate))

    def decode(self, hidden: Tensor, batch: DecodeBatch, state: ModelState) -> Tensor:
        slots, ssm = state.recurrent[self.layer], self.recurrence
        gate, mixed, dt = self._project(hidden)
        steps = ssm.time_steps(dt)

        def advance(wave: slice) -> Tensor:
            places = batch.read_slots[wave], batch.write_slots[wave]
            convolved = causal_conv_decode(
                mixed[wave], slots.conv_states, self.conv_weight, self.conv_bias, *places
            )
            x, B, C = self._parts(convolved)
            return selective_state_update(
                slots.ssm_states, x, steps[wave], ssm.A, B, C, ssm.D, *places
            )

        y = batch.wave_by_wave(advance)
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


def load_mamba(weights: Weights, shape: MambaShape, place: Place) -> Mamba:
    """The Mamba-2 mixer whose tensors lie under `weights`: a rank's heads, and their groups."""
    hidden_dim, inner_dim, heads = place.hidden_dim, shape.inner_dim, shape.ssm_heads
    group, own = weights.group, _Own(shape, weights.group)
    conv = own.conv(weights.precise("conv1d.weight", shape.conv_dim, 1, shape.conv_width))
    in_bias, out_bias, conv_bias = None, None, None
    if shape.has_in_bias:
        in_bias = own.projected(weights.tensor("in_proj.bias", shape.proj_dim))
    if shape.has_out_bias:
        out_bias = weights.tensor("out_proj.bias", hidden_dim)
    if shape.has_conv_bias:
        conv_bias = own.conv(weights.precise("conv1d.bias", shape.conv_dim))
    project_in = weights.tensor("in_proj.weight", shape.proj_dim, hidden_dim)
    project_out = weights.tensor("out_proj.weight", hidden_dim, inner_dim)
    return Mamba(
        layer=place.layer,
        shape=shape.shard(group.num_ranks),
        scan_chunk=place.scan_chunk,
        project_in=make_linear(own.projected(project_in), in_bias),
        conv_weight=conv.squeeze(1).contiguous(),
        conv_bias=conv_bias,
        recurrence=Recurrence(
            A=-own.heads(weights.precise("A_log", heads)).exp(),
            D=own.heads(weights.precise("D", heads)),
            dt_bias=own.heads(weights.precise("dt_bias", heads)),
            dt_limit=shape.dt_limit,
        ),
        gate=load_gate(weights, shape, place.norm_eps),
        project_out=make_summed(share_of(project_out, heads, group, axis=1), out_bias, group),
    )


@dataclass(frozen=True, slots=True)
class _Own:
    """A rank's part of a mixer's tensors, along their first axis; `shape` is the whole mixer's."""

    shape: MambaShape
    group: Group

    def heads(self, tensor: Tensor) -> Tensor:
        """Of what has one row, or as many for each, for every head."""
        return share_of(tensor, self.shape.ssm_heads, self.group).contiguous()

    def conv(self, tensor: Tensor) -> Tensor:
        """Of the channels x, B, C: each is cut apart, B and C by their groups."""
        shape, groups = self.shape, self.shape.ssm_groups
        x, *grouped = tensor.split_with_sizes((shape.inner_dim, shape.group_dim, shape.group_dim))
        return torch.cat([self.heads(x), *(share_of(part, groups, self.group) for part in grouped)])

    def projected(self, tensor: Tensor) -> Tensor:
        """Of the in-projection's outputs: gate, x B C, dt."""
        shape = self.shape
        gate, mixed, dt = tensor.split_with_sizes(
            (shape.inner_dim, shape.conv_dim, shape.ssm_heads)
        )
        return torch.cat([self.heads(gate), self.conv(mixed), self.heads(dt)])
