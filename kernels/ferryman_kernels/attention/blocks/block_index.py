"""The index of block-sparse attention (MiniMax M3): it chooses the blocks of keys to attend to.

    score[head, block] = max q[head]·key[position]   over what a token sees of the block
    chosen[head]       = the `count` best blocks; the last `num_local` up to the token's own always

Block b is the positions b·length … b·length + length - 1 of a request, whatever its pages and
chunks are. An exact tie goes to the lower block in every implementation. A greatest number does not
depend on the order of its candidates, and a product q·key has one order of sums, so a token
chooses the same blocks in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.attention.blocks._block_index_compiled import block_scores_compiled
from ferryman_kernels.attention.blocks._block_index_triton import block_scores_triton
from ferryman_kernels.attention.latent_pages import places_of
from ferryman_kernels.attention.sparse_index import SCORE_BLOCK, best_positions
from ferryman_kernels.cpu._compiled import serves


@dataclass(frozen=True, slots=True)
class BlockRule:
    """The positions of a block, the number of blocks that a token attends to, and how many of them
    are the last ones up to its own."""

    length: int
    count: int
    num_local: int


def block_scores_reference(
    q: Tensor, index_pages: Tensor, page_table: Tensor, rows: Tensor, positions: Tensor, length: int
) -> Tensor:
    """Scores [tokens, index_heads, every block of the table], -inf for those that a token does not
    see."""
    page_size, wide = index_pages.shape[1], wide_dtype(q.dtype)
    blocks = -(-page_table.shape[1] * page_size // length)
    keys = torch.arange(blocks * length, device=q.device)
    seen = keys <= positions[:, None]
    places = places_of(torch.where(seen, keys, -1), page_table, rows, page_size).clamp_min(0)
    read = index_pages[places // page_size, places % page_size].to(wide)
    scores = torch.einsum("thd,tkd->thk", q.to(wide), read)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return scores.view(*q.shape[:2], blocks, length).amax(3)


def choose_blocks(
    q: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    rule: BlockRule,
) -> Tensor:
    """The blocks that each token attends to, in rising order, then -1.

    `q` [tokens, index_heads, index_dim]; `rows` [tokens] is each token's row of `page_table`
    [requests, pages], `positions` [tokens] absolute, -1 for a token that pads a batch. Index keys
    up to each position are already written to `index_pages` [slots, page_size, index_dim]. Returns
    [tokens, index_heads, at most `count`]. Tokens are taken in pieces of SCORE_BLOCK scores.
    """
    assert q.ndim == index_pages.ndim == 3, (q.shape, index_pages.shape)
    assert q.shape[2] == index_pages.shape[2], (q.shape, index_pages.shape)
    assert q.dtype == index_pages.dtype, (q.dtype, index_pages.dtype)
    assert rows.shape == positions.shape == q.shape[:1], (rows.shape, positions.shape, q.shape)
    columns = -(-page_table.shape[1] * index_pages.shape[1] // rule.length)
    at_once = max(1, SCORE_BLOCK // (q.shape[1] * columns))
    pieces = [slice(low, low + at_once) for low in range(0, max(len(q), 1), at_once)]
    parts = [
        _best_blocks(q[of], index_pages, page_table, rows[of], positions[of], rule) for of in pieces
    ]
    return torch.cat(parts)


def _best_blocks(
    q: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    rule: BlockRule,
) -> Tensor:
    """`choose_blocks` by the scores of all tokens at once."""
    run = block_scores_reference
    if q.is_cuda and q.dtype != torch.float64:
        run = block_scores_triton
    elif serves(q):
        run = block_scores_compiled
    scores = run(q, index_pages, page_table, rows, positions, rule.length)
    blocks = torch.arange(scores.shape[2], device=q.device)
    ago = torch.div(positions, rule.length, rounding_mode="floor")[:, None] - blocks
    scores = scores.masked_fill(((ago >= 0) & (ago < rule.num_local))[:, None], torch.inf)
    best = best_positions(scores.flatten(0, 1), rule.count)
    return best.view(*q.shape[:2], best.shape[1])
