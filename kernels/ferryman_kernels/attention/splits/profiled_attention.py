"""Causal attention over pages whose scores have a term of distance (Inkling).

    score(q, k)   = scale · q·k + profile[distance]      distance = position of q - position of k
    out[position] = softmax(scores)·values over the keys that `paged_attention` sees

Each query has a profile for each of its heads: [tokens, q_heads, extent]. At a distance of `extent`
and more it is zero. A term is added to its score, and to nothing else, so sums have the order of
`paged_attention`: on a CPU one loop computes prompts and single tokens, on a card the one kernel of
`splits`. On a CPU a step's queries are taken in pieces, which bounds their sums over splits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.attention.page_layout import PageScales
from ferryman_kernels.attention.splits._attention_split_compiled import SPLIT
from ferryman_kernels.attention.splits._profiled_attention_compiled import (
    profiled_attention_compiled,
)
from ferryman_kernels.attention.splits._split_attention_triton import (
    split_decode_triton,
    split_prefill_triton,
)
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.ragged import Spans, check_rows

NUMBERS = 1 << 24
"""Sums over splits, and entries of the page table, that a piece of a step's queries has at most on
a CPU, if it has more than one query."""


def profiled_attention_reference(
    q: Tensor,
    profiles: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    scale: float,
    window_len: int,
) -> Tensor:
    """The formula, one query after the other."""
    wide, (_, kv_heads, page_size, _) = wide_dtype(q.dtype), key_pages.shape
    out, group = torch.zeros_like(q), q.shape[1] // kv_heads
    for token, position in enumerate(positions.tolist()):
        first = max(0, position - window_len + 1) if window_len else 0
        seen = torch.arange(first, position + 1, device=q.device)
        if not len(seen):
            continue
        slots = page_table[token][seen // page_size]
        keys, values = (
            pages[slots, :, seen % page_size].to(wide).repeat_interleave(group, 1)
            for pages in (key_pages, value_pages)
        )
        scores = torch.einsum("hd,khd->hk", q[token].to(wide), keys) * scale
        near = position - seen < profiles.shape[2]
        scores[:, near] += profiles[token][:, position - seen[near]].to(wide)
        out[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), values).to(q.dtype)
    return out


def profiled_decode(
    q: Tensor,
    profiles: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    scale: float,
    window_len: int = 0,
    scales: PageScales | None = None,
) -> Tensor:
    """Queries `q` [tokens, q_heads, head_dim] at any positions, each with a row of the table.

    Pages, table and positions are as in `paged_attention_decode`; a query at a negative position
    gets zeros. `profiles` [tokens, q_heads, extent] are in the dtype of q. With `scales` the pages
    are e4m3 codes, on a card.
    """
    _check(q, profiles, key_pages, value_pages)
    assert len(page_table) == len(positions) == len(q), (page_table.shape, q.shape)
    if q.is_cuda and q.dtype != torch.float64:
        seen = page_table, positions, scale, window_len
        return split_decode_triton(
            q, key_pages, value_pages, *seen, scales=scales, profiles=profiles
        )
    pages = key_pages, value_pages
    pieces = _pieces(q, key_pages, page_table, window_len)
    mixed = [
        _attend(q[of], profiles[of], *pages, page_table[of], positions[of], scale, window_len)
        for of in pieces
    ]
    return torch.cat(mixed)


def profiled_prefill(
    q: Tensor,
    profiles: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    spans: Spans,
    rows: Tensor,
    positions: Tensor,
    scale: float,
    window_len: int = 0,
    scales: PageScales | None = None,
) -> Tensor:
    """Queries of several chunks, flattened, as in `paged_attention_prefill`. `rows` [tokens] are
    those of the table that the queries have, at `positions` [tokens]."""
    _check(q, profiles, key_pages, value_pages)
    check_rows(spans, page_table, len(q))
    if q.is_cuda and q.dtype != torch.float64:
        seen = page_table, spans, scale, window_len
        return split_prefill_triton(
            q, key_pages, value_pages, *seen, scales=scales, profiles=profiles
        )
    pages = key_pages, value_pages
    pieces = _pieces(q, key_pages, page_table, window_len)
    mixed = [
        _attend(q[of], profiles[of], *pages, page_table[rows[of]], positions[of], scale, window_len)
        for of in pieces
    ]
    return torch.cat(mixed)


def _attend(q: Tensor, *asked: Any) -> Tensor:
    run = profiled_attention_compiled if serves(q) else profiled_attention_reference
    return run(q, *asked)


def _pieces(q: Tensor, key_pages: Tensor, page_table: Tensor, window_len: int) -> Iterator[slice]:
    """Neighbouring queries, as many as have NUMBERS at once; at least one piece."""
    tokens, q_heads, head_dim = q.shape
    pages = page_table.shape[1]
    reach = pages * key_pages.shape[2]
    # A window may begin and end within a split.
    splits = (min(reach, window_len) if window_len else reach) // SPLIT + 2
    at_once = max(1, NUMBERS // (splits * q_heads * (head_dim + 2) + pages))
    for low in range(0, max(tokens, 1), at_once):
        yield slice(low, low + at_once)


def _check(q: Tensor, profiles: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    assert value_pages.shape == key_pages.shape, (key_pages.shape, value_pages.shape)
    assert q.shape[2] == key_pages.shape[3], (q.shape, key_pages.shape)
    assert q.shape[1] % key_pages.shape[1] == 0, (q.shape, key_pages.shape)
    assert q.dtype == profiles.dtype, (q.dtype, profiles.dtype)
    assert profiles.shape[:2] == q.shape[:2], (profiles.shape, q.shape)
