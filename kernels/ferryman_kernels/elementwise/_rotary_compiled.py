"""The rotation of queries and keys on the CPU, in one loop; formulas are those of `rotary`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import STRICT, Loop, narrow, part, prange, row_like, wide
from ferryman_kernels.cpu._vectors import (
    LANES,
    copy_numbers,
    fused,
    load,
    multiplied,
    plus,
    row_at,
    spread,
    store_narrow,
)


def _rotate(
    like: Any, positions: Any, inv_freq: Any, scaling: Any, q: int, q_strides: Any, q_heads: int,
    k: int, k_strides: Any, k_heads: int, dim: int, q_out: int, k_out: int,
) -> None:  # fmt: skip
    """q and k are addresses of their first element, their strides of (token, head) in elements;
    they are of the dtype of `like`, an empty row."""
    half, q_row, k_row = len(inv_freq), row_at(q, like), row_at(k, like)
    q_to, k_to = row_at(q_out, like), row_at(k_out, like)
    for token in prange(len(positions)):
        turn = np.empty(2 * half, inv_freq.dtype)
        # Views that numba counts would take as long as the rotation of a head.
        cos = row_at(turn.ctypes.data, turn)
        sin = row_at(turn.ctypes.data + half * turn.itemsize, turn)
        # Beside a float32 an integer would make the angle a float64.
        position = inv_freq.dtype.type(positions[token])
        for channel in range(half):
            angle = position * inv_freq[channel]
            cos[channel], sin[channel] = np.cos(angle) * scaling, np.sin(angle) * scaling
        for head in range(q_heads):
            first, to = token * q_strides[0] + head * q_strides[1], token * q_heads + head
            _rotate_head(q_row, first, cos, sin, half, q_to, to * dim, dim)
        for head in range(k_heads):
            first, to = token * k_strides[0] + head * k_strides[1], token * k_heads + head
            _rotate_head(k_row, first, cos, sin, half, k_to, to * dim, dim)
        turn[:0] = 0  # numba ends an array's life after its last use


@part
def _rotate_head(
    row: Any, at: int, cos: Any, sin: Any, half: int, out: Any, to: int, dim: int
) -> None:
    """out[to : to + dim] ← the head from row[at] on, rotated."""
    whole, other, minus = half // LANES * LANES, to + half, spread(cos.dtype.type(-1))
    for channel in range(0, whole, LANES):
        a, b = load(row, at + channel), load(row, at + half + channel)
        c, s = load(cos, channel), load(sin, channel)
        store_narrow(out, to + channel, fused(multiplied(b, s), minus, multiplied(a, c)))
        store_narrow(out, other + channel, plus(multiplied(b, c), multiplied(a, s)))
    for channel in range(whole, half):
        a, b = wide(row[at + channel]), wide(row[at + half + channel])
        out[to + channel] = narrow(a * cos[channel] - b * sin[channel], out)
        out[other + channel] = narrow(b * cos[channel] + a * sin[channel], out)
    copy_numbers(row, at + 2 * half, out, to + 2 * half, dim - 2 * half)


_rotate_loop = Loop(_rotate, STRICT)


def apply_rotary_compiled(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    assert q.stride(2) == k.stride(2) == 1, (q.stride(), k.stride())
    turned = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    frequencies = inv_freq.contiguous().numpy()
    _rotate_loop(
        q.numel() + k.numel(),
        row_like(q.dtype), positions.contiguous().numpy(), frequencies,
        frequencies.dtype.type(scaling), q.data_ptr(), q.stride()[:2], q.shape[1], k.data_ptr(),
        k.stride()[:2], k.shape[1], q.shape[2], turned[0].data_ptr(), turned[1].data_ptr(),
    )  # fmt: skip
    return turned
