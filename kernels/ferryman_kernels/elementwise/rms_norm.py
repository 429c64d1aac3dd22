"""Root mean square norm, plain and gated (Zhang & Sennrich 2019; the gated one is Mamba-2's).

    rms_norm(x)          = x / sqrt(mean(x²) + eps) · weight                       [tokens, dim]
    grouped_rms_norm(x)  = rms_norm over each of `groups` groups of x              [tokens, dim]
    add_rms_norm(x, a)   = s, rms_norm(s) for s = x + scale · a                 2 × [tokens, dim]
    scaled_sum(x, a)     = x + scale · a                                           [tokens, dim]
    gated_rms_norm(x, g) = rms_norm over each of `groups` groups of x · silu(g)    [tokens, dim]
    rms_norm_then_gate(x, g) = rms_norm over each of `groups` groups of x, · silu(g)

Computed in float32 (float64 for float64) and rounded once, at the end; s is rounded too, before its
norm. On a card each of the norms is one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, next_power_of_two, tl, warps_of_row, wide_type
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.elementwise._rms_norm_compiled import (
    add_rms_norm_compiled,
    gated_rms_norm_compiled,
    rms_norm_compiled,
    rms_norm_then_gate_compiled,
    scaled_sum_compiled,
)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    wide = wide_dtype(x.dtype)
    h = x.to(wide).reshape(len(x), groups, x.shape[1] // groups)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return ((h * scale).flatten(1) * weight.to(wide)).to(x.dtype)


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    wide = wide_dtype(x.dtype)
    h = (x.to(wide) * F.silu(gate.to(wide))).reshape(len(x), groups, -1)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return ((h * scale).flatten(1) * weight.to(wide)).to(x.dtype)


def rms_norm_then_gate_reference(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    wide = wide_dtype(x.dtype)
    parts = x.to(wide).reshape(len(x) * groups, x.shape[1] // groups)
    normed = rms_norm_reference(parts, parts.new_ones(parts.shape[1]), eps).view_as(x)
    return (normed * weight.to(wide) * F.silu(gate.to(wide))).to(x.dtype)


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
    EPS: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    GATE_LAST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One program handles one group of one row; `dim` is the length of a group."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * dim
    offs = first + tl.arange(0, BLOCK_DIM)
    mask = offs < first + dim
    x = tl.load(x_ptr + row * stride_x_row + offs, mask=mask, other=0.0).to(WIDE)
    gate_at = gate_ptr + row * stride_gate_row + offs
    if GATE_FIRST:
        gate = tl.load(gate_at, mask=mask, other=0.0).to(WIDE)
        x = x * gate / (1.0 + tl.exp(-gate))
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / dim + EPS)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(WIDE)
    y = x * scale * weight
    if GATE_LAST:
        gate = tl.load(gate_at, mask=mask, other=0.0).to(WIDE)
        y = y * (gate / (1.0 + tl.exp(-gate)))
    tl.store(y_ptr + row * stride_y_row + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@Kernel
def _add_rms_norm_kernel(
    x_ptr: tl.tensor,
    added_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    total_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_x_row: int,
    stride_added_row: int,
    dim: int,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One program handles one row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_DIM)
    mask = offs < dim
    x = tl.load(x_ptr + row * stride_x_row + offs, mask=mask, other=0.0).to(WIDE)
    added = tl.load(added_ptr + row * stride_added_row + offs, mask=mask, other=0.0).to(WIDE)
    rounded = (x + added * SCALE).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * dim + offs, rounded, mask=mask)
    total = rounded.to(WIDE)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / dim + EPS)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(WIDE)
    y = total * scale * weight
    tl.store(y_ptr + row * dim + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    return _launch(x, x, weight, eps, groups=groups)


def gated_rms_norm_triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    return _launch(x, gate, weight, eps, groups=groups, gate_first=True)


def rms_norm_then_gate_triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    return _launch(x, gate, weight, eps, groups=groups, gate_last=True)


def _launch(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    groups: int,
    gate_first: bool = False,
    gate_last: bool = False,
) -> Tensor:
    assert x.stride(1) == gate.stride(1) == weight.stride(0) == 1, (x.stride(), gate.stride())
    tokens, dim = x.shape
    y = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
    block = next_power_of_two(dim // groups)
    _rms_norm_kernel[tokens, groups](
        x, gate, weight, y,
        x.stride(0), gate.stride(0), y.stride(0), dim // groups, EPS=float(eps),
        GATE_FIRST=gate_first, GATE_LAST=gate_last, BLOCK_DIM=block, WIDE=wide_type(x.dtype),
        num_warps=warps_of_row(block),
    )  # fmt: skip
    return y


def add_rms_norm_triton(
    x: Tensor, added: Tensor, scale: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    assert x.stride(1) == added.stride(1) == weight.stride(0) == 1, (x.stride(), added.stride())
    total, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    block = next_power_of_two(x.shape[1])
    _add_rms_norm_kernel[len(x),](
        x, added, weight, total, y,
        x.stride(0), added.stride(0), x.shape[1], EPS=float(eps),
        SCALE=float(scale), BLOCK_DIM=block, WIDE=wide_type(x.dtype), num_warps=warps_of_row(block),
    )  # fmt: skip
    return total, y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of each row of `x` [tokens, dim]; `weight` [dim]."""
    return grouped_rms_norm(x, weight, eps, 1)


