"""Scores of blocks of index keys in Triton: the heads of one token over one block."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import (
    Kernel,
    aligned,
    dot_type,
    laid_out,
    next_power_of_two,
    tl,
)
from ferryman_kernels.attention._sparse_index_triton import BLOCK_KEYS, FLOAT32_KEYS


@Kernel.for_any("stride_table_row", "reach", "blocks")
def _block_scores_kernel(
    q_ptr: tl.tensor,
    index_pages_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    stride_page: int,
    stride_table_row: int,
    reach: int,
    blocks: int,
    length: int,
    page_size: int,
    heads: int,
    dim: int,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    NARROW: tl.constexpr,
) -> None:
    """A block that a token does not see gets -inf; its pages are not read."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    offs_head, offs_dim = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    mask_head, mask_dim = offs_head < heads, (offs_dim < dim)[None, :]
    q_at = (token * heads + offs_head[:, None]) * dim + offs_dim[None, :]
    q = tl.load(q_ptr + q_at, mask=mask_head[:, None] & mask_dim, other=0.0).to(NARROW)
    best = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    for start in range(0, length, KEYS):
        offs_key = start + tl.arange(0, KEYS)
        keys_at = block * length + offs_key
        seen = (offs_key < length) & (keys_at <= position) & (keys_at < reach)
        pages_at = page_table_ptr + row * stride_table_row + keys_at // page_size
        pages = tl.load(pages_at, mask=seen, other=0).to(tl.int64)
        at = (pages * stride_page + keys_at % page_size * dim)[:, None] + offs_dim[None, :]
        keys = tl.load(index_pages_ptr + at, mask=seen[:, None] & mask_dim, other=0.0).to(NARROW)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        scores = tl.where(seen[None, :], scores, float("-inf"))
        best = tl.maximum(best, tl.max(scores, axis=1))
    tl.store(scores_ptr + (token * heads + offs_head) * blocks + block, best, mask=mask_head)


def block_scores_triton(
    q: Tensor, index_pages: Tensor, page_table: Tensor, rows: Tensor, positions: Tensor, length: int
) -> Tensor:
    """Scores [tokens, index_heads, every block of the table]: positions are not copied to the
    host."""
    page_size, dim = index_pages.shape[1:]
    tokens, heads, _ = q.shape
    assert index_pages.stride()[1:] == (dim, 1), index_pages.stride()
    assert page_table.stride(1) == rows.stride(0) == positions.stride(0) == 1, page_table.stride()
    reach = page_table.shape[1] * page_size
    blocks = -(-reach // length)
    scores = torch.empty(tokens, heads, blocks, device=q.device)
    _block_scores_kernel[tokens, blocks](
        laid_out(q), index_pages, aligned(page_table), aligned(rows), aligned(positions), scores,
        index_pages.stride(0), page_table.stride(0), reach, blocks, length, page_size, heads, dim,
        BLOCK_HEADS=max(16, next_power_of_two(heads)),
        BLOCK_DIM=max(16, next_power_of_two(dim)), KEYS=BLOCK_KEYS.get(q.dtype, FLOAT32_KEYS),
        NARROW=dot_type(q),
    )  # fmt: skip
    return scores
