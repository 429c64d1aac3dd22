"""The encoding of positions in queries and keys, between their projection and their pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.model.shapes.attention_shapes import NoPositions, QueryGrowth, RotaryPositions
from ferryman.model.shapes.rotary import rotary_frequencies
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.elementwise.rotary import apply_rotary


class RotaryEmbedding(Protocol):
    """Encodes the positions [tokens] in q and k [tokens, heads, head_dim]."""

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotates pairs of channels by position · `inv_freq` [rotary_dim / 2], and scales them."""

    inv_freq: Tensor
    scaling: float

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary(q, k, positions, self.inv_freq, self.scaling)


@dataclass(frozen=True, slots=True)
class GrownQueries:
    """Lets q grow with its position after `turn`; `growth` as in QueryGrowth."""

    turn: RotaryEmbedding
    growth: QueryGrowth

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.turn(q, k, positions)
        wide = accumulation_dtype(q.dtype)
        # A position of -1 pads a batch: its logarithm must stay a number.
        counted = (positions + self.growth.first).clamp_min_(0)
        periods = torch.div(counted, self.growth.length, rounding_mode="floor").to(wide)
        factors = 1 + self.growth.beta * torch.log1p(periods)
        return q * factors.to(q.dtype)[:, None, None], k


@dataclass(frozen=True, slots=True)
class ClippedHeads:
    """Cuts q and k at -`limit` and `limit` before `turn` rotates them (OLMo 1)."""

    limit: float
    turn: RotaryEmbedding

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        limit = self.limit
        return self.turn(q.clamp(-limit, limit), k.clamp(-limit, limit), positions)


def without_rotary(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q and k without positions ("nope")."""
    return q, k


def load_rotary(weights: Weights, positions: RotaryPositions | NoPositions) -> RotaryEmbedding:
    """The encoding of `positions`, in the accumulation dtype of `weights`."""
    if isinstance(positions, NoPositions):
        return without_rotary
    # Computed on the CPU for every device, so that workers on two kinds of device turn alike.
    dtype = accumulation_dtype(weights.dtype)
    inv_freq, scaling = rotary_frequencies(
        positions.theta, positions.rotary_dim, positions.scaling, dtype
    )
    return Rotary(inv_freq.to(weights.device), scaling)
