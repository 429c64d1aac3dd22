"""The short convolution of LFM2 over slot-indexed state: a recurrence without a state matrix.

B, C, x = u · Win
out     = (C · conv(B · x)) · Wout                                      no activation after the conv

The state is the last conv_width - 1 products B · x.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.recurrent_shapes import ShortConvShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import equal_shares, join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode, causal_conv_prefill


@dataclass(frozen=True, slots=True)
class ShortConv:
    """The convolution of layer `layer`. `conv_weight` [dim, conv_width] and `conv_bias` are in the
    accumulation dtype."""

    layer: int
    project_in: Linear
    conv_weight: Tensor
    conv_bias: Tensor | None
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        fed, gate = self._project(hidden)
        weights = state.conv[self.layer], self.conv_weight, self.conv_bias
        if isinstance(batch, PrefillBatch):
            mixed = causal_conv_prefill(fed, *weights, *batch.scans, activates=False)
            return self.project_out(gate * mixed)

        def advance(fed: Tensor, read: Tensor, write: Tensor) -> Tensor:
            return causal_conv_decode(fed, *weights, read, write, activates=False)

        return self.project_out(gate * batch.wave_by_wave(advance, fed))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """B · x and C, both [tokens, dim]."""
        B, C, x = self.project_in(hidden).chunk(3, dim=1)
        return B * x, C


def load_short_conv(weights: Weights, shape: ShortConvShape, place: LayerPlace) -> ShortConv:
    """The short convolution with tensors under `weights`: a rank's channels."""
    dim, hidden_dim, group = shape.dim, place.hidden_dim, weights.group
    rank_channels = partial(share_of, heads=dim, group=group)
    in_bias, conv_bias, out_bias = None, None, None
    if shape.has_bias:
        in_bias = weights.tensor(
            "in_proj.bias", 3 * dim, part=lambda whole: torch.cat(equal_shares(whole, 3, group))
        )
        conv_bias = weights.precise("conv.bias", dim, part=rank_channels)
        out_bias = weights.tensor("out_proj.bias", hidden_dim)
    project_in = weights.matrix("in_proj.weight", 3 * dim, hidden_dim)
    project_out = weights.matrix("out_proj.weight", hidden_dim, dim)
    conv = weights.precise("conv.weight", dim, 1, shape.conv_width, part=rank_channels)
    return ShortConv(
        layer=place.layer,
        project_in=join_linear(equal_shares(project_in, 3, group), in_bias),
        conv_weight=conv.squeeze(1),
        conv_bias=conv_bias,
        project_out=summed_linear(share_of(project_out, dim, group, axis=1), out_bias, group),
    )
