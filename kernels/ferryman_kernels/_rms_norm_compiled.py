"""The norms' loops for the CPU: each row is read once and written once.

Formulas and names are those of `rms_norm`. Rows come as one flat array and a stride. In a
two-dimensional array that is not contiguous, such as half of a split product, the compiler does not
know that a row's numbers are adjacent and does not vectorise (20 times as slow).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._compiled import Loop, as_array, as_flat, narrow, prange, silu, wide
from ferryman_kernels._precision import wide_dtype


def _norm(x: Any, stride_x: int, weight: Any, scalars: Any, y: Any) -> None:
    tokens, dim = y.shape
    one, eps, count = scalars
    for token in prange(tokens):
        row, out = x[token * stride_x : token * stride_x + dim], y[token]
        total = eps - eps
        for c in range(dim):
            total += wide(row[c]) * wide(row[c])
        scale = one / np.sqrt(total / count + eps)
        for c in range(dim):
            out[c] = narrow(wide(row[c]) * scale * weight[c], out)


def _gated_norm(
    x: Any,
    stride_x: int,
    gate: Any,
    stride_gate: int,
    weight: Any,
    scalars: Any,
    groups: int,
    y: Any,
) -> None:
    tokens, dim = y.shape
    size = dim // groups
    one, eps, count = scalars
    for job in prange(tokens * groups):
        token, first = job // groups, job % groups * size
        row = x[token * stride_x + first : token * stride_x + first + size]
        open_by = gate[token * stride_gate + first : token * stride_gate + first + size]
        factor, out = weight[first : first + size], y[token, first : first + size]
        gated, total = np.empty(size, weight.dtype), eps - eps
        for c in range(size):
            gated[c] = wide(row[c]) * silu(wide(open_by[c]))
        for c in range(size):
            total += gated[c] * gated[c]
        scale = one / np.sqrt(total / count + eps)
        for c in range(size):
            out[c] = narrow(gated[c] * scale * factor[c], out)


_norm_loop, _gated_norm_loop = Loop(_norm), Loop(_gated_norm)


def rms_norm_compiled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert x.stride(1) == 1, x.stride()
    y = torch.empty(x.shape, dtype=x.dtype)
    factors, scalars = _in_wide(x, weight, eps, 1)
    _norm_loop(x.numel(), as_flat(x), x.stride(0), factors, scalars, as_array(y))
    return y


def gated_rms_norm_compiled(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    assert x.stride(1) == gate.stride(1) == 1, (x.stride(), gate.stride())
    y = torch.empty(x.shape, dtype=x.dtype)
    factors, scalars = _in_wide(x, weight, eps, groups)
    _gated_norm_loop(
        4 * x.numel(),
        as_flat(x), x.stride(0), as_flat(gate), gate.stride(0), factors, scalars, groups,
        as_array(y),
    )  # fmt: skip
    return y


def _in_wide(x: Tensor, weight: Tensor, eps: float, groups: int) -> tuple[Any, Any]:
    """Weight [dim]; then 1, eps and the length of a group, in the dtype of the sums.

    They are numbers of that dtype, because a plain 1 or a length would widen the whole loop.
    """
    factors = weight.to(wide_dtype(x.dtype)).contiguous().numpy()
    number = factors.dtype.type
    return factors, (number(1), number(eps), number(x.shape[1] // groups))
