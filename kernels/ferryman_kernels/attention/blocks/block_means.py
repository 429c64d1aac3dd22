"""The means of blocks of rows in pages, of one row a token.

    y[t] = (1 / length) · Σ rows at positions ends[t] - length + 1 … ends[t]           [tokens, dim]

Summed in float32 (float64 for float64) in the order of the positions, divided, and rounded once: a
mean's bits follow from the rows, whatever the pages and the other tokens are. A token whose end is
negative gets zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, aligned, next_power_of_two, tl, wide_type
from ferryman_kernels.attention.latent_pages import places_of
from ferryman_kernels.cpu._compiled import STRICT, Loop, narrow, prange, row_like, serves, wide
from ferryman_kernels.cpu._vectors import row_at


def block_means_reference(
    pages: Tensor, page_table: Tensor, rows: Tensor, ends: Tensor, length: int
) -> Tensor:
    page_size, total = pages.shape[1], None
    for ago in range(length - 1, -1, -1):
        at = places_of((ends - ago)[:, None], page_table, rows, page_size)[:, 0].clamp_min(0)
        row = pages[at // page_size, at % page_size].to(wide_dtype(pages.dtype))
        total = row if total is None else total + row
    assert total is not None, length
    means = (total / length).to(pages.dtype)
    return means.masked_fill((ends < 0)[:, None], 0)


def _means(
    like: Any, floats: Any, pages: int, stride_page: int, page_size: int, page_table: Any,
    rows: Any, ends: Any, length: int, y: int, tokens: int, dim: int,
) -> None:  # fmt: skip
    for token in prange(tokens):
        out = row_at(y + token * dim * like.itemsize, like)[:dim]
        total, count = np.zeros(dim, floats.dtype), floats.dtype.type(length)
        if ends[token] >= 0:
            for position in range(ends[token] - length + 1, ends[token] + 1):
                page = page_table[rows[token], position // page_size]
                at = page * stride_page + position % page_size * dim
                row = row_at(pages + at * like.itemsize, like)[:dim]
                for c in range(dim):
                    total[c] += wide(row[c])
        for c in range(dim):
            out[c] = narrow(total[c] / count, out)


_means_loop = Loop(_means, STRICT)


def block_means_compiled(
    pages: Tensor, page_table: Tensor, rows: Tensor, ends: Tensor, length: int
) -> Tensor:
    assert pages[0].is_contiguous(), pages.stride()
    y = torch.empty(len(ends), pages.shape[2], dtype=pages.dtype)
    _means_loop(
        y.numel() * length,
        row_like(pages.dtype), row_like(wide_dtype(pages.dtype)), pages.data_ptr(),
        pages.stride(0), pages.shape[1], page_table.contiguous().numpy(), rows.numpy(),
        ends.numpy(), length, y.data_ptr(), *y.shape,
    )  # fmt: skip
    return y


@Kernel.for_any("stride_table_row")
def _block_means_kernel(
    pages_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_page: int,
    stride_table_row: int,
    length: int,
    page_size: int,
    dim: int,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One token. Without an end it reads nothing."""
    token = tl.program_id(0).to(tl.int64)
    row, end = tl.load(rows_ptr + token).to(tl.int64), tl.load(ends_ptr + token).to(tl.int64)
    offs, total = tl.arange(0, BLOCK_DIM), tl.zeros([BLOCK_DIM], WIDE)
    mask = offs < tl.where(end >= 0, dim, 0)
    first = tl.maximum(end - length + 1, 0)
    for k in range(length):
        position = first + k
        pages_at = page_table_ptr + row * stride_table_row + position // page_size
        page = tl.load(pages_at, mask=end >= 0, other=0).to(tl.int64)
        at = page * stride_page + position % page_size * dim + offs
        total += tl.load(pages_ptr + at, mask=mask, other=0.0).to(WIDE)
    y = (total / length).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * dim + offs, y, mask=offs < dim)


def block_means_triton(
    pages: Tensor, page_table: Tensor, rows: Tensor, ends: Tensor, length: int
) -> Tensor:
    _, page_size, dim = pages.shape
    assert pages.stride()[1:] == (dim, 1), pages.stride()
    assert page_table.stride(1) == rows.stride(0) == ends.stride(0) == 1, page_table.stride()
    y = torch.empty(len(ends), dim, dtype=pages.dtype, device=pages.device)
    _block_means_kernel[len(ends),](
        pages, aligned(page_table), aligned(rows), aligned(ends), y, pages.stride(0),
        page_table.stride(0), length, page_size, dim, BLOCK_DIM=next_power_of_two(dim),
        WIDE=wide_type(pages.dtype), num_warps=1,
    )  # fmt: skip
    return y


def block_means(
    pages: Tensor, page_table: Tensor, rows: Tensor, ends: Tensor, length: int
) -> Tensor:
    """Means [tokens, dim], of the dtype of `pages` [slots, page_size, dim], a strided view.

    `rows` [tokens] is each token's row of `page_table` [requests, pages]; `ends` [tokens] are the
    last positions of the blocks, at least length - 1, or -1.
    """
    assert pages.ndim == 3, pages.shape
    assert rows.shape == ends.shape, (rows.shape, ends.shape)
    if pages.is_cuda:
        return block_means_triton(pages, page_table, rows, ends, length)
    run = block_means_compiled if serves(pages) else block_means_reference
    return run(pages, page_table, rows, ends, length)
