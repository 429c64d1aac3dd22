"""Hyper-connections: a part of a layer reads one row from several streams, and writes to each.

    root         = 1 / sqrt(mean of all numbers of a token's streams, squared, + norm_eps)
    gates        = factors · sigmoid(root · mixes · scales + base) + eps         [tokens, gates]
    x            = Σ_s gates[s] · streams[s]                                     [tokens, dim]
    expanded[s]  = streams[s] + gates[s] · y                            [tokens, streams, dim]

The first gates, one for each stream, read; those that write come after them. `mixes` is a product
of the token's streams, and of the accumulation dtype, as gates are.
Zhu et al. 2024; without the mixing of streams, as in HY V4.
Sums are in float32 (float64 for float64), in the order of the streams, and rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, laid_out, next_power_of_two, tl, wide_type
from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    exp,
    narrow,
    prange,
    row_like,
    serves,
    wide,
)
from ferryman_kernels.cpu._vectors import fused, row_at
from ferryman_kernels.elementwise._rms_norm_compiled import sum_of_squares


class GateNumbers(NamedTuple):
    """Numbers of each gate, [gates] in the accumulation dtype, and the two epsilons."""

    scales: Tensor
    base: Tensor
    factors: Tensor
    norm_eps: float
    eps: float


def read_streams_reference(
    streams: Tensor, mixes: Tensor, numbers: GateNumbers
) -> tuple[Tensor, Tensor]:
    whole = streams.to(mixes.dtype)
    root = torch.rsqrt(whole.flatten(1).square().mean(-1, keepdim=True) + numbers.norm_eps)
    opened = torch.sigmoid(mixes * root * numbers.scales + numbers.base)
    gates = opened * numbers.factors + numbers.eps
    reading = gates[:, : streams.shape[1], None]
    return (reading * whole).sum(1).to(streams.dtype), gates


def expand_streams_reference(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    added = gates[:, :, None] * y[:, None].to(gates.dtype)
    return (streams.to(gates.dtype) + added).to(streams.dtype)


def _read(
    like: Any, floats: Any, streams: int, mixes: int, scales: int, base: int, factors: int,
    norm_eps: float, eps: float, gates: int, x: int, tokens: int, count: int, num_gates: int,
    dim: int,
) -> None:  # fmt: skip
    number, size = floats.dtype.type, floats.itemsize
    scale, shift = row_at(scales, floats), row_at(base, floats)
    factor, unit = row_at(factors, floats), number(1)
    for token in prange(tokens):
        rows = row_at(streams + token * count * dim * like.itemsize, like)[: count * dim]
        mean = sum_of_squares(rows, number) / number(count * dim)
        root = unit / np.sqrt(mean + number(norm_eps))
        mix = row_at(mixes + token * num_gates * size, floats)[:num_gates]
        gate = row_at(gates + token * num_gates * size, floats)[:num_gates]
        for k in range(num_gates):
            opened = unit / (unit + exp(-(mix[k] * root * scale[k] + shift[k])))
            gate[k] = opened * factor[k] + number(eps)
        out, total = (
            row_at(x + token * dim * like.itemsize, like)[:dim],
            np.zeros(dim, floats.dtype),
        )
        for stream in range(count):
            share, row = gate[stream], rows[stream * dim : (stream + 1) * dim]
            for c in range(dim):
                total[c] = fused(share, wide(row[c]), total[c])
        for c in range(dim):
            out[c] = narrow(total[c], out)


def _expand(
    like: Any, floats: Any, streams: int, y: int, stride_y: int, gates: int, stride_gates: int,
    expanded: int, rows: int, count: int, dim: int,
) -> None:  # fmt: skip
    size = like.itemsize
    for job in prange(rows):
        token, stream = job // count, job % count
        gate = row_at(gates + (token * stride_gates + stream) * floats.itemsize, floats)[0]
        row = row_at(streams + job * dim * size, like)[:dim]
        added = row_at(y + token * stride_y * size, like)[:dim]
        out = row_at(expanded + job * dim * size, like)[:dim]
        for c in range(dim):
            out[c] = narrow(fused(gate, wide(added[c]), wide(row[c])), out)


_read_loop, _expand_loop = Loop(_read, STRICT), Loop(_expand, STRICT)


def read_streams_compiled(
    streams: Tensor, mixes: Tensor, numbers: GateNumbers
) -> tuple[Tensor, Tensor]:
    (tokens, count, dim), streams, mixes = streams.shape, streams.contiguous(), mixes.contiguous()
    x, gates = torch.empty(tokens, dim, dtype=streams.dtype), torch.empty_like(mixes)
    _read_loop(
        2 * streams.numel(),
        row_like(streams.dtype), row_like(mixes.dtype), streams.data_ptr(), mixes.data_ptr(),
        *(of_gate.data_ptr() for of_gate in numbers[:3]), numbers.norm_eps, numbers.eps,
        gates.data_ptr(), x.data_ptr(), tokens, count, mixes.shape[1], dim,
    )  # fmt: skip
    return x, gates


def expand_streams_compiled(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    (tokens, count, dim), streams = streams.shape, streams.contiguous()
    y = y if y.stride(1) == 1 else y.contiguous()
    expanded = torch.empty_like(streams)
    _expand_loop(
        streams.numel(),
        row_like(streams.dtype), row_like(gates.dtype), streams.data_ptr(), y.data_ptr(),
        y.stride(0), gates.data_ptr(), gates.stride(0), expanded.data_ptr(), tokens * count, count,
        dim,
    )  # fmt: skip
    return expanded


@Kernel
def _read_kernel(
    streams_ptr: tl.tensor,
    mixes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    base_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    x_ptr: tl.tensor,
    num_gates: int,
    dim: int,
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK_GATES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    offs, offs_gate = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_GATES)
    mask, mask_gate = offs < dim, offs_gate < num_gates
    rows_at = streams_ptr + token * STREAMS * dim + offs
    squares = tl.zeros([BLOCK_DIM], WIDE)
    for stream in tl.static_range(STREAMS):
        row = tl.load(rows_at + stream * dim, mask=mask, other=0.0).to(WIDE)
        squares = tl.fma(row, row, squares)
    root = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / (STREAMS * dim) + NORM_EPS)
    mix = tl.load(mixes_ptr + token * num_gates + offs_gate, mask=mask_gate, other=0.0)
    scale = tl.load(scales_ptr + offs_gate, mask=mask_gate, other=0.0)
    base = tl.load(base_ptr + offs_gate, mask=mask_gate, other=0.0)
    factor = tl.load(factors_ptr + offs_gate, mask=mask_gate, other=0.0)
    gate = factor / (1.0 + tl.exp(-(mix * root * scale + base))) + EPS
    tl.store(gates_ptr + token * num_gates + offs_gate, gate, mask=mask_gate)
    total = tl.zeros([BLOCK_DIM], WIDE)
    for stream in tl.static_range(STREAMS):
        share = tl.sum(tl.where(offs_gate == stream, gate, 0.0), axis=0)
        row = tl.load(rows_at + stream * dim, mask=mask, other=0.0).to(WIDE)
        total = tl.fma(row, tl.zeros([BLOCK_DIM], WIDE) + share, total)
    tl.store(x_ptr + token * dim + offs, total.to(x_ptr.dtype.element_ty), mask=mask)


@Kernel
def _expand_kernel(
    streams_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    expanded_ptr: tl.tensor,
    stride_y_row: int,
    stride_gates_row: int,
    dim: int,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One stream of one token."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, BLOCK_DIM)
    mask = offs < dim
    at = (token * tl.num_programs(1) + stream) * dim + offs
    gate = tl.load(gates_ptr + token * stride_gates_row + stream)
    added = tl.load(y_ptr + token * stride_y_row + offs, mask=mask, other=0.0).to(WIDE)
    row = tl.load(streams_ptr + at, mask=mask, other=0.0).to(WIDE)
    total = tl.fma(added, tl.zeros([BLOCK_DIM], WIDE) + gate, row)
    tl.store(expanded_ptr + at, total.to(expanded_ptr.dtype.element_ty), mask=mask)


def read_streams_triton(
    streams: Tensor, mixes: Tensor, numbers: GateNumbers
) -> tuple[Tensor, Tensor]:
    (tokens, count, dim), streams, mixes = streams.shape, laid_out(streams), laid_out(mixes)
    x = torch.empty(tokens, dim, dtype=streams.dtype, device=streams.device)
    gates, block = torch.empty_like(mixes), next_power_of_two(dim)
    _read_kernel[tokens,](
        streams, mixes, *numbers[:3], gates, x, mixes.shape[1], dim,
        NORM_EPS=float(numbers.norm_eps), EPS=float(numbers.eps), STREAMS=count,
        BLOCK_GATES=next_power_of_two(mixes.shape[1]), BLOCK_DIM=block,
        WIDE=wide_type(streams.dtype), num_warps=_num_warps(block),
    )  # fmt: skip
    return x, gates


def expand_streams_triton(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    (tokens, count, dim), streams = streams.shape, laid_out(streams)
    assert y.stride(1) == gates.stride(1) == 1, (y.stride(), gates.stride())
    expanded, block = torch.empty_like(streams), next_power_of_two(dim)
    _expand_kernel[tokens, count](
        streams, y, gates, expanded, y.stride(0), gates.stride(0), dim,
        BLOCK_DIM=block, WIDE=wide_type(streams.dtype), num_warps=_num_warps(block),
    )  # fmt: skip
    return expanded


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def read_streams(streams: Tensor, mixes: Tensor, numbers: GateNumbers) -> tuple[Tensor, Tensor]:
    """x [tokens, dim] of the dtype of `streams` [tokens, streams, dim], and all gates
    [tokens, gates]; `mixes` [tokens, gates], at least as many as streams."""
    assert mixes.shape[0] == streams.shape[0], (streams.shape, mixes.shape)
    assert mixes.shape[1] >= streams.shape[1], (streams.shape, mixes.shape)
    assert mixes.dtype is wide_dtype(streams.dtype), (streams.dtype, mixes.dtype)
    for of_gate in numbers[:3]:
        assert of_gate.shape == mixes.shape[1:], (of_gate.shape, mixes.shape)
        assert of_gate.dtype is mixes.dtype, (of_gate.dtype, mixes.dtype)
    if streams.is_cuda:
        return read_streams_triton(streams, mixes, numbers)
    run = read_streams_compiled if serves(streams, mixes) else read_streams_reference
    return run(streams, mixes, numbers)


def expand_streams(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    """New streams [tokens, streams, dim], from `y` [tokens, dim] of their dtype and `gates`
    [tokens, streams], which may be columns of something wider."""
    assert gates.shape == streams.shape[:2], (streams.shape, gates.shape)
    assert y.shape == (len(streams), streams.shape[2]), (streams.shape, y.shape)
    assert y.dtype is streams.dtype, (streams.dtype, y.dtype)
    assert gates.dtype is wide_dtype(streams.dtype), (streams.dtype, gates.dtype)
    if streams.is_cuda:
        return expand_streams_triton(streams, y, gates)
    run = expand_streams_compiled if serves(streams, y, gates) else expand_streams_reference
    return run(streams, y, gates)
