"""Index scores in Triton: the heads of one token over a block of its keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import (
    Kernel,
    aligned,
    cdiv,
    dot_type,
    laid_out,
    next_power_of_two,
    tl,
)

BLOCK_KEYS = {torch.bfloat16: 64}
"""Keys at once; float32, which no matrix unit multiplies, has registers for FLOAT32_KEYS."""
FLOAT32_KEYS = 16


@Kernel.for_any("stride_table_row", "reach")
def _index_scores_kernel(
    q_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    index_pages_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    stride_page: int,
    stride_table_row: int,
    reach: int,
    step: int,
    page_size: int,
    heads: int,
    dim: int,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    NARROW: tl.constexpr,
) -> None:
    """Keys that a token does not see get -inf; their pages are not read."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys_at = block * KEYS + tl.arange(0, KEYS)
    position = tl.load(positions_ptr + token).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    seen = (keys_at <= position) & (keys_at < reach)
    offs_head, offs_dim = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    mask_dim = (offs_dim < dim)[None, :]
    q_at = (token * heads + offs_head[:, None]) * dim + offs_dim[None, :]
    mask_head = offs_head < heads
    q = tl.load(q_ptr + q_at, mask=mask_head[:, None] & mask_dim, other=0.0).to(NARROW)
    weights = tl.load(weights_ptr + token * heads + offs_head, mask=mask_head, other=0.0)
    rows_at = (keys_at + 1) * step - 1
    pages_at = page_table_ptr + row * stride_table_row + rows_at // page_size
    pages = tl.load(pages_at, mask=seen, other=0).to(tl.int64)
    at = (pages * stride_page + rows_at % page_size * dim)[:, None] + offs_dim[None, :]
    keys = tl.load(index_pages_ptr + at, mask=seen[:, None] & mask_dim, other=0.0).to(NARROW)
    wanted = tl.maximum(tl.dot(q, tl.trans(keys), input_precision="ieee"), 0.0)
    scores = tl.sum(wanted * weights.to(tl.float32)[:, None], axis=0)
    scores = tl.where(seen, scores, float("-inf"))
    tl.store(scores_ptr + token * reach + keys_at, scores, mask=keys_at < reach)


def index_scores_triton(
    q: Tensor,
    weights: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    step: int = 1,
) -> Tensor:
    """Scores [tokens, every key of the table]: positions are not copied to the host."""
    page_size, dim = index_pages.shape[1:]
    tokens, heads, _ = q.shape
    assert index_pages.stride()[1:] == (dim, 1), index_pages.stride()
    assert page_table.stride(1) == rows.stride(0) == positions.stride(0) == 1, page_table.stride()
    reach = page_table.shape[1] * page_size // step
    scores = torch.empty(tokens, reach, device=q.device)
    block = BLOCK_KEYS.get(q.dtype, FLOAT32_KEYS)
    _index_scores_kernel[tokens, cdiv(reach, block)](
        laid_out(q), laid_out(weights), index_pages, aligned(page_table),
        aligned(rows), aligned(positions), scores,
        index_pages.stride(0), page_table.stride(0), reach, step, page_size, heads, dim,
        BLOCK_HEADS=max(16, next_power_of_two(heads)),
        BLOCK_DIM=max(16, next_power_of_two(dim)), KEYS=block, NARROW=dot_type(q),
    )  # fmt: skip
    return scores
