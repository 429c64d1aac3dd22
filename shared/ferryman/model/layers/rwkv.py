"""The layers of RWKV-4 (Peng et al. 2023), whose two parts mix a token with the one before it.

x_k, x_v, x_r = μ · u + (1 − μ) · u'                       u' is the input of the token before
time          = (sigmoid(x_r · Wr) · mean) · Wout          mean of x_v · Wv by weights of x_k · Wk
channels      = sigmoid(x_r · Wr) · (relu(x_k · Wk)² · Wv)

The mean is that of `ferryman_kernels.recurrence.cells.wkv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.convolved_attention import ChannelConv
from ferryman.model.layers.decoder_layers import Layer, LayerPlace, Mixer, Norm
from ferryman.model.layers.mlp import squared_relu
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.cell_shapes import RwkvShape
from ferryman.model.shapes.ranks import slice_of
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import Matrix, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import sigmoid
from ferryman_kernels.recurrence.cells.wkv import wkv_decode, wkv_scan
from ferryman_kernels.recurrence.cells.wkv_rows import WeightedRows


@dataclass(frozen=True, slots=True)
class MixedProduct:
    """The product with μ · u + (1 − μ) · u'; `share` (μ) [hidden_dim] is in the accumulation
    dtype."""

    share: Tensor
    product: Linear

    def __call__(self, hidden: Tensor, before: Tensor) -> Tensor:
        wide = self.share.dtype
        mixed = hidden.to(wide) * self.share + before.to(wide) * (1 - self.share)
        return self.product(mixed.to(hidden.dtype))


@dataclass(frozen=True, slots=True)
class TimeMixer:
    """The first part of layer `layer`. `decay` and `first` [dim] are in the accumulation dtype."""

    layer: int
    before: ChannelConv
    key: MixedProduct
    value: MixedProduct
    receptance: MixedProduct
    decay: Tensor
    first: Tensor
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        stored, _ = state.conv[self.layer].chunk(2, dim=1)
        before, ssm = self.before(hidden, stored, batch), state.ssm[self.layer]
        k, v = self.key(hidden, before), self.value(hidden, before)
        if isinstance(batch, PrefillBatch):
            rows = WeightedRows(k, v, batch.positions, self.decay, self.first)
            y = wkv_scan(rows, ssm, *batch.scans)
        else:

            def advance(k: Tensor, v: Tensor, positions: Tensor, *slots: Tensor) -> Tensor:
                rows = WeightedRows(k, v, positions, self.decay, self.first)
                return wkv_decode(rows, ssm, *slots)

            y = batch.wave_by_wave(advance, k, v, batch.positions)
        gate = sigmoid(self.receptance(hidden, before).to(y.dtype))
        return self.project_out((gate * y).to(hidden.dtype))


@dataclass(frozen=True, slots=True)
class ChannelMixer:
    """The second part of layer `layer`: an MLP without a gate of its own, behind one."""

    layer: int
    before: ChannelConv
    key: MixedProduct
    receptance: MixedProduct
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        _, stored = state.conv[self.layer].chunk(2, dim=1)
        before = self.before(hidden, stored, batch)
        fed = self.project_out(squared_relu(self.key(hidden, before)))
        return sigmoid(self.receptance(hidden, before)) * fed


@dataclass(frozen=True, slots=True)
class TwoMixersLayer:
    """Two mixers, each after a norm and with a residual path."""

    first_norm: Norm
    first: Mixer
    second_norm: Norm
    second: Mixer

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        hidden = hidden + self.first.forward(self.first_norm(hidden), batch, state)
        return hidden + self.second.forward(self.second_norm(hidden), batch, state)


@dataclass(frozen=True, slots=True)
class NormedFirstLayer:
    """The first layer of a model whose embeddings go through a norm."""

    norm: Norm
    inner: Layer

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        return self.inner.forward(self.norm(hidden), batch, state)


def load_time_mixer(weights: Weights, shape: RwkvShape, place: LayerPlace) -> TimeMixer:
    """The first part with tensors under `weights`: a rank's channels of the mean."""
    group, sizes = weights.group, (shape.dim, place.hidden_dim)
    rank_slice = partial(slice_of, group=group)
    key, value, receptance = (
        _mixed(weights, name, rank_slice(weights.matrix(f"{name}.weight", *sizes)))
        for name in ("key", "value", "receptance")
    )
    out = weights.matrix("output.weight", place.hidden_dim, shape.dim)
    return TimeMixer(
        layer=place.layer,
        before=_token_before(key),
        key=key,
        value=value,
        receptance=receptance,
        decay=weights.precise("time_decay", shape.dim, part=rank_slice).exp(),
        first=weights.precise("time_first", shape.dim, part=rank_slice),
        project_out=summed_linear(slice_of(out, group, axis=1), None, group),
    )


def load_channel_mixer(weights: Weights, inner_dim: int, place: LayerPlace) -> ChannelMixer:
    """The second part with tensors under `weights`. Its gate is computed by every rank."""
    group, hidden_dim = weights.group, place.hidden_dim
    up = weights.matrix("key.weight", inner_dim, hidden_dim)
    key = _mixed(weights, "key", slice_of(up, group))
    down = weights.matrix("value.weight", hidden_dim, inner_dim)
    gate = weights.matrix("receptance.weight", hidden_dim, hidden_dim)
    return ChannelMixer(
        layer=place.layer,
        before=_token_before(key),
        key=key,
        receptance=_mixed(weights, "receptance", gate),
        project_out=summed_linear(slice_of(down, group, axis=1), None, group),
    )


def _mixed(weights: Weights, name: str, matrix: Matrix) -> MixedProduct:
    _, hidden_dim = matrix.shape
    share = weights.precise(f"time_mix_{name}", 1, 1, hidden_dim)
    return MixedProduct(share.view(-1), matrix.linear(None))


def _token_before(product: MixedProduct) -> ChannelConv:
    """The inputs of the tokens before, for the products beside `product`: taps of 1 and 0."""
    zeros = torch.zeros_like(product.share)
    return ChannelConv(torch.stack((zeros + 1, zeros), dim=1), None)
