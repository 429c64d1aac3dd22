"""Mamba-1 mixers side by side behind one convolution (Zamba, Glorioso et al. 2024).

x, z       = u · Win                              rows of x and z alternate
x          = silu(conv(x))                        of all heads
y_h        = scan of x_h by dt_h, B_h, C_h        of x_h alone, by head; see mamba1.py
out        = (y · silu(z)) · Wout

Every rank computes all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.mamba1 import Selection, gated_scan
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch, StepBatch
from ferryman.model.shapes.recurrent_shapes import HeadedMamba1Shape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode, causal_conv_prefill
from ferryman_kernels.recurrence.selective_scan import selective_scan, selective_scan_decode


@dataclass(frozen=True, slots=True)
class ScanHead:
    """The selection and scan of one head; `A` [head_dim, ssm_state] and `D` [head_dim] are in the
    accumulation dtype."""

    selection: Selection
    A: Tensor
    D: Tensor

    def prefill(self, x: Tensor, ssm: Tensor, batch: PrefillBatch) -> Tensor:
        """y [tokens, head_dim]; `ssm` [slots, head_dim, ssm_state] is this head's part."""
        dt, B, C = self.selection(x)
        return selective_scan(x, dt, self.A, B, C, self.D, ssm, *batch.scans)

    def decode(self, x: Tensor, ssm: Tensor, batch: DecodeBatch) -> Tensor:
        def advance(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *slots: Tensor) -> Tensor:
            return selective_scan_decode(ssm, x, dt, self.A, B, C, self.D, *slots)

        return batch.wave_by_wave(advance, x, *self.selection(x))


@dataclass(frozen=True, slots=True)
class HeadedMamba1Mixer:
    """The recurrent mixer of layer `layer`; `project_in` yields x of all heads, then z.

    `conv_weight` [inner_dim, conv_width] and `conv_bias` are in the accumulation dtype.
    """

    layer: int
    project_in: Linear
    conv_weight: Tensor
    conv_bias: Tensor | None
    heads: tuple[ScanHead, ...]
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        x, gate = self.project_in(hidden).chunk(2, dim=1)
        conv, ssm = state.conv[self.layer], state.ssm[self.layer]
        if isinstance(batch, PrefillBatch):
            x = causal_conv_prefill(x, conv, self.conv_weight, self.conv_bias, *batch.scans)
            y = self._by_head(x, ssm, lambda head, x, part: head.prefill(x, part, batch))
            return self.project_out(gated_scan(y, gate))

        def convolve(x: Tensor, read: Tensor, write: Tensor) -> Tensor:
            return causal_conv_decode(x, conv, self.conv_weight, self.conv_bias, read, write)

        x = batch.wave_by_wave(convolve, x)
        y = self._by_head(x, ssm, lambda head, x, part: head.decode(x, part, batch))
        return self.project_out(gated_scan(y, gate))

    def _by_head(
        self, x: Tensor, ssm: Tensor, scan: Callable[[ScanHead, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The outputs of all heads side by side, each from its channels and their states."""
        inputs, states = x.chunk(len(self.heads), 1), ssm.chunk(len(self.heads), 1)
        parts = [
            scan(head, channels.contiguous(), part)
            for head, channels, part in zip(self.heads, inputs, states, strict=True)
        ]
        return torch.cat(parts, dim=1)


def load_headed_mamba1(
    weights: Weights, shape: HeadedMamba1Shape, place: LayerPlace
) -> HeadedMamba1Mixer:
    """The mixer with tensors under `weights`."""
    dim, hidden_dim = shape.inner_dim, place.hidden_dim
    # Rows of x and z alternate as they are stored.
    order = torch.arange(2 * dim).view(dim, 2).t().flatten()
    in_bias, out_bias, conv_bias = None, None, None
    if shape.has_bias:
        in_bias = weights.tensor("in_proj.bias", 2 * dim)[order]
        out_bias = weights.tensor("out_proj.bias", hidden_dim)
    if shape.has_conv_bias:
        conv_bias = weights.precise("conv1d.bias", dim)
    project_in = weights.matrix("in_proj.weight", 2 * dim, hidden_dim).with_rows(order)
    return HeadedMamba1Mixer(
        layer=place.layer,
        project_in=project_in.linear(in_bias),
        conv_weight=weights.precise("conv1d.weight", dim, 1, shape.conv_width).squeeze(1),
        conv_bias=conv_bias,
        heads=_heads(weights, shape),
        project_out=weights.matrix("out_proj.weight", hidden_dim, dim).linear(out_bias),
    )


def _heads(weights: Weights, shape: HeadedMamba1Shape) -> tuple[ScanHead, ...]:
    heads, head_shape = shape.heads, shape.one_head
    select = weights.tensor("x_proj_weight", heads, head_shape.selected_dim, head_shape.inner_dim)
    project_dt = weights.tensor("dt_proj_weight", heads, head_shape.inner_dim, head_shape.dt_rank)
    dt_bias = weights.precise("dt_proj_bias", heads, head_shape.inner_dim)
    A = -weights.precise("A_log", heads, head_shape.inner_dim, head_shape.ssm_state).exp()
    D = weights.precise("D", heads, head_shape.inner_dim)
    return tuple(
        ScanHead(
            Selection(
                head_shape,
                make_linear(select[head]),
                (),
                make_linear(project_dt[head]),
                dt_bias[head],
            ),
            A[head],
            D[head],
        )
        for head in range(heads)
    )
