"""Grouped product (grouped GEMM): each row is multiplied by the matrix of the expert it chose.

    y[p] = weight[expert[p]] · x[p // per_row] + bias[expert[p]]              [pairs, out_dim]

A pair is a token and one of its experts; `per_row` pairs in a row share a row of x. The matrices of
all experts lie in one stack, in floats or in codes (experts in MXFP4, FP8, int8, int4):

    value[e, i, j] = (code[e, i, j] - zero[e, i, g]) · scale[e, i, g]         g = group of column j

Everything that depends on the data stays on the device: pairs are sorted by expert there, and a
program of the kernel finds its expert by itself. The host knows the number of pairs alone, so a
launch needs no wait, and a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import laid_out
from ferryman_kernels.products._grouped_product_triton import (
    ANY_CODES,
    ANY_ROWS,
    FP4,
    FP8,
    INT4,
    INT8,
    grouped_codes_triton,
    grouped_floats_triton,
    tiles_of_any,
)
from ferryman_kernels.products.pair_order import sort_pairs

__all__ = [
    "FP4",
    "FP8",
    "INT4",
    "INT8",
    "CodeStack",
    "FloatStack",
    "grouped_product",
    "grouped_product_in_one_order",
    "sort_pairs",
]

_FP4_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TABLES = {
    INT4: tuple(float(code - 8) for code in range(16)),
    FP4: (*_FP4_SIZES, *(-size for size in _FP4_SIZES)),
}


@dataclass(frozen=True, slots=True)
class FloatStack:
    """`weight` [experts, out_dim, in_dim] and `bias` [experts, out_dim] or None, in x's dtype."""

    weight: Tensor
    bias: Tensor | None

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def dequantised(self, expert: int) -> Tensor:
        return self.weight[expert]


@dataclass(frozen=True, slots=True)
class CodeStack:
    """Codes of all experts, row after row: bytes [experts, out_dim, in_dim], or pairs of nibbles
    [experts, out_dim, in_dim / 2], the even column lower.

    `meaning` is INT8 (int8), FP8 (float8_e4m3fn without not-a-number), and for nibbles in uint8
    INT4 (an offset from -8) or FP4 (E2M1). `scales` [experts, out_dim, groups]
    in any float dtype or in float8_e8m0fnu; `zeros` likewise in an integer dtype, or None if all
    are 0. `groups` [experts, in_dim] int32 has each column's group; `group_len` is their length
    where they are alike and follow one another, and else 0.
    """

    codes: Tensor
    meaning: int
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor
    group_len: int
    bias: Tensor | None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:2], self.groups.shape[1]))

    def dequantised(self, expert: int) -> Tensor:
        """The numbers [out_dim, in_dim] of an expert, in float64."""
        values, groups = self.codes[expert], self.groups[expert].long()
        if self.meaning in _TABLES:
            table = torch.tensor(_TABLES[self.meaning], dtype=torch.float64, device=values.device)
            values = table[torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).long()]
        zeros = 0 if self.zeros is None else self.zeros[expert][:, groups].double()
        return (values.double() - zeros) * self.scales[expert].double()[:, groups]


def grouped_product_reference(
    x: Tensor, stack: FloatStack | CodeStack, order: Tensor, starts: Tensor
) -> Tensor:
    wide, per_row = wide_dtype(x.dtype), len(order) // max(1, len(x))
    y = x.new_empty(len(order), stack.shape[1])
    for expert, count in enumerate(starts.diff().tolist()):
        first = int(starts[expert])
        pairs = order[first : first + count]
        rows = x[pairs // per_row].to(wide) @ stack.dequantised(expert).to(wide).T
        y[pairs] = (rows if stack.bias is None else rows + stack.bias[expert]).to(x.dtype)
    return y


def grouped_product(
    x: Tensor, stack: FloatStack | CodeStack, order: Tensor, starts: Tensor
) -> Tensor:
    """y [pairs, out_dim] for `x` [rows, in_dim], a divisor of pairs; `order` and `starts` are those
    of `sort_pairs`. On a card the number of pairs chooses the tiles, and so the order of sums."""
    _check(x, stack, order, starts)
    if not x.is_cuda:
        return grouped_product_reference(x, stack, order, starts)
    if isinstance(stack, FloatStack):
        return grouped_floats_triton(x, stack.weight, stack.bias, order, starts)
    return grouped_codes_triton(x, *_parts(stack), stack.bias, order, starts)


def grouped_product_in_one_order(
    x: Tensor, stack: FloatStack | CodeStack, order: Tensor, starts: Tensor
) -> Tensor:
    """`grouped_product` with the same tiles for any number of pairs: a row's bits depend on its
    numbers and its expert alone."""
    _check(x, stack, order, starts)
    if not x.is_cuda:
        return grouped_product_reference(x, stack, order, starts)
    x = laid_out(x)
    if isinstance(stack, FloatStack):
        tiles = tiles_of_any(x, ANY_ROWS)
        return grouped_floats_triton(x, stack.weight, stack.bias, order, starts, tiles)
    tiles = tiles_of_any(x, ANY_CODES)
    return grouped_codes_triton(x, *_parts(stack), stack.bias, order, starts, tiles)


def _parts(stack: CodeStack) -> tuple[Any, Any]:
    """Codes and scales as the kernel's launcher takes them."""
    scaled = stack.scales, stack.zeros, stack.groups, stack.group_len
    return (stack.codes, stack.meaning), scaled


def _check(x: Tensor, stack: FloatStack | CodeStack, order: Tensor, starts: Tensor) -> None:
    assert x.ndim == 2, x.shape
    assert x.shape[1] == stack.shape[2], (x.shape, stack.shape)
    assert len(x) == 0 or len(order) % len(x) == 0, (x.shape, order.shape)
    assert starts.shape == (stack.shape[0] + 1,), (starts.shape, stack.shape)
