"""The index of Qwen 4: it chooses blocks of keys by one key of each, the mean of its index keys.

    score[block] = Σ_heads weight · relu(q[head]·key[block])      of blocks that end up to the token
    chosen       = the `count` best blocks, and what the token sees of its own if it has not ended

The key of a block is in the row of its last position, so it is the lightning index over every
`length`-th row, in its order of sums (`sparse_index.py`). Block b is the positions b·length …
b·length + length - 1 of a request. An exact tie goes to the lower block in every implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels.attention.sparse_index import SCORE_BLOCK, best_positions, index_scores


def choose_mean_blocks(
    q: Tensor,
    weights: Tensor,
    index_pages: Tensor,
    named: tuple[Tensor, Tensor, Tensor],
    length: int,
    count: int,
) -> Tensor:
    """The blocks that each token attends to, in rising order, then -1.

    `q` [tokens, index_heads, index_dim], `weights` [index_heads]. `named` are the page table
    [requests, pages], each token's row of it, and its position, -1 for a token that pads a batch.
    The keys of blocks are already in `index_pages` [slots, page_size, index_dim]. Returns [tokens,
    at most `count` + 1]. Tokens are taken in pieces of SCORE_BLOCK scores.
    """
    page_table, rows, positions = named
    assert q.ndim == index_pages.ndim == 3, (q.shape, index_pages.shape)
    assert q.shape[2] == index_pages.shape[2], (q.shape, index_pages.shape)
    assert q.dtype == index_pages.dtype, (q.dtype, index_pages.dtype)
    assert weights.shape == q.shape[1:2], (weights.shape, q.shape)
    assert rows.shape == positions.shape == q.shape[:1], (rows.shape, positions.shape, q.shape)
    at_once = SCORE_BLOCK // (q.shape[1] * _num_blocks(page_table, index_pages, length))
    at_once = max(1, at_once)
    shares = weights.expand(q.shape[:2])
    parts = []
    for low in range(0, max(len(q), 1), at_once):
        of = slice(low, low + at_once)
        named = page_table, rows[of], positions[of]
        parts.append(_best_blocks(q[of], shares[of], index_pages, named, length, count))
    return torch.cat(parts)


def _num_blocks(page_table: Tensor, index_pages: Tensor, length: int) -> int:
    """Blocks of a table, and one behind them."""
    return page_table.shape[1] * index_pages.shape[1] // length + 1


def _best_blocks(
    q: Tensor,
    shares: Tensor,
    index_pages: Tensor,
    named: tuple[Tensor, Tensor, Tensor],
    length: int,
    count: int,
) -> Tensor:
    """`choose_mean_blocks` by the scores of all tokens at once."""
    page_table, rows, positions = named
    # The first block that has not ended where the token stands: its own, or the one behind.
    num_ended = torch.div(positions + 1, length, rounding_mode="floor")
    scores = index_scores(q, shares, index_pages, page_table, rows, num_ended - 1, length)
    whole = scores.new_full((len(q), _num_blocks(page_table, index_pages, length)), -torch.inf)
    whole[:, : scores.shape[1]] = scores
    best = best_positions(whole.scatter_(1, num_ended[:, None], torch.inf), count + 1)
    return torch.where(best * length <= positions[:, None], best, -1)
