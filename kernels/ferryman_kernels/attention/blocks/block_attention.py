"""Attention of each token to the blocks of keys that an index chose for each head of keys.

    keys of (token, kv_head) = the positions of its chosen blocks, in rising order, up to its own
    out                      = softmax(scale · q·keysᵀ)·values       for the queries of that head

This is decode's attention over other pages. A head of a token is a request of its own: its pages
are the parts of a page, of one head of keys, that lie within one block, and its table names where
each begins in memory. So the kernels, and their order of sums, are those of `paged_attention`.
Where a token's blocks are all that it sees, the bits are those of attention without an index.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
from torch import Tensor

ENTRIES = 1 << 22
"""Entries of the tables in memory at once."""


def attend_to_blocks(
    decode: Callable[..., Tensor],
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    named: tuple[Tensor, Tensor, Tensor],
    blocks: Tensor,
    length: int,
    scale: float,
) -> Tensor:
    """Queries `q` [tokens, q_heads, head_dim] over the chosen `blocks` [tokens, kv_heads, count] of
    `length` positions, as `choose_blocks` returns them.

    `pages` are keys and values [slots, kv_heads, page_size, head_dim]; `named` are the page table
    [requests, pages], each token's row of it, and its position. `decode` is
    `paged_attention_decode` or a kernel with its arguments. Returns [tokens, q_heads, head_dim];
    zeros for a token at position -1.
    """
    (keys, values), (page_table, rows, positions) = pages, named
    tokens, kv_heads, count = blocks.shape
    assert kv_heads == keys.shape[1], (blocks.shape, keys.shape)
    unit = gcd(length, keys.shape[2])
    step = gcd(keys.stride(0), unit * keys.shape[3])
    parts = _parts(keys, unit, step), _parts(values, unit, step)
    out = torch.empty_like(q)
    at_once = max(1, ENTRIES * unit // (kv_heads * count * length))
    for low in range(0, tokens, at_once):
        of = slice(low, low + at_once)
        begins = _begins(keys, page_table, rows[of], blocks[of], length, unit) // step
        ends = _ends(blocks[of], positions[of], length)
        asking = q[of].reshape(len(ends), -1, q.shape[2])
        out[of] = decode(asking, *parts, begins, ends - 1, scale, 0).view(-1, *q.shape[1:])
    return out


def _parts(pages: Tensor, unit: int, step: int) -> Tensor:
    """Every place at a multiple of `step` numbers as a page [1 head, unit, head_dim]; they overlap,
    and the table names those that are parts of a page."""
    slots, kv_heads, page_size, dim = pages.shape
    last = (slots - 1) * pages.stride(0) + (kv_heads * page_size - unit) * dim
    return pages.as_strided((last // step + 1, 1, unit, dim), (step, unit * dim, dim, 1))


def _begins(
    keys: Tensor, page_table: Tensor, rows: Tensor, blocks: Tensor, length: int, unit: int
) -> Tensor:
    """The begins of the parts of each chosen block, in numbers from the first key:
    [tokens · kv_heads, parts]. Those that no token sees are anywhere."""
    _, kv_heads, page_size, dim = keys.shape
    first = torch.arange(0, length, unit, device=blocks.device)
    positions = (blocks[..., None] * length + first).flatten(2)
    columns = (positions // page_size).clamp(0, page_table.shape[1] - 1)
    slots = page_table[rows[:, None, None], columns].clamp_min(0).to(torch.int64)
    heads = torch.arange(kv_heads, device=blocks.device)[:, None] * page_size
    offsets = heads + positions.clamp_min(0) % page_size
    return (slots * keys.stride(0) + offsets * dim).flatten(0, 1)


def _ends(blocks: Tensor, positions: Tensor, length: int) -> Tensor:
    """The number of keys of each token and head: all of its blocks but what is behind it in its
    own."""
    chosen = (blocks >= 0).sum(2)
    has_own = blocks.amax(2) == torch.div(positions, length, rounding_mode="floor")[:, None]
    behind = length - 1 - positions % length
    return (chosen * length - has_own * behind[:, None]).where(chosen > 0, 0).flatten()
