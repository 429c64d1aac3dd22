"""Queries and keys of length 1/√k_dim and 1 for the delta rule, for prefill and decode alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.cpu._compiled import STRICT, Loop, as_flat, part, prange, wide
from ferryman_kernels.cpu._vectors import LANES, fused, load, spread, total

LENGTH_EPS = 1e-6
"""Added to the squared length of a key before the division by the length."""


@part
def set_length(row: Any, length: Any, eps: Any) -> None:
    """row ← length · row / √(Σ row² + eps); the sum takes whole vectors first, then the rest."""
    sums, whole = spread(row.dtype.type(0)), row.shape[0] // LANES * LANES
    for c in range(0, whole, LANES):
        sums = fused(load(row, c), load(row, c), sums)
    squares = total(sums) + eps
    for c in range(whole, row.shape[0]):
        squares = fused(row[c], row[c], squares)
    scale = length / np.sqrt(squares)
    for c in range(row.shape[0]):
        row[c] = row[c] * scale


@part
def set_lengths(row: Any, key_dim: Any, k_dim: Any) -> None:
    """The heads of q, and behind them those of k, at the head of `row`."""
    number = row.dtype.type
    for first in range(0, 2 * key_dim, k_dim):
        length = number(1) / np.sqrt(number(k_dim)) if first < key_dim else number(1)
        set_length(row[first : first + k_dim], length, number(LENGTH_EPS))


def _unit_heads(keys: Any, stride: int, k_dim: int, units: Any) -> None:
    for token in prange(len(units)):
        row, out = keys[token * stride :], units[token]
        for c in range(out.shape[0]):
            out[c] = wide(row[c])
        set_lengths(out, out.shape[0] // 2, k_dim)


_units_loop = Loop(_unit_heads, STRICT)


def unit_heads_compiled(keys: Tensor, k_dim: int) -> Tensor:
    """`keys` [tokens, 2 · key_dim], q before k, with each head's length set; float32 or wider."""
    units = torch.empty(keys.shape, dtype=wide_dtype(keys.dtype))
    _units_loop(keys.numel(), as_flat(keys), keys.stride(0), k_dim, units.numpy())
    return units
