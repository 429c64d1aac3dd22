"""The product with one weight in Triton, in one order of sums for any number of rows.

The order belongs to the weight: its inputs are cut into `parts_of` equal parts, each is summed in
rising order in steps of the matrix unit, and the parts' sums are added in rising order. The number
of rows decides who does that. Of few rows each part is a program's own, so that enough programs
read the weight, and another kernel adds them; of many rows one program has all parts, of a larger
tile.

The size of a tile is no part of the order: a number of it is the sum of the same steps in a tile of
64 rows by 64 or 128 outputs as in one of 128 by 128. So it is on an H200, in every number tried; a
device on which `tiles_agree` does not find it so has no large tiles.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, laid_out, tl, wide_type
from ferryman_kernels.products._grouped_product_triton import Tiles, product_type

# 64 rows are the least that Hopper multiplies by warp groups (wgmma); a decode step has fewer, and
# waits for the weight's bytes, not for products. A narrow weight has narrow tiles, so that enough
# programs read it. All were timed on an H200 (docs/measured.md).
_NARROW_TILES = Tiles(64, 64, 64, 4, 4)
_WIDE_TILES = Tiles(64, 128, 64, 4, 4)
_WIDE_FROM = 16_384
_LARGE_TILES = Tiles(128, 128, 64, 8, 3)
# Multiplied without matrix units.
_EXACT_TILES = Tiles(16, 32, 32, 4, 2)

_PROGRAMS = 264
"""Programs that one product of few rows should have, two for each multiprocessor of an H200."""

_LARGE_FROM = 96
"""The large tiles above which a product takes them: fewer would leave multiprocessors idle."""

_PART_LEN = 512
"""The fewest inputs of a part: shorter ones cost more in sums than they save."""

_FOLDED = 256
"""The numbers that a program folds."""


def dense_tiles(dtype: torch.dtype, out_dim: int) -> Tiles:
    """The tiles of a weight with `out_dim` outputs, whose programs serve any number of rows."""
    if dtype is not torch.bfloat16:
        return _EXACT_TILES
    return _WIDE_TILES if out_dim >= _WIDE_FROM else _NARROW_TILES


def parts_of(dtype: torch.dtype, out_dim: int, in_dim: int) -> int:
    """The parts into which a weight's inputs are cut, by its shape alone: a power of two."""
    if dtype is not torch.bfloat16:
        return 1
    tiles, parts = dense_tiles(dtype, out_dim), 1
    programs = cdiv(out_dim, tiles.out)
    while programs * parts * 2 <= _PROGRAMS and in_dim % (2 * parts * _PART_LEN) == 0:
        parts *= 2
    return parts


@Kernel.for_any("rows", "parts_each")
def _dense_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: int,
    parts_each: int,
    in_dim: int,
    out_dim: int,
    PARTS: tl.constexpr,
    PART_LEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some rows, some outputs, some parts of the inputs. Programs that follow each other share a
    part of the weight."""
    offs_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_out = tl.program_id(1).to(tl.int64) * OUT + tl.arange(0, OUT)
    offs_column = tl.arange(0, COLUMNS)
    is_row, is_out = offs_row < rows, offs_out < out_dim
    x_at = x_ptr + offs_row[:, None] * in_dim + offs_column[None, :]
    weight_at = weight_ptr + offs_out[None, :] * in_dim + offs_column[:, None]
    first = tl.program_id(2) * parts_each
    y = tl.zeros([ROWS, OUT], WIDE)
    for part in range(first, first + parts_each):
        of_part = tl.zeros([ROWS, OUT], WIDE)
        for start in range(part * PART_LEN, (part + 1) * PART_LEN, COLUMNS):
            is_column = offs_column < in_dim - start
            mask_x, mask_weight = is_row[:, None] & is_column[None, :], is_column[:, None]
            x = tl.load(x_at + start, mask=mask_x, other=0.0).to(NARROW)
            mask_weight = mask_weight & is_out[None, :]
            weight = tl.load(weight_at + start, mask=mask_weight, other=0.0).to(NARROW)
            of_part += tl.dot(x, weight, input_precision="ieee", out_dtype=WIDE)
        y = of_part if PARTS == 1 else y + of_part
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_out, mask=is_out, other=0.0).to(WIDE)[None, :]
    y_at = y_ptr + (tl.program_id(2).to(tl.int64) * rows + offs_row)[:, None] * out_dim
    mask = is_row[:, None] & is_out[None, :]
    tl.store(y_at + offs_out[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@Kernel.for_any("rows")
def _large_dense_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: int,
    out_dim: int,
    PARTS: tl.constexpr,
    PART_LEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """The same of many rows, by descriptors: the card's copy engine (TMA) brings the tiles.

    Programs go through GROUP blocks of rows together, which finds both operands in the cache.
    """
    row_tiles, out_tiles = tl.cdiv(rows, ROWS), tl.cdiv(out_dim, OUT)
    group = tl.program_id(0) // (GROUP * out_tiles)
    in_group = tl.program_id(0) % (GROUP * out_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    row, out = (group * GROUP + in_group % height) * ROWS, in_group // height * OUT
    y = tl.zeros([ROWS, OUT], tl.float32)
    for part in range(0, PARTS):
        of_part = tl.zeros([ROWS, OUT], tl.float32)
        for start in range(0, PART_LEN, COLUMNS):
            column = part * PART_LEN + start
            rows_of_x = x.load([row, column]).to(NARROW)
            rows_of_weight = weight.load([out, column]).to(NARROW)
            of_part = tl.dot(rows_of_x, rows_of_weight.T, of_part)
        y = of_part if PARTS == 1 else y + of_part
    offs_row, offs_out = row.to(tl.int64) + tl.arange(0, ROWS), out + tl.arange(0, OUT)
    is_row, is_out = offs_row < rows, offs_out < out_dim
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_out, mask=is_out, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + offs_row[:, None] * out_dim + offs_out[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


@Kernel.for_any("rows")
def _fold_parts_kernel(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: int,
    out_dim: int,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Adds some numbers of all parts in rising order, as a program does that has them all."""
    num = tl.cast(rows, tl.int64) * out_dim
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32)
    for part in range(0, PARTS):
        y += tl.load(parts_ptr + part * num + at, mask=at < num, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + at % out_dim, mask=at < num, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < num)


