"""The recurrent block of Griffin (De et al. 2024): a convolution and a gated linear recurrence.

z, x    = u · Win + bin
x       = conv(x)                                                no activation after the conv
i, r    = x · Wgates + bgates                                    by blocks of channels
y       = scan of  state ← a·state + √(1 − a²) · sigmoid(i) · x,  log a = rate · sigmoid(r)
out     = (y · gelu(z)) · Wout + bout

The formula of the scan, and of its first token, is in `ferryman_kernels.recurrence.rg_lru`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.recurrent_shapes import RgLruShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import gelu_tanh, softplus
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode, causal_conv_prefill
from ferryman_kernels.recurrence.rg_lru import rg_lru_decode, rg_lru_scan

_SHARPNESS = 8.0
"""The factor of a decay's logarithm, which the paper calls c."""


@dataclass(frozen=True, slots=True)
class BlockGates:
    """The two gates of each channel. A block's product yields its gates of input, then of decay."""

    blocks: tuple[Linear, ...]
    block_dim: int

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both [tokens, dim] before their sigmoid, for `x` [tokens, dim]."""
        parts = x.chunk(len(self.blocks), dim=1)
        products = [
            block(part.contiguous()) for block, part in zip(self.blocks, parts, strict=True)
        ]
        both = torch.stack(products, dim=1).view(len(x), len(parts), 2, self.block_dim)
        enter, recur = (gate.flatten(1) for gate in both.unbind(2))
        return enter, recur


@dataclass(frozen=True, slots=True)
class RgLruMixer:
    """The recurrent block of layer `layer`.

    `conv_weight` [dim, conv_width], `conv_bias` and `rates` [dim] are in the accumulation dtype.
    """

    layer: int
    project_in: Linear
    conv_weight: Tensor
    conv_bias: Tensor
    gates: BlockGates
    rates: Tensor
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        branch, x = self.project_in(hidden).chunk(2, dim=1)
        ssm = state.ssm[self.layer]
        taps = state.conv[self.layer], self.conv_weight, self.conv_bias
        if isinstance(batch, PrefillBatch):
            x = causal_conv_prefill(x, *taps, *batch.scans, activates=False)
            inputs = x, *self.gates(x), self.rates, batch.positions
            return self._finish(rg_lru_scan(*inputs, ssm, *batch.scans), branch)

        def convolve(x: Tensor, read: Tensor, write: Tensor) -> Tensor:
            return causal_conv_decode(x, *taps, read, write, activates=False)

        def advance(
            x: Tensor, enter: Tensor, recur: Tensor, positions: Tensor, *slots: Tensor
        ) -> Tensor:
            return rg_lru_decode(ssm, x, enter, recur, self.rates, positions, *slots)

        # The convolution goes first, so that the gates of all waves are one product a block.
        x = batch.wave_by_wave(convolve, x)
        y = batch.wave_by_wave(advance, x, *self.gates(x), batch.positions)
        return self._finish(y, branch)

    def _finish(self, y: Tensor, branch: Tensor) -> Tensor:
        """y is in the accumulation dtype, and rounded once it is gated."""
        return self.project_out((y * gelu_tanh(branch.to(y.dtype))).to(branch.dtype))


def load_rg_lru(weights: Weights, shape: RgLruShape, place: LayerPlace) -> RgLruMixer:
    """The recurrent block with tensors under `weights`: a rank's blocks of channels."""
    dim, hidden_dim, group = shape.dim, place.hidden_dim, weights.group
    rank_blocks = partial(share_of, heads=shape.blocks, group=group)
    # The branch that gates comes first, then what is convolved.
    ways_in = ("linear_y", "linear_x")
    matrices = [weights.matrix(f"{name}.weight", dim, hidden_dim) for name in ways_in]
    biases = [weights.tensor(f"{name}.bias", dim, part=rank_blocks) for name in ways_in]
    out = weights.matrix("linear_out.weight", hidden_dim, dim)
    out_bias = weights.tensor("linear_out.bias", hidden_dim)
    conv = weights.precise("conv_1d.weight", dim, 1, shape.conv_width, part=rank_blocks)
    slowness = weights.precise("rg_lru.recurrent_param", dim, part=rank_blocks)
    return RgLruMixer(
        layer=place.layer,
        project_in=join_linear([rank_blocks(part) for part in matrices], torch.cat(biases)),
        conv_weight=conv.squeeze(1),
        conv_bias=weights.precise("conv_1d.bias", dim, part=rank_blocks),
        gates=_load_gates(weights.under("rg_lru"), shape),
        rates=softplus(slowness) * -_SHARPNESS,
        project_out=summed_linear(share_of(out, shape.blocks, group, axis=1), out_bias, group),
    )


def _load_gates(weights: Weights, shape: RgLruShape) -> BlockGates:
    """Checkpoints have the matrices of all blocks in one tensor, and multiply by them from the
    right: each is stored as [inputs, outputs]."""
    names, size = ("input_gate", "recurrent_gate"), shape.block_dim
    matrices = [
        weights.transposed_matrices(f"{name}_weight", shape.blocks, size, size) for name in names
    ]
    biases = [weights.tensor(f"{name}_bias", shape.blocks, size) for name in names]
    num_blocks = shape.shard(weights.group.num_ranks).blocks
    first = weights.group.rank * num_blocks
    linears = [
        join_linear([gate[block] for gate in matrices], torch.cat([b[block] for b in biases]))
        for block in range(first, first + num_blocks)
    ]
    return BlockGates(tuple(linears), size)