def grouped_rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Norm of each of `groups` equal parts of a row of `x` [tokens, dim]; `weight` [dim]."""
    assert x.ndim == 2, x.shape
    assert weight.shape == x.shape[1:], (x.shape, weight.shape)
    assert x.shape[1] % groups == 0, (x.shape, groups)
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps, groups)
    run = rms_norm_compiled if serves(x, weight) else rms_norm_reference
    return run(x, weight, eps, groups)


def add_rms_norm(
    x: Tensor, added: Tensor, scale: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + scale · added, both [tokens, dim], and the norm of its rows; `weight` [dim]."""
    assert x.shape == added.shape, (x.shape, added.shape)
    assert weight.shape == x.shape[1:], (x.shape, weight.shape)
    is_alike = x.dtype is added.dtype and x.ndim == 2
    if is_alike and x.is_cuda:
        return add_rms_norm_triton(x, added, scale, weight, eps)
    if is_alike and serves(x, added, weight):
        return add_rms_norm_compiled(x, added, scale, weight, eps)
    total = scaled_sum(x, added, scale)
    return total, rms_norm(total, weight, eps)


def scaled_sum(x: Tensor, added: Tensor, scale: float) -> Tensor:
    """x + scale · added, both [tokens, dim]."""
    assert x.shape == added.shape, (x.shape, added.shape)
    is_alike = x.dtype is added.dtype and x.ndim == 2
    if is_alike and not x.is_cuda and serves(x, added):
        return scaled_sum_compiled(x, added, scale)
    return x.add(added, alpha=scale)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Norm of `x · silu(gate)`, both [tokens, dim], over each of `groups` equal parts of a row."""
    assert x.ndim == 2, x.shape
    assert gate.shape == x.shape, (x.shape, gate.shape)
    assert weight.shape == x.shape[1:], (x.shape, weight.shape)
    assert x.shape[1] % groups == 0, (x.shape, groups)
    if x.is_cuda:
        return gated_rms_norm_triton(x, gate, weight, eps, groups)
    has_loop = x.dtype is gate.dtype and serves(x, weight)
    run = gated_rms_norm_compiled if has_loop else gated_rms_norm_reference
    return run(x, gate, weight, eps, groups)


def rms_norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Norm of each of `groups` equal parts of a row of `x`, times `silu(gate)`: [tokens, dim]."""
    assert x.ndim == 2, x.shape
    assert gate.shape == x.shape, (x.shape, gate.shape)
    assert weight.shape == x.shape[1:], (x.shape, weight.shape)
    assert x.shape[1] % groups == 0, (x.shape, groups)
    if x.is_cuda:
        return rms_norm_then_gate_triton(x, gate, weight, eps, groups)
    has_loop = x.dtype is gate.dtype and serves(x, weight)
    run = rms_norm_then_gate_compiled if has_loop else rms_norm_then_gate_reference
    return run(x, gate, weight, eps, groups)
