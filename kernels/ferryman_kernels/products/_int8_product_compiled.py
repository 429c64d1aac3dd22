"""The int8 product's loops for the CPU: one row of x, and codes on their way to a wider product.

Formulas and names are those of `int8_product`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import WEIGHTS_PER_ELEMENT, Loop, as_array, narrow, prange, wide
from ferryman_kernels.cpu._lanes import LANES, add_codes, no_sums
from ferryman_kernels.cpu._vectors import AHEAD_BYTES, prefetch, total


def _one_row(codes: Any, in_dim: int, scales: Any, x: Any, y: Any) -> None:
    whole = in_dim // LANES * LANES
    for output in prange(y.shape[0]):
        sums, at = no_sums(), output * in_dim
        for i in range(0, whole, LANES):
            prefetch(codes, at + i + AHEAD_BYTES)
            sums = add_codes(sums, codes, at + i, x, i)
        dot = total(sums)
        for i in range(whole, in_dim):
            dot += np.float32(codes[at + i]) * x[i]
        y[output] = narrow(dot * wide(scales[output]), y)


def _widen(codes: Any, widened: Any) -> None:
    for row in prange(codes.shape[0]):
        stored, out = codes[row], widened[row]
        for i in range(stored.shape[0]):
            out[i] = narrow(np.float32(stored[i]), out)


_one_row_loop, _widen_loop = Loop(_one_row), Loop(_widen)


def one_row_compiled(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The product with x [1, in_dim], summed in float32 and rounded once."""
    y = torch.empty(1, len(codes), dtype=x.dtype)
    row = as_array(x[0].float().contiguous())
    flat = as_array(codes.flatten())
    elements = codes.numel() // WEIGHTS_PER_ELEMENT
    _one_row_loop(elements, flat, codes.shape[1], as_array(scales), row, as_array(y[0]))
    return y


def widen_compiled(codes: Tensor, widened: Tensor) -> None:
    """Writes `codes` [rows, in_dim] to `widened`, of the same shape and a float dtype."""
    _widen_loop(codes.numel(), as_array(codes), as_array(widened))