def dense_product_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert weight.is_contiguous(), weight.stride()
    x = laid_out(x)
    if takes_large_tiles(x, weight):
        return large_dense_product(x, weight, bias)
    return small_dense_product(x, weight, bias)


def takes_large_tiles(x: Tensor, weight: Tensor) -> bool:
    """Whether the rows fill the card with large tiles, of which descriptors can be made."""
    if x.dtype is not torch.bfloat16:
        return False
    num = cdiv(len(x), _LARGE_TILES.rows) * cdiv(len(weight), _LARGE_TILES.out)
    is_round = weight.shape[1] % 8 == 0 and weight.storage_offset() % 8 == 0
    return num >= _LARGE_FROM and is_round and tiles_agree(x.device)


def small_dense_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by the tiles that serve any number of rows."""
    (out_dim, in_dim), tiles = weight.shape, dense_tiles(x.dtype, len(weight))
    parts, grid = parts_of(x.dtype, out_dim, in_dim), _grid(x, out_dim, tiles)
    y = torch.empty(len(x), out_dim, dtype=x.dtype, device=x.device)
    # Rows that fill the card by themselves need no more programs, and no sums of parts in memory.
    programs = parts if grid[0] * grid[1] * 2 <= _PROGRAMS else 1
    is_cut = programs > 1
    of_parts = x.new_empty(parts, *y.shape, dtype=torch.float32) if is_cut else y
    _dense_kernel[(*grid, programs)](
        x, weight, y if bias is None else bias, of_parts, len(x), parts // programs, in_dim,
        out_dim, PARTS=parts, PART_LEN=_part_len(in_dim, parts, tiles),
        HAS_BIAS=bias is not None and not is_cut, NARROW=product_type(x), WIDE=wide_type(x.dtype),
        ROWS=tiles.rows, OUT=tiles.out, COLUMNS=tiles.columns,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if is_cut:
        _fold_parts_kernel[cdiv(y.numel(), _FOLDED),](
            of_parts, y if bias is None else bias, y, len(x), out_dim,
            PARTS=parts, HAS_BIAS=bias is not None, BLOCK=_FOLDED, num_warps=2,
        )  # fmt: skip
    return y


def large_dense_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in bfloat16 by large tiles, where Triton has descriptors."""
    (out_dim, in_dim), tiles, descriptor = weight.shape, _LARGE_TILES, _descriptor()
    parts, (row_tiles, out_tiles) = parts_of(x.dtype, out_dim, in_dim), _grid(x, out_dim, tiles)
    assert descriptor is not None, "Triton has descriptors from 3.4 on"
    y = torch.empty(len(x), out_dim, dtype=x.dtype, device=x.device)
    _large_dense_kernel[row_tiles * out_tiles,](
        descriptor.from_tensor(x, [tiles.rows, tiles.columns]),
        descriptor.from_tensor(weight, [tiles.out, tiles.columns]),
        y if bias is None else bias, y, len(x), out_dim,
        PARTS=parts, PART_LEN=_part_len(in_dim, parts, tiles), HAS_BIAS=bias is not None,
        NARROW=product_type(x), ROWS=tiles.rows, OUT=tiles.out, COLUMNS=tiles.columns, GROUP=8,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def _grid(x: Tensor, out_dim: int, tiles: Tiles) -> tuple[int, int]:
    return cdiv(len(x), tiles.rows), cdiv(out_dim, tiles.out)


def _part_len(in_dim: int, parts: int, tiles: Tiles) -> int:
    """The inputs of a part in whole steps. Where there is one part, the last step may reach beyond
    the inputs."""
    return cdiv(in_dim // parts, tiles.columns) * tiles.columns


@cache
def _descriptor() -> Any:
    """Triton's type of descriptors, or None where it has none."""
    try:
        return import_module("triton.tools.tensor_descriptor").TensorDescriptor
    except ModuleNotFoundError:
        return None


@cache
def tiles_agree(device: torch.device) -> bool:
    """Whether large tiles give the bits of small ones on a device; asked once, by random numbers.

    300 rows are multiplied by two weights: a narrow one whose inputs are in four parts, and a wide
    one whose inputs are in one. Nothing else is asked: no bias, which is added to whole sums, and
    no other shape. A load asks it: a step that is recorded must not wait.
    """
    if _descriptor() is None:
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return False  # no copy engine for descriptors
    return all(_agree_on(device, *shape) for shape in ((640, 4 * _PART_LEN), (_WIDE_FROM, 128)))


def _agree_on(device: torch.device, out_dim: int, in_dim: int) -> bool:
    """Whether both tiles give the same products of random rows with a random weight."""
    drawn = torch.Generator(device=device).manual_seed(1)
    x, weight = (
        torch.randn(num, in_dim, device=device, generator=drawn).bfloat16()
        for num in (300, out_dim)
    )
    return torch.equal(small_dense_product(x, weight, None), large_dense_product(x, weight, None))
