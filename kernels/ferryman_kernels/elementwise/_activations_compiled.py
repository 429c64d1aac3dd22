"""The activations' loops for the CPU, one for each function; formulas are those of `activations`.

By strict rules a number's bits follow from that number: not from its place in a vector or behind
the last whole one, which is where torch's own sigmoid, silu, softplus and gelu have two answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    exp,
    narrow,
    numba,
    part,
    prange,
    row_like,
    wide,
)
from ferryman_kernels.cpu._vectors import fused, row_at
from ferryman_kernels.elementwise._rms_norm_compiled import SILU_ELEMENTS

if numba is not None:
    from numba.extending import overload

_GELU_SLOPE, _GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
_SOFTPLUS_THRESHOLD = 20.0


@part
def _sigmoid(x: Any, number: Any) -> Any:
    return number(1) / (number(1) + exp(-x))


@part
def _silu(x: Any, number: Any) -> Any:
    return x / (number(1) + exp(-x))


@part
def _gelu_tanh(x: Any, number: Any) -> Any:
    # (1 + tanh u) / 2 is the sigmoid of 2u.
    twice = x * (number(_GELU_SLOPE) * fused(x * x, number(_GELU_CUBE), number(1)))
    return x / (number(1) + exp(-twice))


@part
def _softplus(x: Any, number: Any) -> Any:
    opened = (x if x > number(0) else number(0)) + _log_of_one_and(exp(-abs(x)))
    return x if x > number(_SOFTPLUS_THRESHOLD) else opened


def _log_of_one_and(value: Any) -> Any:
    """log(1 + value) for 0 ≤ value ≤ 1; for float32 within 2e-7 of itself, in a form that
    vectorises."""
    raise NotImplementedError("only in compiled loops")


def _chosen_logarithm(value: Any) -> Callable[..., Any]:
    if value == numba.types.float64:
        return lambda value: np.log1p(value)

    def series(value: Any) -> Any:
        """log(1 + z) by its minimax polynomial (Cephes); from √2 on, of half of 1 + value."""
        is_halved = value > np.float32(0.41421356)
        z = (value - np.float32(1.0)) * np.float32(0.5) if is_halved else value
        p = np.float32(7.0376836292e-2)
        p = fused(p, z, np.float32(-1.1514610310e-1))
        p = fused(p, z, np.float32(1.1676998740e-1))
        p = fused(p, z, np.float32(-1.2420140846e-1))
        p = fused(p, z, np.float32(1.4249322787e-1))
        p = fused(p, z, np.float32(-1.6668057665e-1))
        p = fused(p, z, np.float32(2.0000714765e-1))
        p = fused(p, z, np.float32(-2.4999993993e-1))
        p = fused(p, z, np.float32(3.3333331174e-1))
        square = z * z
        log = z + fused(p * z, square, square * np.float32(-0.5))
        return log + np.float32(0.69314718) if is_halved else log

    return series


if numba is not None:
    overload(_log_of_one_and, jit_options={"error_model": "numpy"}, strict=False)(_chosen_logarithm)


def _loop_of(function: Callable[..., Any]) -> Loop:
    """The loop that gives `function` of each number."""

    def activated(
        like: Any, floats: Any, x: int, stride_x: int, y: int, rows: int, dim: int
    ) -> None:
        size = like.itemsize
        for row in prange(rows):
            numbers = row_at(x + row * stride_x * size, like)[:dim]
            out = row_at(y + row * dim * size, like)[:dim]
            for c in range(dim):
                out[c] = narrow(function(wide(numbers[c]), floats.dtype.type), out)

    # A loop's file on disk has the loop's name.
    activated.__name__ = activated.__qualname__ = f"{function.__name__}_of_rows"
    return Loop(activated, STRICT)


_LOOPS = {
    function.__name__[1:]: _loop_of(function)
    for function in (_sigmoid, _silu, _softplus, _gelu_tanh)
}


def activation_compiled(name: str, x: Tensor) -> Tensor:
    """The function of that name of all numbers of `x` [..., dim]."""
    y = torch.empty(x.shape, dtype=x.dtype)
    rows = _rows_of(x)
    _LOOPS[name](
        SILU_ELEMENTS * x.numel(),
        row_like(x.dtype), row_like(wide_dtype(x.dtype)), rows.data_ptr(), rows.stride(0),
        y.data_ptr(), *rows.shape,
    )  # fmt: skip
    return y


def _rows_of(x: Tensor) -> Tensor:
    """x as rows [rows, dim] whose numbers lie side by side."""
    if x.ndim == 2 and x.stride(1) == 1:
        return x
    return x.contiguous().view(-1, x.shape[-1])
