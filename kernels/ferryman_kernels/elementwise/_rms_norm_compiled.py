"""The norms' loops for the CPU: each row is read once and written once.

Formulas and names are those of `rms_norm`. A loop gets addresses, and strides in elements: to make
arrays of the tensors took longer than the norm of a token. `like` and `floats` are empty rows of
the tensors' dtype and of the sums'.

Squares are added in 64 sums, each of every 64th channel; behind the last 64 in sixteen of them, and
then one by one: so says the source, and by strict rules no compiler changes it. A row's bits follow
from the row alone, by one thread or by several, in a norm of its own or behind an addition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    narrow,
    part,
    prange,
    row_like,
    silu,
    wide,
)
from ferryman_kernels.cpu._vectors import LANES, fused, load, row_at, spread, total


@part
def sum_of_squares(row: Any, number: Any) -> Any:
    """Σ row², of numbers of the type `number`."""
    a, b, c, d = spread(number(0)), spread(number(0)), spread(number(0)), spread(number(0))
    end, step = row.shape[0], 4 * LANES
    whole = end // step * step
    for at in range(0, whole, step):
        x, y = load(row, at), load(row, at + LANES)
        z, w = load(row, at + 2 * LANES), load(row, at + 3 * LANES)
        a, b, c, d = fused(x, x, a), fused(y, y, b), fused(z, z, c), fused(w, w, d)
    for at in range(whole, end // LANES * LANES, LANES):
        x = load(row, at)
        a = fused(x, x, a)
    unit = spread(number(1))
    squares = total(fused(fused(a, unit, b), unit, fused(c, unit, d)))
    for at in range(end // LANES * LANES, end):
        squares = fused(wide(row[at]), wide(row[at]), squares)
    return squares


@part
def norm_row(row: Any, factors: Any, eps: Any, out: Any) -> None:
    """out = row / sqrt(mean(row²) + eps) · factors; eps in the dtype of the factors."""
    number, dim = factors.dtype.type, row.shape[0]
    # A plain 1 or a length would widen the whole loop.
    scale = number(1) / np.sqrt(sum_of_squares(row, number) / number(dim) + eps)
    for c in range(dim):
        out[c] = narrow(wide(row[c]) * scale * factors[c], out)


def _norm(
    like: Any, floats: Any, x: int, stride_x: int, weight: int, eps: float, y: int, tokens: int,
    dim: int, groups: int,
) -> None:  # fmt: skip
    size, length = like.itemsize, dim // groups
    for job in prange(tokens * groups):
        token, first = job // groups, job % groups * length
        row = row_at(x + (token * stride_x + first) * size, like)[:length]
        out = row_at(y + (token * dim + first) * size, like)[:length]
        factors = row_at(weight, floats)[first : first + length]
        norm_row(row, factors, floats.dtype.type(eps), out)


def _add_norm(
    like: Any, floats: Any, x: int, stride_x: int, added: int, stride_added: int, scale: float,
    weight: int, eps: float, total: int, y: int, tokens: int, dim: int,
) -> None:  # fmt: skip
    size = like.itemsize
    for token in prange(tokens):
        row = row_at(x + token * stride_x * size, like)[:dim]
        other = row_at(added + token * stride_added * size, like)[:dim]
        kept = row_at(total + token * dim * size, like)[:dim]
        out = row_at(y + token * dim * size, like)[:dim]
        factor = floats.dtype.type(scale)
        for c in range(dim):
            kept[c] = narrow(wide(row[c]) + factor * wide(other[c]), kept)
        norm_row(kept, row_at(weight, floats)[:dim], floats.dtype.type(eps), out)


def _sum(
    like: Any, floats: Any, x: int, stride_x: int, added: int, stride_added: int, scale: float,
    total: int, tokens: int, dim: int,
) -> None:  # fmt: skip
    size, factor = like.itemsize, floats.dtype.type(scale)
    for token in prange(tokens):
        row = row_at(x + token * stride_x * size, like)[:dim]
        other = row_at(added + token * stride_added * size, like)[:dim]
        out = row_at(total + token * dim * size, like)[:dim]
        for c in range(dim):
            out[c] = narrow(wide(row[c]) + factor * wide(other[c]), out)


def _gated_norm(
    like: Any, floats: Any, x: int, stride_x: int, gate: int, stride_gate: int, weight: int,
    eps: float, y: int, tokens: int, dim: int, groups: int,
) -> None:  # fmt: skip
    size, length, number = like.itemsize, dim // groups, floats.dtype.type
    for job in prange(tokens * groups):
        token, first = job // groups, job % groups * length
        row = row_at(x + (token * stride_x + first) * size, like)[:length]
        open_by = row_at(gate + (token * stride_gate + first) * size, like)[:length]
        out = row_at(y + (token * dim + first) * size, like)[:length]
        factors = row_at(weight, floats)[first : first + length]
        gated = np.empty(length, floats.dtype)
        for c in range(length):
            gated[c] = wide(row[c]) * silu(wide(open_by[c]))
        norm_row(gated, factors, number(eps), out)


def _normed_gate(
    like: Any, floats: Any, x: int, stride_x: int, gate: int, stride_gate: int, weight: int,
    eps: float, y: int, tokens: int, dim: int, groups: int,
) -> None:  # fmt: skip
    size, length, number = like.itemsize, dim // groups, floats.dtype.type
    for job in prange(tokens * groups):
        token, first = job // groups, job % groups * length
        row = row_at(x + (token * stride_x + first) * size, like)[:length]
        open_by = row_at(gate + (token * stride_gate + first) * size, like)[:length]
        out = row_at(y + (token * dim + first) * size, like)[:length]
        normed = np.empty(length, floats.dtype)
        norm_row(row, row_at(weight, floats)[first : first + length], number(eps), normed)
        for c in range(length):
            out[c] = narrow(normed[c] * silu(wide(open_by[c])), out)


_norm_loop, _add_norm_loop = Loop(_norm, STRICT), Loop(_add_norm, STRICT)
_gated_norm_loop, _normed_gate_loop = Loop(_gated_norm, STRICT), Loop(_normed_gate, STRICT)
_sum_loop = Loop(_sum, STRICT)

SILU_ELEMENTS = 4
"""Elements of a norm that take as long as one whose silu is computed."""


def rms_norm_compiled(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    x = _with_whole_rows(x)
    (tokens, dim), like, floats, factors = _in_wide(x, weight)
    y = torch.empty(tokens, dim, dtype=x.dtype)
    _norm_loop(
        tokens * dim,
        like, floats, x.data_ptr(), x.stride(0), factors.data_ptr(), eps, y.data_ptr(), tokens, dim,
        groups,
    )  # fmt: skip
    return y


def add_rms_norm_compiled(
    x: Tensor, added: Tensor, scale: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x, added = _with_whole_rows(x), _with_whole_rows(added)
    (tokens, dim), like, floats, factors = _in_wide(x, weight)
    total, y = torch.empty(tokens, dim, dtype=x.dtype), torch.empty(tokens, dim, dtype=x.dtype)
    _add_norm_loop(
        2 * tokens * dim,
        like, floats, x.data_ptr(), x.stride(0), added.data_ptr(), added.stride(0), float(scale),
        factors.data_ptr(), eps, total.data_ptr(), y.data_ptr(), tokens, dim,
    )  # fmt: skip
    return total, y


def scaled_sum_compiled(x: Tensor, added: Tensor, scale: float) -> Tensor:
    x, added = _with_whole_rows(x), _with_whole_rows(added)
    (tokens, dim), total = x.shape, torch.empty(x.shape, dtype=x.dtype)
    _sum_loop(
        tokens * dim,
        row_like(x.dtype), row_like(wide_dtype(x.dtype)), x.data_ptr(), x.stride(0),
        added.data_ptr(), added.stride(0), float(scale), total.data_ptr(), tokens, dim,
    )  # fmt: skip
    return total


def gated_rms_norm_compiled(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    return _with_gate(_gated_norm_loop, x, gate, weight, eps, groups)


def rms_norm_then_gate_compiled(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    return _with_gate(_normed_gate_loop, x, gate, weight, eps, groups)


def _with_gate(
    loop: Loop, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    x, gate = _with_whole_rows(x), _with_whole_rows(gate)
    (tokens, dim), like, floats, factors = _in_wide(x, weight)
    y = torch.empty(tokens, dim, dtype=x.dtype)
    loop(
        SILU_ELEMENTS * tokens * dim,
        like, floats, x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0),
        factors.data_ptr(), eps, y.data_ptr(), tokens, dim, groups,
    )  # fmt: skip
    return y


def _with_whole_rows(x: Tensor) -> Tensor:
    """x [tokens, dim] with the numbers of a row side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def _in_wide(x: Tensor, weight: Tensor) -> tuple[torch.Size, Any, Any, Tensor]:
    """The size of x, empty rows of its dtype and of that of the sums, the weight in the latter."""
    dtype = wide_dtype(x.dtype)
    factors = weight if weight.dtype is dtype else weight.to(dtype)
    return x.shape, row_like(x.dtype), row_like(dtype), factors.contiguous()
