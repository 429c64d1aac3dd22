"""The mean of a token's streams, each channel of each opened by a gate of its own (Qwen 4).

    y[t, c] = (1 / streams) · Σ_s sigmoid(gates[t, s, c]) · x[t, s, c]                 [tokens, dim]

Computed in float32 (float64 for float64), summed in the order of the streams, rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, cdiv, laid_out, next_power_of_two, tl, wide_type
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
from ferryman_kernels.elementwise._rms_norm_compiled import SILU_ELEMENTS

BLOCK_DIM = 1024
"""Channels of a token that one program computes."""


def gated_stream_mean_reference(x: Tensor, gates: Tensor) -> Tensor:
    wide = wide_dtype(x.dtype)
    opened = torch.sigmoid(gates.to(wide)) * x.to(wide)
    total = opened[:, 0]
    for stream in range(1, x.shape[1]):
        total = total + opened[:, stream]
    return (total / x.shape[1]).to(x.dtype)


def _mean(
    like: Any, floats: Any, x: int, gates: int, y: int, tokens: int, count: int, dim: int
) -> None:
    number = floats.dtype.type
    for token in prange(tokens):
        first = token * count * dim * like.itemsize
        rows, opens = row_at(x + first, like), row_at(gates + first, like)
        out = row_at(y + token * dim * like.itemsize, like)[:dim]
        total = np.zeros(dim, floats.dtype)
        for stream in range(count):
            row, gate = (
                rows[stream * dim : (stream + 1) * dim],
                opens[stream * dim : (stream + 1) * dim],
            )
            for c in range(dim):
                share = number(1) / (number(1) + exp(-wide(gate[c])))
                total[c] = fused(share, wide(row[c]), total[c])
        for c in range(dim):
            out[c] = narrow(total[c] / number(count), out)


_mean_loop = Loop(_mean, STRICT)


def gated_stream_mean_compiled(x: Tensor, gates: Tensor) -> Tensor:
    (tokens, count, dim), x, gates = x.shape, x.contiguous(), gates.contiguous()
    y = torch.empty(tokens, dim, dtype=x.dtype)
    _mean_loop(
        SILU_ELEMENTS * x.numel(),
        row_like(x.dtype), row_like(wide_dtype(x.dtype)), x.data_ptr(), gates.data_ptr(),
        y.data_ptr(), tokens, count, dim,
    )  # fmt: skip
    return y


@Kernel
def _stream_mean_kernel(
    x_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    y_ptr: tl.tensor,
    dim: int,
    STREAMS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Some channels of one token."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask = offs < dim
    total = tl.zeros([BLOCK_DIM], WIDE)
    for stream in tl.static_range(STREAMS):
        at = (token * STREAMS + stream) * dim + offs
        row = tl.load(x_ptr + at, mask=mask, other=0.0).to(WIDE)
        gate = tl.load(gates_ptr + at, mask=mask, other=0.0).to(WIDE)
        total = tl.fma(1.0 / (1.0 + tl.exp(-gate)), row, total)
    y = (total / STREAMS).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * dim + offs, y, mask=mask)


def gated_stream_mean_triton(x: Tensor, gates: Tensor) -> Tensor:
    (tokens, count, dim), x, gates = x.shape, laid_out(x), laid_out(gates)
    y = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
    block = min(BLOCK_DIM, next_power_of_two(dim))
    _stream_mean_kernel[tokens, cdiv(dim, block)](
        x, gates, y, dim, STREAMS=count, BLOCK_DIM=block, WIDE=wide_type(x.dtype), num_warps=4
    )
    return y


def gated_stream_mean(x: Tensor, gates: Tensor) -> Tensor:
    """The mean [tokens, dim] of x [tokens, streams, dim] by `gates` of its shape and dtype, before
    their sigmoid."""
    assert gates.shape == x.shape, (gates.shape, x.shape)
    assert gates.dtype is x.dtype, (gates.dtype, x.dtype)
    if x.is_cuda:
        return gated_stream_mean_triton(x, gates)
    run = gated_stream_mean_compiled if serves(x, gates) else gated_stream_mean_reference
    return run(x, gates)
