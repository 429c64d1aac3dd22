"""Pages with one row a token: the latents of MLA, the keys of a sparse index.

    write_latents:  page = page_table[row, position // page_size], at offset position % page_size
                    pages[page, offset] ← latents[token]
    places_of:      place = page · page_size + offset

A place is the index of a token's row in all pages; -1 is no place. A negative entry of the page
table is no page: nothing is written there, and its positions have no place. Nor is anything written
for a token at a negative position, which pads a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, next_power_of_two, tl


def write_latents_reference(
    pages: Tensor, latents: Tensor, page_table: Tensor, rows: Tensor, positions: Tensor
) -> None:
    page_size = pages.shape[1]
    found = page_table[rows, positions.clamp_min(0) // page_size]
    named = (found >= 0) & (positions >= 0)
    pages[found[named], (positions % page_size)[named]] = latents[named]


@Kernel
def _write_latents_kernel(
    pages_ptr: tl.tensor,
    latents_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    stride_page: int,
    stride_latents_token: int,
    stride_table_row: int,
    page_size: int,
    dim: int,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Writes the row of one token."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    column = tl.maximum(position, 0) // page_size
    page = tl.load(page_table_ptr + row * stride_table_row + column).to(tl.int64)
    page = tl.where(position >= 0, page, -1)
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask = offs_dim < tl.where(page >= 0, dim, 0)  # a token without a page writes nothing
    latent = tl.load(latents_ptr + token * stride_latents_token + offs_dim, mask=mask)
    at = page * stride_page + position % page_size * dim + offs_dim
    tl.store(pages_ptr + at, latent, mask=mask)


def write_latents_triton(
    pages: Tensor, latents: Tensor, page_table: Tensor, rows: Tensor, positions: Tensor
) -> None:
    _, page_size, dim = pages.shape
    assert pages.stride()[1:] == (dim, 1), pages.stride()
    assert latents.stride(1) == page_table.stride(1) == 1, (latents.stride(), page_table.stride())
    assert rows.stride(0) == positions.stride(0) == 1, (rows.stride(), positions.stride())
    _write_latents_kernel[len(latents),](
        pages, latents, page_table, rows, positions,
        pages.stride(0), latents.stride(0), page_table.stride(0), page_size, dim,
        BLOCK_DIM=next_power_of_two(dim),
    )  # fmt: skip


def write_latents(
    pages: Tensor, latents: Tensor, page_table: Tensor, rows: Tensor, positions: Tensor
) -> None:
    """Writes `latents` [tokens, dim] to the page of each token.

    `pages` is a strided view [slots, page_size, dim] of a slab; `page_table` [requests, pages];
    `rows` [tokens] is each token's row of it, `positions` [tokens] absolute.
    """
    assert pages.ndim == 3, pages.shape
    assert latents.shape == (len(rows), pages.shape[2]), (latents.shape, pages.shape)
    assert latents.dtype == pages.dtype, (latents.dtype, pages.dtype)
    assert page_table.ndim == 2, page_table.shape
    assert rows.shape == positions.shape, (rows.shape, positions.shape)
    write = write_latents_triton if latents.is_cuda else write_latents_reference
    write(pages, latents, page_table, rows, positions)


def places_of(positions: Tensor, page_table: Tensor, rows: Tensor, page_size: int) -> Tensor:
    """The places of `positions` [tokens, chosen], where -1 means none; the same shape.

    `rows` [tokens] is each token's row of `page_table` [requests, pages].
    """
    assert positions.shape[:1] == rows.shape, (positions.shape, rows.shape)
    pages = page_table[rows[:, None], positions.clamp_min(0) // page_size]
    named = (positions >= 0) & (pages >= 0)
    return torch.where(named, pages * page_size + positions % page_size, -1)


def all_positions(positions: Tensor, reach: int, window_len: int = 0) -> Tensor:
    """All positions below `reach` that tokens at `positions` [tokens] see, then -1. With a window
    they are the last `window_len`, a token's own included."""
    keys = torch.arange(min(reach, window_len) if window_len else reach, device=positions.device)
    if window_len:
        keys = (positions - window_len + 1).clamp_min(0)[:, None] + keys
    return torch.where(keys <= positions[:, None], keys, -1)
