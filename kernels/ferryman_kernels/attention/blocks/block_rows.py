"""Rows that each stand for a block of tokens, in pages beside those of tokens (DeepSeek-V4).

    the row of block b = page of the block's last token, at offset b mod (page_size / block_len)

A page that is shorter than a block has one row, which only the page of a block's last token uses.
A token at position t sees the blocks that are closed with it, those below (t + 1) / block_len. With
the table of those pages alone a block is found like a token: its number is its position there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ferryman_kernels.attention.latent_pages import all_positions, places_of, write_latents
from ferryman_kernels.attention.sparse_index import best_positions, has_to_choose, index_scores

SCORES = 1 << 22
"""The number of scores in memory at once."""


def rows_of_page(page_size: int, block_len: int) -> int:
    """The rows of blocks that a page of `page_size` tokens has room for."""
    return max(1, page_size // block_len)


class ClosedBlocks(NamedTuple):
    """The blocks that tokens of a step see. `table` [requests, pages] names the pages with a row;
    `rows` [tokens] is each token's row of it, `last` [tokens] the last block that is closed with
    the token or before, -1 for none, and `closing` [tokens] the block that ends with it, or -1.
    No token sees a block from `reach` on."""

    table: Tensor
    rows: Tensor
    last: Tensor
    closing: Tensor
    reach: int

    def places(self, blocks: Tensor, tokens: slice, rows_per_page: int) -> Tensor:
        """The places of the rows of `blocks` [tokens, chosen], some tokens of the step."""
        if not self.table.shape[1]:
            return torch.full_like(blocks, -1)
        return places_of(blocks, self.table, self.rows[tokens], rows_per_page)

    def write(self, pages: Tensor, block_rows: Tensor) -> None:
        """Writes `block_rows` [tokens, dim] of those tokens with which a block closes."""
        if self.table.shape[1]:
            write_latents(pages, block_rows, self.table, self.rows, self.closing)


def closed_blocks(
    page_table: Tensor, rows: Tensor, positions: Tensor, page_size: int, block_len: int
) -> ClosedBlocks:
    """The blocks of tokens at `positions` [tokens], whose pages `page_table` [requests, pages]
    names; `rows` [tokens] is each token's row of it. One of page_size and block_len divides the
    other."""
    assert max(page_size, block_len) % min(page_size, block_len) == 0, (page_size, block_len)
    pages_a_block = max(1, block_len // page_size)
    table = page_table
    if pages_a_block > 1:
        ends = page_table[:, pages_a_block - 1 :: pages_a_block]
        # A table of one column counts as contiguous with any stride; kernels ask for a stride of 1.
        table = ends.clone(memory_format=torch.contiguous_format)
    after = positions + 1
    last = torch.div(after, block_len, rounding_mode="floor") - 1
    closing = torch.where(after % block_len == 0, last, -1)
    reach = table.shape[1] * rows_of_page(page_size, block_len)
    if not positions.is_cuda:
        # Memory for what is seen alone. A card's launches follow from the table.
        reach = min(reach, int(last.max()) + 1)
    return ClosedBlocks(table, rows, last, closing, reach)


def choose_block_rows(
    q: Tensor, weights: Tensor, index_pages: Tensor, closed: ClosedBlocks, tokens: slice, count: int
) -> Tensor:
    """The `count` best blocks that each of some tokens sees, rising, then -1: [tokens, at most
    `count`].

    `q` [tokens, index_heads, index_dim] and `weights` [tokens, index_heads] are those of all tokens
    of the step. Scores are those of `sparse_index`, in its order of sums; a tie goes to the lower
    block. It computes none where all blocks are chosen.
    """
    last, rows = closed.last[tokens], closed.rows[tokens]
    if not has_to_choose(closed.reach, count):
        return all_positions(last, closed.reach)
    chosen = torch.full((len(last), count), -1, device=last.device)
    q, weights, at_once = q[tokens], weights[tokens], max(1, SCORES // closed.reach)
    for low in range(0, len(last), at_once):
        some = slice(low, low + at_once)
        asked = q[some], weights[some], index_pages, closed.table, rows[some], last[some]
        best = best_positions(index_scores(*asked), count)
        chosen[some, : best.shape[1]] = best
    return chosen
