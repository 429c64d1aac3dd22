"""The grouped product in Triton, over matrices in floats and in codes.

The grid has as many programs for rows as the pairs could need: an expert's pairs fill blocks of
their own, so there are at most pairs / BLOCK_ROWS full blocks, and one that is not full for each
expert that has pairs. A program counts the blocks before it and has nothing to do behind the last.
Rows are gathered by pair and results stored by pair: nothing else is sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ferryman_kernels._triton import (
    Kernel,
    cdiv,
    dot_type,
    next_power_of_two,
    shared_bytes,
    tl,
    wide_type,
)

INT8, INT4, FP4, FP8 = 0, 1, 2, 3


class Tiles(NamedTuple):
    """The part of a product that one program computes, and its warps and stages of loads."""

    rows: int
    out: int
    columns: int
    warps: int
    stages: int


# Timed on an H200 with tools/tune_kernels.py.
_FEW_ROWS = Tiles(16, 128, 128, 4, 3)
_MANY_ROWS = Tiles(64, 128, 64, 4, 3)
_MOST_ROWS = Tiles(128, 256, 64, 8, 4)
# Chosen by registers, spills and shared memory as compiled for sm_90a.
_WIDE = Tiles(16, 32, 32, 4, 2)
_FEW_CODES = Tiles(16, 64, 64, 4, 3)
_MANY_CODES = Tiles(64, 64, 64, 4, 3)
ANY_ROWS, ANY_CODES = _MANY_ROWS, _MANY_CODES
"""The tiles in bfloat16 of a product in one order of sums: the same for any number of pairs."""

MANY, MOST = 16, 128
"""The pairs for each expert, if all had as many, above which blocks of rows are larger."""

MOST_BYTES = 192 * 1024
"""Shared memory of the largest blocks."""


@Kernel
def _grouped_floats_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_x_row: int,
    per_row: int,
    num_experts: int,
    in_dim: int,
    out_dim: int,
    HAS_BIAS: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some pairs of one expert, some of its outputs."""
    offs_expert = tl.arange(0, EXPERTS)
    is_expert = offs_expert < num_experts
    # Blocks of rows lie expert by expert; this program's lies behind those of all earlier ones.
    begins = tl.load(starts_ptr + offs_expert, mask=is_expert, other=0)
    ends = tl.load(starts_ptr + offs_expert + 1, mask=is_expert, other=0)
    blocks = (ends - begins + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(blocks, axis=0) <= tl.program_id(0)).to(tl.int64), axis=0)
    if expert < num_experts:
        before = tl.sum(tl.where(offs_expert < expert, blocks, 0), axis=0)
        first = tl.load(starts_ptr + expert) + (tl.program_id(0) - before) * ROWS
        sorted_at = first + tl.arange(0, ROWS)
        is_pair = sorted_at < tl.load(starts_ptr + expert + 1)
        pairs = tl.load(order_ptr + sorted_at, mask=is_pair, other=0).to(tl.int64)

        offs_out = tl.program_id(1) * OUT + tl.arange(0, OUT)
        offs_column = tl.arange(0, COLUMNS)
        is_out = offs_out < out_dim
        x_at = x_ptr + (pairs // per_row)[:, None] * stride_x_row + offs_column[None, :]
        weight_at = weight_ptr + (expert * out_dim + offs_out)[None, :] * in_dim
        weight_at += offs_column[:, None]
        y = tl.zeros([ROWS, OUT], WIDE)
        for start in range(0, in_dim, COLUMNS):
            is_column = offs_column < in_dim - start
            x = tl.load(x_at + start, mask=is_pair[:, None] & is_column[None, :], other=0.0)
            weight = tl.load(
                weight_at + start, mask=is_column[:, None] & is_out[None, :], other=0.0
            )
            y += tl.dot(x.to(NARROW), weight.to(NARROW), input_precision="ieee", out_dtype=WIDE)
        if HAS_BIAS:
            bias_at = bias_ptr + expert * out_dim + offs_out
            y += tl.load(bias_at, mask=is_out, other=0.0).to(WIDE)[None, :]
        y_at = y_ptr + pairs[:, None] * out_dim + offs_out[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_pair[:, None] & is_out[None, :])


@Kernel
def _grouped_codes_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_x_row: int,
    per_row: int,
    num_experts: int,
    in_dim: int,
    out_dim: int,
    num_groups: int,
    group_len: int,
    HAS_BIAS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    MEANING: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """As for floats; a tile of codes becomes numbers in registers. With IS_EVEN a step over the
    columns stays within one group."""
    offs_expert = tl.arange(0, EXPERTS)
    is_expert = offs_expert < num_experts
    # Blocks of rows lie expert by expert; this program's lies behind those of all earlier ones.
    begins = tl.load(starts_ptr + offs_expert, mask=is_expert, other=0)
    ends = tl.load(starts_ptr + offs_expert + 1, mask=is_expert, other=0)
    blocks = (ends - begins + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(blocks, axis=0) <= tl.program_id(0)).to(tl.int64), axis=0)
    if expert < num_experts:
        before = tl.sum(tl.where(offs_expert < expert, blocks, 0), axis=0)
        first = tl.load(starts_ptr + expert) + (tl.program_id(0) - before) * ROWS
        sorted_at = first + tl.arange(0, ROWS)
        is_pair = sorted_at < tl.load(starts_ptr + expert + 1)
        pairs = tl.load(order_ptr + sorted_at, mask=is_pair, other=0).to(tl.int64)

        offs_out = tl.program_id(1) * OUT + tl.arange(0, OUT)
        offs_column = tl.arange(0, COLUMNS)
        is_out = offs_out < out_dim
        rows = expert * out_dim + offs_out
        x_at = x_ptr + (pairs // per_row)[:, None] * stride_x_row + offs_column[None, :]
        y = tl.zeros([ROWS, OUT], WIDE)
        for start in range(0, in_dim, COLUMNS):
            is_column = offs_column < in_dim - start
            mask = is_out[:, None] & is_column[None, :]
            x = tl.load(x_at + start, mask=is_pair[:, None] & is_column[None, :], other=0.0)
            if MEANING == 0 or MEANING == 3:
                codes_at = codes_ptr + rows[:, None] * in_dim + (start + offs_column)[None, :]
                value = tl.load(codes_at, mask=mask, other=0)
                if MEANING == 3:
                    # E4M3: four bits of power, three of mantissa; without a power, eighths.
                    size = value.to(tl.int32) & 127
                    bits = ((size + (120 << 3)) << 20).to(tl.float32, bitcast=True)
                    small = size.to(tl.float32) * 0.001953125
                    number = tl.where(size < 8, small, bits)
                    value = tl.where(value < 128, number, -number)
                value = value.to(WIDE)
            else:
                # A byte is read once, and its two numbers are put side by side.
                offs_byte = start // 2 + tl.arange(0, COLUMNS // 2)
                bytes_at = codes_ptr + rows[:, None] * (in_dim // 2) + offs_byte[None, :]
                in_row = is_out[:, None] & (offs_byte < in_dim // 2)[None, :]
                byte = tl.load(bytes_at, mask=in_row, other=0).to(tl.int32)
                code = tl.interleave(byte & 15, byte >> 4)
                if MEANING == 1:
                    value = (code - 8).to(WIDE)
                else:
                    # E2M1: power and mantissa are the head of a float32's bits, whose powers begin
                    # 126 later. Without a power the number is 0 or a half.
                    size = code & 7
                    bits = tl.where(size < 2, size * (126 << 23), (size + (126 << 1)) << 22)
                    value = (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True).to(WIDE)
            if IS_EVEN:
                group_at = (rows * num_groups + start // group_len)[:, None]
                in_group = is_out[:, None]
            else:
                column_at = groups_ptr + expert * in_dim + start + offs_column
                group = tl.load(column_at, mask=is_column, other=0)
                group_at = rows[:, None] * num_groups + group[None, :]
                in_group = mask
            if HAS_ZEROS:
                value -= tl.load(zeros_ptr + group_at, mask=in_group, other=0).to(WIDE)
            scale = tl.load(scales_ptr + group_at, mask=in_group, other=0)
            if scales_ptr.dtype.element_ty == tl.uint8:
                # A power of two by its exponent (E8M0), the least of which is subnormal.
                bits = scale.to(tl.int32)
                bits = tl.where(bits == 0, 1 << 22, bits << 23)
                scale = bits.to(tl.float32, bitcast=True)
            # Rounded as a weight of the model's dtype would be.
            value = (value * scale.to(WIDE)).to(x_ptr.dtype.element_ty).to(NARROW)
            value = tl.where(mask, value, 0.0)
            y += tl.dot(x.to(NARROW), tl.trans(value), input_precision="ieee", out_dtype=WIDE)
        if HAS_BIAS:
            bias_at = bias_ptr + expert * out_dim + offs_out
            y += tl.load(bias_at, mask=is_out, other=0.0).to(WIDE)[None, :]
        y_at = y_ptr + pairs[:, None] * out_dim + offs_out[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_pair[:, None] & is_out[None, :])


def grouped_floats_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    tiles: Tiles | None = None,
) -> Tensor:
    """Tiles are as large as the number of pairs suggests, unless `tiles` says which."""
    num_experts, out_dim, in_dim = weight.shape
    assert weight.is_contiguous(), weight.stride()
    assert x.stride(1) == 1, x.stride()
    tiles = tiles or _tiles_of(x, len(order), num_experts)
    y = torch.empty(len(order), out_dim, dtype=x.dtype, device=x.device)
    if len(order):
        _grouped_floats_kernel[_grid(tiles, len(order), num_experts, out_dim)](
            x, weight, y if bias is None else bias.contiguous(), order, starts, y,
            x.stride(0), len(order) // len(x), num_experts, in_dim, out_dim,
            HAS_BIAS=bias is not None, NARROW=product_type(x), WIDE=wide_type(x.dtype),
            EXPERTS=next_power_of_two(num_experts), ROWS=tiles.rows, OUT=tiles.out,
            COLUMNS=tiles.columns, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return y


def _tiles_of(x: Tensor, num_pairs: int, num_experts: int) -> Tiles:
    """The counts of single experts are not known here, only how many pairs all have."""
    if x.dtype != torch.bfloat16:
        return _WIDE
    if num_pairs <= MANY * num_experts:
        return _FEW_ROWS
    has_room = shared_bytes(x.device) >= MOST_BYTES
    return _MOST_ROWS if has_room and num_pairs > MOST * num_experts else _MANY_ROWS


def _code_tiles_of(x: Tensor, num_pairs: int, num_experts: int) -> Tiles:
    if x.dtype != torch.bfloat16:
        return _WIDE
    return _MANY_CODES if num_pairs > MANY * num_experts else _FEW_CODES


def tiles_of_any(x: Tensor, bfloat16: Tiles) -> Tiles:
    """The tiles of a product in one order: `bfloat16` in that dtype."""
    return bfloat16 if x.dtype == torch.bfloat16 else _WIDE


def grouped_codes_triton(
    x: Tensor,
    coded: tuple[Tensor, int],
    scaled: tuple[Tensor, Tensor | None, Tensor, int],
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    tiles: Tiles | None = None,
) -> Tensor:
    """`coded` is codes and their meaning, `scaled` scales, zeros, groups and group_len; `tiles` as
    for floats."""
    (codes, meaning), (scales, zeros, groups, group_len) = coded, scaled
    (num_experts, out_dim), in_dim = codes.shape[:2], groups.shape[1]
    assert all(part.is_contiguous() for part in (codes, scales, groups))
    assert zeros is None or zeros.is_contiguous()
    assert meaning in (INT8, FP8) or in_dim % 2 == 0, "a byte holds two codes of one row"
    assert x.stride(1) == 1, x.stride()
    tiles = tiles or _code_tiles_of(x, len(order), num_experts)
    # A step over the columns never leaves a group, unless it reads each column's.
    if 16 <= group_len < tiles.columns:
        tiles = tiles._replace(columns=32 if group_len % 32 == 0 else 16)
    is_even = group_len >= in_dim or (group_len > 0 and group_len % tiles.columns == 0)
    if meaning == FP8:
        codes = codes.view(torch.uint8)
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    y = torch.empty(len(order), out_dim, dtype=x.dtype, device=x.device)
    if len(order):
        _grouped_codes_kernel[_grid(tiles, len(order), num_experts, out_dim)](
            x, codes, scales, scales if zeros is None else zeros, groups,
            y if bias is None else bias.contiguous(), order, starts, y,
            x.stride(0), len(order) // len(x), num_experts, in_dim, out_dim,
            scales.shape[2], max(1, group_len),
            HAS_BIAS=bias is not None, HAS_ZEROS=zeros is not None, IS_EVEN=is_even,
            MEANING=meaning, NARROW=product_type(x), WIDE=wide_type(x.dtype),
            EXPERTS=next_power_of_two(num_experts), ROWS=tiles.rows, OUT=tiles.out,
            COLUMNS=tiles.columns, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return y


def product_type(x: Tensor) -> object:
    """The operands' type: float64 stays float64, everything else is `dot_type`'s."""
    return tl.float64 if x.dtype == torch.float64 else dot_type(x)


def _grid(tiles: Tiles, pairs: int, num_experts: int, out_dim: int) -> tuple[int, int]:
    """Blocks of rows, as many as any choice of experts needs, by blocks of outputs."""
    partial = min(pairs, num_experts)
    return (pairs - partial) // tiles.rows + partial, cdiv(out_dim, tiles.out)
