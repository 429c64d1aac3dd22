"""Root mean square norm, plain and gated (Zhang & Sennrich 2019; the gated one is Mamba-2's).

    rms_norm(x)          = x / sqrt(mean(x²) + eps) · weight                       [tokens, dim]
    gated_rms_norm(x, g) = rms_norm over each of `groups` groups of x · silu(g)    [tokens, dim]

Computed in float32 (float64 for float64) and rounded once, at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._compiled import Loop, as_array, narrow, prange, serves, silu, wide
from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, next_power_of_two, tl, wide_type


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = wide_dtype(x.dtype)
    h = x.to(wide)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * scale * weight.to(wide)).to(x.dtype)


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    wide = wide_dtype(x.dtype)
    h = (x.to(wide) * F.silu(gate.to(wide))).reshape(len(x), groups, -1)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return ((h * scale).flatten(1) * weight.to(wide)).to(x.dtype)


def _norm_rows(x: Any, weight: Any, eps: Any, y: Any) -> None:
    """`eps` is an array of one, so that it has the dtype of the sums."""
    dim = x.shape[1]
    for row in prange(len(x)):
        h, scale = np.empty(dim, eps.dtype), np.zeros(1, eps.dtype)
        for n in range(dim):
            h[n] = wide(x[row, n])
        for n in range(dim):
            scale[0] += h[n] * h[n]
        scale[0] = 1 / np.sqrt(scale[0] / dim + eps[0])
        for n in range(dim):
            y[row, n] = narrow(h[n] * scale[0] * wide(weight[n]), y)


def _norm_gated_rows(x: Any, gate: Any, weight: Any, eps: Any, groups: int, y: Any) -> None:
    dim = x.shape[1] // groups
    for row in prange(len(x)):
        h, scale = np.empty(dim, eps.dtype), np.zeros(1, eps.dtype)
        for first in range(0, x.shape[1], dim):
            scale[0] = 0
            line, door = x[row, first : first + dim], gate[row, first : first + dim]
            out, factor = y[row, first : first + dim], weight[first : first + dim]
            for n in range(dim):
                h[n] = wide(line[n]) * silu(wide(door[n]))
            for n in range(dim):
                scale[0] += h[n] * h[n]
            scale[0] = 1 / np.sqrt(scale[0] / dim + eps[0])
            for n in range(dim):
                out[n] = narrow(h[n] * scale[0] * wide(factor[n]), out)


_norm_loop, _gated_norm_loop = Loop(_norm_rows), Loop(_norm_gated_rows)


def rms_norm_compiled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    small = torch.full((1,), eps, dtype=wide_dtype(x.dtype)).numpy()
    _norm_loop(x.numel(), as_array(x), as_array(weight), small, as_array(y))
    return y


def gated_rms_norm_compiled(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    small = torch.full((1,), eps, dtype=wide_dtype(x.dtype)).numpy()
    given = (as_array(x), as_array(gate), as_array(weight))
    _gated_norm_loop(2 * x.numel(), *given, small, groups, as_array(y))
    return y


@Kernel
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_x_row: int,
    stride_gate_row: int,
    stride_y_row: int,
    dim: int,
    eps: float,
    GATED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One row and one group of it for each program; `dim` is a group's."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * dim
    offs = first + tl.arange(0, BLOCK_DIM)
    mask = offs < first + dim
    x = tl.load(x_ptr + row * stride_x_row + offs, mask=mask, other=0.0).to(WIDE)
    if GATED:
        gate = tl.load(gate_ptr + row * stride_gate_row + offs, mask=mask, other=0.0).to(WIDE)
        x = x * gate / (1.0 + tl.exp(-gate))
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / dim + eps)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(WIDE)
    y = x * scale * weight
    tl.store(y_ptr + row * stride_y_row + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, x, weight, eps, groups=1, gated=False)


def gated_rms_norm_triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    return _launch(x, gate, weight, eps, groups=groups, gated=True)


def _launch(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int, gated: bool
) -> Tensor:
    assert x.stride(1) == gate.stride(1) == weight.stride(0) == 1, (x.stride(), gate.stride())
    tokens, dim = x.shape
    y = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
    block = next_power_of_two(dim // groups)
    _rms_norm_kernel[tokens, groups](
        x, gate, weight, y,
        x.stride(0), gate.stride(0), y.stride(0), dim // groups, eps,
        GATED=gated, BLOCK_DIM=block, WIDE=wide_type(x.dtype),
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of each row of `x` [tokens, dim]; `weight` [dim]."""
    assert x.ndim == 2, x.shape
    assert weight.shape == x.shape[1:], (x.shape, weight.shape)
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps)
    run = rms_norm_compiled if serves(x, weight) else rms_norm_reference
    return run(x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Norm of `x · silu(gate)`, both [tokens, dim], over each of `groups` equal parts of a row."""
    assert x.ndim == 2, x.shape
    assert gate.shape == x.shape, (x.shape, gate.shape)
    assert weight.shape == x.shape[1:], (x.shape, weight.shape)
    assert x.shape[1] % groups == 0, (x.shape, groups)
    if x.is_cuda:
        return gated_rms_norm_triton(x, gate, weight, eps, groups)
    run = gated_rms_norm_compiled if serves(x, gate, weight) else gated_rms_norm_reference
    return run(x, gate, weight, eps, groups)
