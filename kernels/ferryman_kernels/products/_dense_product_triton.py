"""The product with one weight in Triton, in one order of sums for any number of rows.

A tile of rows by outputs belongs to one program, which takes the inputs in rising order, some at a
time, into one sum for each number: no program splits the inputs, and the tile follows from the
weight's shape and dtype alone. So all launches for a weight are of one compiled kernel, whose
instructions know neither how many rows there are nor where one of them lies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, laid_out, tl, wide_type
from ferryman_kernels.products._grouped_product_triton import Tiles, product_type

# 64 rows are the least that Hopper multiplies by warp groups (wgmma); a decode step has fewer, and
# waits for the weight's bytes, not for products. A narrow weight has narrow tiles, so that enough
# programs read it. Chosen by registers, spills and shared memory as compiled for sm_90a.
_NARROW_TILES = Tiles(64, 64, 64, 4, 4)
_WIDE_TILES = Tiles(64, 128, 64, 4, 4)
_WIDE_FROM = 16_384
# Multiplied without matrix units.
_EXACT_TILES = Tiles(16, 32, 32, 4, 2)


def dense_tiles(dtype: torch.dtype, out_dim: int) -> Tiles:
    """The tiles of a weight with `out_dim` outputs, for any number of rows."""
    if dtype is not torch.bfloat16:
        return _EXACT_TILES
    return _WIDE_TILES if out_dim >= _WIDE_FROM else _NARROW_TILES


@Kernel.for_any("rows")
def _dense_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: int,
    in_dim: int,
    out_dim: int,
    HAS_BIAS: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some rows, some outputs. Programs that follow each other share a part of the weight."""
    offs_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_out = tl.program_id(1).to(tl.int64) * OUT + tl.arange(0, OUT)
    offs_column = tl.arange(0, COLUMNS)
    is_row, is_out = offs_row < rows, offs_out < out_dim
    x_at = x_ptr + offs_row[:, None] * in_dim + offs_column[None, :]
    weight_at = weight_ptr + offs_out[None, :] * in_dim + offs_column[:, None]
    y = tl.zeros([ROWS, OUT], WIDE)
    for start in range(0, in_dim, COLUMNS):
        is_column = offs_column < in_dim - start
        x = tl.load(x_at + start, mask=is_row[:, None] & is_column[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=is_column[:, None] & is_out[None, :], other=0.0)
        y += tl.dot(x.to(NARROW), weight.to(NARROW), input_precision="ieee", out_dtype=WIDE)
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_out, mask=is_out, other=0.0).to(WIDE)[None, :]
    y_at = y_ptr + offs_row[:, None] * out_dim + offs_out[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


def dense_product_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out_dim, in_dim = weight.shape
    assert weight.is_contiguous(), weight.stride()
    x, tiles = laid_out(x), dense_tiles(x.dtype, out_dim)
    y = torch.empty(len(x), out_dim, dtype=x.dtype, device=x.device)
    _dense_kernel[cdiv(len(x), tiles.rows), cdiv(out_dim, tiles.out)](
        x, weight, y if bias is None else bias, y, len(x), in_dim, out_dim,
        HAS_BIAS=bias is not None, NARROW=product_type(x), WIDE=wide_type(x.dtype),
        ROWS=tiles.rows, OUT=tiles.out, COLUMNS=tiles.columns,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y
