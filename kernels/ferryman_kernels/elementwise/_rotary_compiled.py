"""The rotation of queries and keys on the CPU, in one loop; formulas are those of `rotary`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import STRICT, Loop, as_array, narrow, part, prange, wide
from ferryman_kernels.cpu._vectors import row_at


def _rotate(
    positions: Any, inv_freq: Any, scaling: Any, q: int, q_strides: Any, k: int, k_strides: Any,
    q_out: Any, k_out: Any,
) -> None:  # fmt: skip
    """q and k are addresses of their first element, their strides of (token, head) in elements."""
    half = len(inv_freq)
    for token in prange(len(positions)):
        cos, sin = np.empty(half, inv_freq.dtype), np.empty(half, inv_freq.dtype)
        # Beside a float32 an integer would make the angle a float64.
        position = inv_freq.dtype.type(positions[token])
        for channel in range(half):
            angle = position * inv_freq[channel]
            cos[channel], sin[channel] = np.cos(angle) * scaling, np.sin(angle) * scaling
        _rotate_heads(row_at(q, q_out), token * q_strides[0], q_strides[1], cos, sin, q_out[token])
        _rotate_heads(row_at(k, k_out), token * k_strides[0], k_strides[1], cos, sin, k_out[token])


@part
def _rotate_heads(row: Any, first: int, stride: int, cos: Any, sin: Any, out: Any) -> None:
    half = len(cos)
    for head in range(out.shape[0]):
        at, target = first + head * stride, out[head]
        for channel in range(half):
            a, b = wide(row[at + channel]), wide(row[at + half + channel])
            target[channel] = narrow(a * cos[channel] - b * sin[channel], out)
            target[half + channel] = narrow(b * cos[channel] + a * sin[channel], out)
        for channel in range(2 * half, out.shape[1]):
            target[channel] = row[at + channel]


_rotate_loop = Loop(_rotate, STRICT)


def apply_rotary_compiled(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    assert q.stride(2) == k.stride(2) == 1, (q.stride(), k.stride())
    turned = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    frequencies = inv_freq.contiguous().numpy()
    _rotate_loop(
        q.numel() + k.numel(),
        positions.contiguous().numpy(), frequencies, frequencies.dtype.type(scaling), q.data_ptr(),
        q.stride()[:2], k.data_ptr(), k.stride()[:2], as_array(turned[0]), as_array(turned[1]),
    )  # fmt: skip
    return turned
