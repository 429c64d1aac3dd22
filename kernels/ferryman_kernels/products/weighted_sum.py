"""The sum of a token's experts, each multiplied by its share.

    y[t, c] = Σ_k shares[t, k] · x[t, k, c]                                         [tokens, dim]

Summed in float32 (float64 for float64) in the order of k: a product and its sum are rounded
together, and the last sum to the dtype of x.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, cdiv, laid_out, next_power_of_two, tl, wide_type
from ferryman_kernels.cpu._compiled import STRICT, Loop, narrow, prange, row_like, serves, wide
from ferryman_kernels.cpu._vectors import fused, row_at

BLOCK_DIM = 1024
"""Channels of a token that one program sums."""


def weighted_sum_reference(x: Tensor, shares: Tensor) -> Tensor:
    return torch.bmm(shares[:, None, :], x).squeeze(1)


def _weighted(
    like: Any, floats: Any, x: int, shares: int, y: int, tokens: int, count: int, dim: int
) -> None:
    for token in prange(tokens):
        rows = row_at(x + token * count * dim * like.itemsize, like)[: count * dim]
        own = row_at(shares + token * count * like.itemsize, like)[:count]
        out = row_at(y + token * dim * like.itemsize, like)[:dim]
        total = np.zeros(dim, floats.dtype)
        for k in range(count):
            share, row = wide(own[k]), rows[k * dim : (k + 1) * dim]
            for c in range(dim):
                total[c] = fused(share, wide(row[c]), total[c])
        for c in range(dim):
            out[c] = narrow(total[c], out)


_weighted_loop = Loop(_weighted, STRICT)


def weighted_sum_compiled(x: Tensor, shares: Tensor) -> Tensor:
    (tokens, count, dim), x, shares = x.shape, x.contiguous(), shares.contiguous()
    y = torch.empty(tokens, dim, dtype=x.dtype)
    _weighted_loop(
        tokens * count * dim,
        row_like(x.dtype), row_like(wide_dtype(x.dtype)), x.data_ptr(), shares.data_ptr(),
        y.data_ptr(), tokens, count, dim,
    )  # fmt: skip
    return y


@Kernel
def _weighted_kernel(
    x_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    y_ptr: tl.tensor,
    count: int,
    dim: int,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Some channels of one token."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask = offs < dim
    total = tl.zeros([BLOCK_DIM], WIDE)
    for k in range(count):
        share = tl.load(shares_ptr + token * count + k).to(WIDE)
        row = tl.load(x_ptr + (token * count + k) * dim + offs, mask=mask, other=0.0).to(WIDE)
        total = tl.fma(row, share, total)
    tl.store(y_ptr + token * dim + offs, total.to(y_ptr.dtype.element_ty), mask=mask)


def weighted_sum_triton(x: Tensor, shares: Tensor) -> Tensor:
    (tokens, count, dim), x, shares = x.shape, laid_out(x), laid_out(shares)
    y = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
    block = min(BLOCK_DIM, next_power_of_two(dim))
    _weighted_kernel[tokens, cdiv(dim, block)](
        x, shares, y, count, dim, BLOCK_DIM=block, WIDE=wide_type(x.dtype), num_warps=4
    )
    return y


def weighted_sum(x: Tensor, shares: Tensor) -> Tensor:
    """The sum [tokens, dim] of x [tokens, count, dim] by `shares` [tokens, count] of its dtype."""
    assert shares.shape == x.shape[:2], (shares.shape, x.shape)
    if x.is_cuda:
        return weighted_sum_triton(x, shares)
    if x.dtype is not shares.dtype or not serves(x, shares):
        return weighted_sum_reference(x, shares)
    return weighted_sum_compiled(x, shares)
