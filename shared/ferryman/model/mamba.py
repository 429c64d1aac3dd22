"""The Mamba-2 mixer (Dao & Gu 2024) over slot-indexed state.

z, xBC, dt = u · Win
x, B, C    = silu(conv(xBC))
dt         = clamp(softplus(dt + dt_bias))
y          = scan of  state ← exp(dt·A)·state + dt·(x ⊗ B),  y = state·C + D·x
out        = norm(y · silu(z)) · Wout              (or another way for the gate, see `Gating`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.layers import Place
from ferryman.model.linear import Linear, make_linear
from ferryman.model.shapes import Gating, MambaShape
from ferryman.model.state import ModelState
from ferryman.model.weights import Weights
from ferryman_kernels.causal_conv import causal_conv_decode, causal_conv_prefill
from ferryman_kernels.rms_norm import gated_rms_norm, rms_norm
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


class Gate(Protocol):
    """Joins what the scan yields and its gate, both [tokens, inner_dim]."""

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class NormBehindGate:
    """norm(y · silu(gate)), a norm for each of `groups`; weight in the accumulation dtype."""

    weight: Tensor
    eps: float
    groups: int

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(y, gate, self.weight, self.eps, self.groups)


@dataclass(frozen=True, slots=True)
class GateBehindNorm:
    """norm(y) · silu(gate), a norm for each of `groups` (Falcon-H1)."""

    weight: Tensor
    eps: float
    groups: int

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        wide = self.weight.dtype
        parts = y.to(wide).reshape(len(y) * self.groups, -1)
        normed = rms_norm(parts, parts.new_ones(parts.shape[1]), self.eps).view_as(y)
        return (normed * self.weight * F.silu(gate.to(wide))).to(y.dtype)


def gate_alone(y: Tensor, gate: Tensor) -> Tensor:
    """y · silu(gate), without a norm (Falcon-H1)."""
    return y * F.silu(gate)


@dataclass(frozen=True, slots=True)
class Mamba:
    """The recurrent mixer of layer `layer`. `scan_chunk` is the absolute grid of the scan.

    The convolution's and the norm's weights are in the accumulation dtype, in which kernels want
    them: converting them at every call cost as much as the norm.
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
    """The Mamba-2 mixer whose tensors lie under `weights`."""
    hidden_dim, inner_dim, heads = place.hidden_dim, shape.inner_dim, shape.ssm_heads
    conv = weights.precise("conv1d.weight", shape.conv_dim, 1, shape.conv_width)
    in_bias = weights.tensor("in_proj.bias", shape.proj_dim) if shape.has_in_bias else None
    out_bias = weights.tensor("out_proj.bias", hidden_dim) if shape.has_out_bias else None
    conv_bias = weights.precise("conv1d.bias", shape.conv_dim) if shape.has_conv_bias else None
    return Mamba(
        layer=place.layer,
        shape=shape,
        scan_chunk=place.scan_chunk,
        project_in=make_linear(
            weights.tensor("in_proj.weight", shape.proj_dim, hidden_dim), in_bias
        ),
        conv_weight=conv.squeeze(1).contiguous(),
        conv_bias=conv_bias,
        recurrence=Recurrence(
            A=-weights.precise("A_log", heads).exp(),
            D=weights.precise("D", heads),
            dt_bias=weights.precise("dt_bias", heads),
            dt_limit=shape.dt_limit,
        ),
        gate=_load_gate(weights, shape, place.norm_eps),
        project_out=make_linear(weights.tensor("out_proj.weight", hidden_dim, inner_dim), out_bias),
    )


def _load_gate(weights: Weights, shape: MambaShape, eps: float) -> Gate:
    if shape.gating is Gating.GATE_ALONE:
        return gate_alone
    weight = weights.precise("norm.weight", shape.inner_dim)
    if shape.gating is Gating.NORM_THEN_GATE:
        return GateBehindNorm(weight, eps, shape.ssm_groups)
    return NormBehindGate(weight, eps, shape.ssm_groups)
