"""The Mamba-1 mixer (Gu & Dao 2023) over slot-indexed state.

x, z       = u · Win
x          = silu(conv(x))
dt, B, C   = x · Wx                          each may go through a norm (Jamba, FalconMamba)
dt         = softplus(dt · Wdt + dt_bias)
y          = scan of  state ← exp(dt·A)·state + (dt·x) ⊗ B,  y = state·C + D·x
out        = (y · silu(z)) · Wout
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace, RmsNorm
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.recurrent_shapes import InnerNorms, Mamba1Shape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.matrix import equal_shares, join_linear, summed_linear
from ferryman.model.weights.named_weights import Part, Weights
from ferryman_kernels.elementwise.activations import silu, softplus
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode, causal_conv_prefill
from ferryman_kernels.recurrence.selective_scan import selective_scan, selective_scan_decode


@dataclass(frozen=True, slots=True)
class Selection:
    """Makes dt, B and C from x. `norms` are theirs, in this order, or there are none.

    Each rank has its channels of x and of dt. `select` adds up the ranks' parts, so dt's low rank,
    B and C are the same on all ranks. `dt_bias` is in the accumulation dtype.
    """

    shape: Mamba1Shape
    select: Linear
    norms: tuple[RmsNorm, ...]
    project_dt: Linear
    dt_bias: Tensor

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt [tokens, inner_dim] in the accumulation dtype, B and C [tokens, ssm_state]."""
        sizes = self.shape.dt_rank, self.shape.ssm_state, self.shape.ssm_state
        low_rank, B, C = self.select(x).split_with_sizes(sizes, dim=1)
        if self.norms:
            low_rank, B, C = (
                norm(part) for norm, part in zip(self.norms, (low_rank, B, C), strict=True)
            )
        dt = self.project_dt(low_rank).to(self.dt_bias.dtype) + self.dt_bias
        return softplus(dt), B, C


@dataclass(frozen=True, slots=True)
class Mamba1Mixer:
    """The recurrent mixer of layer `layer`.

    `conv_weight` [inner_dim, conv_width], `conv_bias`, `A` [inner_dim, ssm_state] and `D` are in
    the accumulation dtype.
    """

    layer: int
    project_in: Linear
    conv_weight: Tensor
    conv_bias: Tensor | None
    selection: Selection
    A: Tensor
    D: Tensor
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        x, gate = self.project_in(hidden).chunk(2, dim=1)
        conv, ssm = state.conv[self.layer], state.ssm[self.layer]
        if isinstance(batch, PrefillBatch):
            x = causal_conv_prefill(x, conv, self.conv_weight, self.conv_bias, *batch.scans)
            dt, B, C = self.selection(x)
            y = selective_scan(x, dt, self.A, B, C, self.D, ssm, *batch.scans)
            return self.project_out(gated_scan(y, gate))

        def convolve(x: Tensor, read: Tensor, write: Tensor) -> Tensor:
            return causal_conv_decode(x, conv, self.conv_weight, self.conv_bias, read, write)

        def advance(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *slots: Tensor) -> Tensor:
            return selective_scan_decode(ssm, x, dt, self.A, B, C, self.D, *slots)

        # The convolution's waves come first: the ranks then meet once, for any number of waves.
        x = batch.wave_by_wave(convolve, x)
        y = batch.wave_by_wave(advance, x, *self.selection(x))
        return self.project_out(gated_scan(y, gate))


def gated_scan(y: Tensor, gate: Tensor) -> Tensor:
    """y · silu(gate) in the dtype of the gate; `y` is in the accumulation dtype."""
    return (y * silu(gate.to(y.dtype))).to(gate.dtype)


def load_mamba1(weights: Weights, shape: Mamba1Shape, place: LayerPlace) -> Mamba1Mixer:
    """The Mamba-1 mixer with tensors under `weights`: a rank's channels."""
    dim, hidden_dim, group = shape.inner_dim, place.hidden_dim, weights.group
    rank_channels = partial(share_of, heads=dim, group=group)
    in_bias, out_bias, conv_bias = None, None, None
    if shape.has_bias:
        in_bias = weights.tensor(
            "in_proj.bias", 2 * dim, part=lambda whole: torch.cat(equal_shares(whole, 2, group))
        )
        out_bias = weights.tensor("out_proj.bias", hidden_dim)
    if shape.has_conv_bias:
        conv_bias = weights.precise("conv1d.bias", dim, part=rank_channels)
    project_in = weights.matrix("in_proj.weight", 2 * dim, hidden_dim)
    project_out = weights.matrix("out_proj.weight", hidden_dim, dim)
    conv = weights.precise("conv1d.weight", dim, 1, shape.conv_width, part=rank_channels)
    return Mamba1Mixer(
        layer=place.layer,
        project_in=join_linear(equal_shares(project_in, 2, group), in_bias),
        conv_weight=conv.squeeze(1),
        conv_bias=conv_bias,
        selection=_selection(weights, shape, rank_channels),
        A=-weights.precise("A_log", dim, shape.ssm_state, part=rank_channels).exp(),
        D=weights.precise("D", dim, part=rank_channels),
        project_out=summed_linear(share_of(project_out, dim, group, axis=1), out_bias, group),
    )


def _selection(weights: Weights, shape: Mamba1Shape, rank_channels: Part) -> Selection:
    dim, rank, group = shape.inner_dim, shape.dt_rank, weights.group
    select = weights.matrix("x_proj.weight", shape.selected_dim, dim)
    return Selection(
        shape=shape,
        select=summed_linear(share_of(select, dim, group, axis=1), None, group),
        norms=_norms(weights, shape),
        project_dt=_time_steps(weights, (dim, rank), rank_channels),
        dt_bias=weights.precise("dt_proj.bias", dim, part=rank_channels),
    )


def _time_steps(weights: Weights, size: tuple[int, int], rank_channels: Part) -> Linear:
    """The product that makes dt. It keeps codes that the file has; neither `--quantize` nor an
    adapter changes it, for a state is as sensitive to dt as to nothing else."""
    coded = weights.coded("dt_proj.weight", *size)
    if coded is not None:
        return share_of(coded, size[0], weights.group).linear(None)
    return make_linear(weights.tensor("dt_proj.weight", *size, part=rank_channels))


def _norms(weights: Weights, shape: Mamba1Shape) -> tuple[RmsNorm, ...]:
    if shape.norms is InnerNorms.NONE:
        return ()
    dims = {"dt": shape.dt_rank, "b": shape.ssm_state, "c": shape.ssm_state}
    if shape.norms is InnerNorms.WITHOUT_WEIGHTS:
        like = weights.precise("D", shape.inner_dim)
        return tuple(RmsNorm(like.new_ones(dim), shape.norm_eps) for dim in dims.values())
    return tuple(
        RmsNorm(weights.precise(f"{name}_layernorm.weight", dim), shape.norm_eps)
        for name, dim in dims.items()
    )
