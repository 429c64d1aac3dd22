"""Scores of blocks of index keys on the CPU, by the products of attention's decode loop.

Formulas and names are those of `block_index`. A job is some whole blocks of one token: the greatest
product of a block does not depend on who finds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.attention.splits._attention_split_compiled import (
    LINE,
    SPLIT,
    keys_in_page,
    score_keys,
)
from ferryman_kernels.cpu._compiled import STRICT, Loop, as_flat, prange

PIECE = 2048
"""Keys of a job, up to the end of a block."""


def _score(
    q: Any, keys: Any, stride_page: int, page_size: int, page_table: Any, rows: Any, positions: Any,
    length: int, piece: int, best: Any,
) -> None:  # fmt: skip
    """`q` [tokens, index_heads, index_dim] in the wide dtype; `best` [tokens, index_heads,
    blocks]; a `piece` is whole blocks."""
    tokens, heads, dim = q.shape
    blocks = best.shape[2]
    pieces = (blocks * length + piece - 1) // piece
    for job in prange(tokens * pieces):
        token, first = job // pieces, job % pieces * piece
        token_best = best[token]
        for head in range(heads):
            for block in range(first // length, min(blocks, (first + piece) // length)):
                token_best[head, block] = -np.inf
        query, scores = q[token].reshape(heads * dim), np.empty(heads * LINE, q.dtype)
        end, position = min(positions[token] + 1, first + piece), first
        while position < end:
            at, count = keys_in_page(
                page_table[rows[token]], position, end, stride_page, page_size, 0, dim
            )
            count = min(count, SPLIT)
            score_keys(query, heads, dim, keys, at, count, scores, 0)
            for head in range(heads):
                for key in range(count):
                    score, block = scores[head * LINE + key], (position + key) // length
                    if score > token_best[head, block]:
                        token_best[head, block] = score
            position += count


_score_loop = Loop(_score, STRICT)


def block_scores_compiled(
    q: Tensor, index_pages: Tensor, page_table: Tensor, rows: Tensor, positions: Tensor, length: int
) -> Tensor:
    """Scores [tokens, index_heads, every block of the table], -inf for those that a token does not
    see."""
    assert index_pages[0].is_contiguous(), index_pages.stride()
    dtype, page_size = wide_dtype(q.dtype), index_pages.shape[1]
    tokens, heads, _ = q.shape
    reach = page_table.shape[1] * page_size
    best = torch.empty(tokens, heads, -(-reach // length), dtype=dtype)
    _score_loop(
        q.numel() * reach,
        q.to(dtype).contiguous().numpy(), as_flat(index_pages), index_pages.stride(0), page_size,
        page_table.contiguous().numpy(), rows.numpy(), positions.numpy(), length,
        -(-PIECE // length) * length, best.numpy(),
    )  # fmt: skip
    return best
