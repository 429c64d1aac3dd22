"""Index scores on the CPU, in one order of sums for chunks and for single tokens.

Formulas and names are those of `sparse_index`. A token's heads lie side by side, 32 of them pass
four keys at a time: a head's product with a key is added channel after channel, and the heads of a
score, weighted, every 16th to one of 16 sums, which are joined in pairs. So a score's bits follow
from the token's query and weights and from the key, and a chunk chooses what its tokens alone do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.cpu._compiled import STRICT, Loop, as_flat, part, prange, wide
from ferryman_kernels.cpu._vectors import LANES, fused, greater, load, spread, total

BLOCK = 2 * LANES
"""Heads that pass a key at once."""


@part
def _widen_keys(
    keys: Any, pages: Any, stride_page: int, page_size: int, step: int, first: int, last: int,
    laid: Any,
) -> None:  # fmt: skip
    """Lays four keys from key `first` on; those behind `last` are the last one again."""
    for key in range(4):
        position, dim = (min(first + key, last) + 1) * step - 1, laid.shape[1]
        at = pages[position // page_size] * stride_page + position % page_size * dim
        row, out = keys[at : at + dim], laid[key]
        for channel in range(dim):
            out[channel] = wide(row[channel])


@part
def _score_four(heads: Any, weights: Any, laid: Any, line: Any, first: int) -> None:
    """line[first : first + 4] ← the scores of the four keys; `heads` [blocks, dim, 32] are the
    token's queries, `weights` [blocks · 32]."""
    zero = spread(heads.dtype.type(0))
    s0 = s1 = s2 = s3 = zero
    for block in range(heads.shape[0]):
        queries = heads[block].reshape(heads.shape[1] * BLOCK)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
        for channel in range(heads.shape[1]):
            a, b = load(queries, channel * BLOCK), load(queries, channel * BLOCK + LANES)
            key = spread(laid[0, channel])
            a0, b0 = fused(a, key, a0), fused(b, key, b0)
            key = spread(laid[1, channel])
            a1, b1 = fused(a, key, a1), fused(b, key, b1)
            key = spread(laid[2, channel])
            a2, b2 = fused(a, key, a2), fused(b, key, b2)
            key = spread(laid[3, channel])
            a3, b3 = fused(a, key, a3), fused(b, key, b3)
        a, b = load(weights, block * BLOCK), load(weights, block * BLOCK + LANES)
        s0 = fused(greater(b0, zero), b, fused(greater(a0, zero), a, s0))
        s1 = fused(greater(b1, zero), b, fused(greater(a1, zero), a, s1))
        s2 = fused(greater(b2, zero), b, fused(greater(a2, zero), a, s2))
        s3 = fused(greater(b3, zero), b, fused(greater(a3, zero), a, s3))
    scores = total(s0), total(s1), total(s2), total(s3)
    for key in range(min(4, len(line) - first)):
        line[first + key] = scores[key]


def _score(
    q: Any, weights: Any, keys: Any, stride_page: int, page_size: int, page_table: Any, rows: Any,
    positions: Any, step: int, scores: Any,
) -> None:  # fmt: skip
    """`q` [tokens, index_heads, index_dim], `weights` [tokens, index_heads], in the wide dtype."""
    tokens, count, dim = q.shape
    blocks = (count + BLOCK - 1) // BLOCK
    for token in prange(tokens):
        heads, shares = np.zeros((blocks, dim, BLOCK), q.dtype), np.zeros(blocks * BLOCK, q.dtype)
        for head in range(count):
            shares[head] = weights[token, head]
            for channel in range(dim):
                heads[head // BLOCK, channel, head % BLOCK] = q[token, head, channel]
        pages, line, laid = page_table[rows[token]], scores[token], np.empty((4, dim), q.dtype)
        last = positions[token]
        for first in range(0, last + 1, 4):
            _widen_keys(keys, pages, stride_page, page_size, step, first, last, laid)
            _score_four(heads, shares, laid, line[: last + 1], first)
        line[last + 1 :] = -np.inf


_score_loop = Loop(_score, STRICT)


def index_scores_compiled(
    q: Tensor,
    weights: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    step: int = 1,
) -> Tensor:
    """Scores [tokens, up to the last key of all], -inf for those that a token does not see."""
    assert index_pages[0].is_contiguous(), index_pages.stride()
    dtype, reach = wide_dtype(q.dtype), int(positions.max()) + 1
    scores = torch.empty(len(q), reach, dtype=dtype)
    _score_loop(
        q[0].numel() * len(q) * reach,
        q.to(dtype).contiguous().numpy(), weights.to(dtype).contiguous().numpy(),
        as_flat(index_pages), index_pages.stride(0), index_pages.shape[1], page_table.numpy(),
        rows.numpy(), positions.numpy(), step, scores.numpy(),
    )  # fmt: skip
    return scores
