"""The encoding of positions in queries and keys, between their projection and their pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.model.shapes.attention_shapes import NoPositions, QueryGrowth, RotaryPositions
from ferryman.model.shapes.rotary import rotary_frequencies
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.elementwise.rotary import apply_rotary, rotate_heads


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
class RowTurn:
    """Rotates the first channels of heads [tokens, heads, head_dim], and turns them back.

    `inv_freq` [rotary_dim / 2] are the frequencies, `back_freq` the same with the other sign.
    """

    inv_freq: Tensor
    back_freq: Tensor
    scaling: float

    def __call__(self, heads: Tensor, positions: Tensor) -> Tensor:
        return rotate_heads(heads, positions, self.inv_freq, self.scaling)

    def back(self, heads: Tensor, positions: Tensor) -> Tensor:
        return rotate_heads(heads, positions, self.back_freq, self.scaling)


def grown(q: Tensor, growth: QueryGrowth, positions: Tensor) -> Tensor:
    """q [tokens, heads, dim], grown with its positions [tokens]; `growth` as in QueryGrowth."""
    wide = accumulation_dtype(q.dtype)
    # A position of -1 pads a batch: its logarithm must stay a number.
    counted = (positions + growth.first).clamp_min_(0)
    periods = torch.div(counted, growth.length, rounding_mode="floor").to(wide)
    factors = 1 + growth.beta * torch.log1p(periods)
    return q * factors.to(q.dtype)[:, None, None]


@dataclass(frozen=True, slots=True)
class GrownQueries:
    """Lets q grow with its position after `turn`; `growth` as in QueryGrowth."""

    turn: RotaryEmbedding
    growth: QueryGrowth

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.turn(q, k, positions)
        return grown(q, self.growth, positions), k


@dataclass(frozen=True, slots=True)
class ClippedHeads:
    """Cuts q and k at -`limit` and `limit` before `turn` rotates them (OLMo 1)."""

    limit: float
    turn: RotaryEmbedding

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        limit = self.limit
        return self.turn(q.clamp(-limit, limit), k.clamp(-limit, limit), positions)


def halves_apart(positions: RotaryPositions | NoPositions, head_dim: int) -> Tensor:
    """The order of a head's channels in which the two of a rotated pair are rotary_dim / 2 apart.

    Scores are the same in any order that q and k share. So interleaved pairs are reordered in the
    weights, once, and not at every token.
    """
    if isinstance(positions, NoPositions) or not positions.is_interleaved:
        return torch.arange(head_dim)
    turning = torch.arange(positions.rotary_dim)
    rest = torch.arange(positions.rotary_dim, head_dim)
    return torch.cat((turning[0::2], turning[1::2], rest))


def without_rotary(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q and k without positions ("nope")."""
    return q, k


def load_rotary(weights: Weights, positions: RotaryPositions | NoPositions) -> RotaryEmbedding:
    """The encoding of `positions`, in the accumulation dtype of `weights`."""
    if isinstance(positions, NoPositions):
        return without_rotary
    return Rotary(*_frequencies(weights, positions))


def load_row_turn(weights: Weights, positions: RotaryPositions) -> RowTurn:
    """The rotation of `positions` of one tensor alone, in the accumulation dtype of `weights`."""
    inv_freq, scaling = _frequencies(weights, positions)
    return RowTurn(inv_freq, -inv_freq, scaling)


def _frequencies(weights: Weights, positions: RotaryPositions) -> tuple[Tensor, float]:
    # Computed on the CPU for every device, so that workers on two kinds of device turn alike.
    dtype = accumulation_dtype(weights.dtype)
    inv_freq, scaling = rotary_frequencies(
        positions.theta, positions.rotary_dim, positions.scaling, dtype
    )
    return inv_freq.to(weights.device), scaling
