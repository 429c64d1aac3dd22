"""The layers that every family uses: norm, gated MLP, and the two norms' placement around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.linear import Linear, make_linear, make_summed
from ferryman.model.ranks import Group, slice_of
from ferryman.model.shapes import MlpShape
from ferryman.model.state import ModelState
from ferryman.model.weights import Weights
from ferryman_kernels.rms_norm import rms_norm


class Mixing(Protocol):
    """What mixes the positions of a layer: attention or a recurrence.

    Takes hidden [tokens, hidden_dim], reads and advances its part of the state, returns the same
    shape.
    """

    def prefill(self, hidden: Tensor, batch: PrefillBatch, state: ModelState) -> Tensor: ...

    def decode(self, hidden: Tensor, batch: DecodeBatch, state: ModelState) -> Tensor: ...


class Layer(Protocol):
    """One layer of a decoder with its norms and residual paths; hidden in and out, as in Mixing."""

    def prefill(self, hidden: Tensor, batch: PrefillBatch, state: ModelState) -> Tensor: ...

    def decode(self, hidden: Tensor, batch: DecodeBatch, state: ModelState) -> Tensor: ...


class FeedForward(Protocol):
    """What works on each token alone; hidden [tokens, hidden_dim] in and out."""

    def __call__(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a mixer stands: what it needs to know beyond its own shape.

    `scan_chunk` is the absolute grid of the recurrent scans. `norm_origin` is what a norm's stored
    weight counts from: 1 where checkpoints hold its distance from one (Gemma, Qwen3-Next).
    """

    layer: int
    hidden_dim: int
    norm_eps: float
    scan_chunk: int
    norm_origin: float = 0.0


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root mean square norm with `weight` [hidden_dim], in the accumulation dtype."""

    weight: Tensor
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate) · up), gate and up from one product: gate's rows come first."""

    gate_up: Linear
    down: Linear
    act: Callable[[Tensor], Tensor] = F.silu

    def __call__(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


def gate_up_slice(gate_up: Tensor, group: Group) -> Tensor:
    """A rank's rows of a product whose first half is gate, the second up."""
    return torch.cat([slice_of(half, group) for half in gate_up.chunk(2)])


def load_norm(weights: Weights, name: str, dim: int, eps: float, origin: float = 0.0) -> RmsNorm:
    """The norm whose weight is called `name`, and stored as its distance from `origin`."""
    return RmsNorm(weights.precise(f"{name}.weight", dim) + origin, eps)


def load_gated_mlp(
    weights: Weights,
    shape: MlpShape,
    hidden_dim: int,
    act: Callable[[Tensor], Tensor] = F.silu,
) -> GatedMlp:
    """The MLP of gate_proj, up_proj and down_proj under `weights`."""
    group = weights.group

    def joined(suffix: str, *in_dim: int) -> Tensor:
        names = [f"{name}.{suffix}" for name in ("gate_proj", "up_proj")]
        parts = [weights.tensor(name, shape.inner_dim, *in_dim) for name in names]
        return torch.cat([slice_of(part, group) for part in parts])

    bias, down_bias = None, None
    if shape.has_bias:
        bias, down_bias = joined("bias"), weights.tensor("down_proj.bias", hidden_dim)
    down = weights.tensor("down_proj.weight", hidden_dim, shape.inner_dim)
    return GatedMlp(
        make_linear(joined("weight", hidden_dim), bias),
        make_summed(slice_of(down, group, axis=1), down_bias, group),
        act,
    )


@dataclass(frozen=True, slots=True)
class MixerLayer:
    """A mixer alone behind a norm and beside a residual path (Nemotron-H)."""

    norm: RmsNorm
    mixer: Mixing

    def prefill(self, hidden: Tensor, batch: PrefillBatch, state: ModelState) -> Tensor:
        return hidden + self.mixer.prefill(self.norm(hidden), batch, state)

    def decode(self, hidden: Tensor, batch: DecodeBatch, state: ModelState) -> Tensor:
        return hidden + self.mixer.decode(self.norm(hidden), batch, state)


@dataclass(frozen=True, slots=True)
class FeedForwardLayer:
    """A feed-forward alone behind a norm and beside a residual path (Nemotron-H)."""

    norm: RmsNorm
    feed_forward: FeedForward

    def prefill(self, hidden: Tensor, batch: PrefillBatch, state: ModelState) -> Tensor:
        return hidden + self.feed_forward(self.norm(hidden))

    def decode(self, hidden: Tensor, batch: DecodeBatch, state: ModelState) -> Tensor:
        return hidden + self.feed_forward(self.norm(hidden))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A mixer and a feed-forward, each behind a norm and beside a residual path."""

    mixer_norm: RmsNorm
    mixer: Mixing
    feed_forward_norm: RmsNorm
    feed_forward: FeedForward
    residual_multiplier: float = 1.0

    def prefill(self, hidden: Tensor, batch: PrefillBatch, state: ModelState) -> Tensor:
        return self._finish(hidden, self.mixer.prefill(self.mixer_norm(hidden), batch, state))

    def decode(self, hidden: Tensor, batch: DecodeBatch, state: ModelState) -> Tensor:
        return self._finish(hidden, self.mixer.decode(self.mixer_norm(hidden), batch, state))

    def _finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden.add(mixed, alpha=self.residual_multiplier)
        fed = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden.add(fed, alpha=self.residual_multiplier)
