"""Causal attention over keys and values in pages (grouped query heads).

    keys of a request = its pages in order, at positions 0, 1, 2, …
    out[position]     = softmax(scale · q·keysᵀ)·values over keys 0 … position
                        (window layers: over the last `window_len` of them, itself included)
    with sinks:           softmax over those scores and sink[head], a score without a value
                          (gpt-oss; Xiao et al. 2023 keep real tokens for it)
    with a cap:           score = cap · tanh(score / cap) before the softmax (Gemma 2); sinks are
                          not capped

Softmax is computed in float32 (float64 for float64). On a CPU the compiled loops of prefill and of
decode have one order of sums: the bits of a query's answer depend on its own numbers, its position
and what it sees, and on nothing else. Keys that no query sees are not read: their
pages may be gone (-1 in the table), or may have another owner by now.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.attention._block_attention_compiled import (
    paged_attention_prefill_compiled,
)
from ferryman_kernels.attention._paged_attention_compiled import paged_attention_decode_compiled
from ferryman_kernels.attention._paged_attention_triton import (
    paged_attention_decode_triton,
    paged_attention_prefill_triton,
)
from ferryman_kernels.attention.page_layout import PageScales
from ferryman_kernels.attention.splits._split_attention_triton import (
    split_decode_triton,
    split_prefill_triton,
)
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.ragged import Span, Spans, check_rows, on_host

QUERY_BLOCK = 256
"""Queries whose scores the reference has in memory at once."""


def paged_attention_reference(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    spans: Sequence[Span],
    scale: float,
    window_len: int,
    sinks: Tensor | None = None,
    score_cap: float = 0.0,
) -> Tensor:
    """The formula, one request after the other, in blocks of queries that share a mask."""
    out, first = torch.empty_like(q), 0
    for pages, (start, end) in zip(page_table, spans, strict=True):
        for low in range(start, end, QUERY_BLOCK):
            high = min(low + QUERY_BLOCK, end)
            rows = slice(first + low - start, first + high - start)
            out[rows] = _attend(
                q[rows], key_pages, value_pages, pages, (low, high), scale, window_len, sinks,
                score_cap,
            )  # fmt: skip
        first += end - start
    return out


def _attend(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    span: Span,
    scale: float,
    window_len: int,
    sinks: Tensor | None,
    score_cap: float,
) -> Tensor:
    wide, (start, end) = wide_dtype(q.dtype), span
    group = q.shape[1] // key_pages.shape[1]
    seen = torch.arange(_first_key(start, window_len), end, device=q.device)
    keys = _gather_rows(key_pages, pages, seen).to(wide).repeat_interleave(group, 1)
    values = _gather_rows(value_pages, pages, seen).to(wide).repeat_interleave(group, 1)
    scores = _capped(torch.einsum("qhd,khd->hqk", q.to(wide), keys) * scale, score_cap)
    hidden = _is_hidden(torch.arange(start, end, device=q.device), seen, window_len)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.to(wide)[:, None, None].expand(-1, end - start, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : len(seen)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def _capped(scores: Tensor, score_cap: float) -> Tensor:
    return (scores / score_cap).tanh() * score_cap if score_cap else scores


def _gather_rows(pages: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rows [positions, kv_heads, head_dim] of the pages that `table` [pages] names."""
    page_size = pages.shape[2]
    return pages[table[positions // page_size], :, positions % page_size]


def _is_hidden(positions: Tensor, keys: Tensor, window_len: int) -> Tensor:
    """True for keys that a query must not see: bool [positions, keys]."""
    ahead = keys > positions[:, None]
    return ahead | (keys <= positions[:, None] - window_len) if window_len else ahead


def _first_key(position: int, window_len: int) -> int:
    """The first key that the query at `position` sees."""
    return max(0, position - window_len + 1) if window_len else 0


def paged_attention_decode(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    scale: float,
    window_len: int = 0,
    sinks: Tensor | None = None,
    score_cap: float = 0.0,
    scales: PageScales | None = None,
) -> Tensor:
    """Queries at any positions, `q` [tokens, q_heads, head_dim], each with a row of the table.

    The pages are strided views [slots, kv_heads, page_size, head_dim]; `page_table` [tokens, pages]
    must name every page that a query sees; `positions` [tokens]. Several tokens may belong to one
    request if the keys of all are already written: each sees those up to its own position. `sinks`
    [q_heads] are in the dtype of the softmax. A `score_cap` of 0 is none. A query at a negative
    position, which pads a batch, sees nothing and gets zeros. With `scales` the pages are e4m3
    codes, which a card's kernels open as they read (`reads_codes`).
    """
    _check_pages(q, key_pages, value_pages, scales)
    _check_sinks(q, sinks)
    _check_tokens(q, page_table, positions)
    if q.is_cuda and q.dtype != torch.float64:
        given = (q, key_pages, value_pages, page_table, positions, scale, window_len, sinks)
        return paged_attention_decode_triton(*given, score_cap, scales)
    if serves(q):
        return paged_attention_decode_compiled(
            q, key_pages, value_pages, page_table, positions, scale, window_len, sinks, score_cap
        )
    if int(positions.min()) < 0:
        real = (positions >= 0).nonzero()[:, 0]
        out, seen = torch.zeros_like(q), (scale, window_len, sinks, score_cap)
        if len(real):
            asked = (q[real], key_pages, value_pages, page_table[real], positions[real])
            out[real] = paged_attention_decode(*asked, *seen)
        return out
    spans = [(position, position + 1) for position in positions.tolist()]
    return paged_attention_reference(
        q, key_pages, value_pages, page_table, spans, scale, window_len, sinks, score_cap
    )


def paged_attention_prefill(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    spans: Spans,
    scale: float,
    window_len: int = 0,
    sinks: Tensor | None = None,
    score_cap: float = 0.0,
    scales: PageScales | None = None,
) -> Tensor:
    """Queries of several chunks, flattened: `q` [tokens, q_heads, head_dim].

    Request i's queries are at the absolute positions spans[i]; keys and values up to its end are
    already written to the pages in page_table[i]. `sinks`, `score_cap` and `scales` as in decode.
    """
    _check_pages(q, key_pages, value_pages, scales)
    _check_sinks(q, sinks)
    check_rows(spans, page_table, len(q))
    seen = scale, window_len, sinks, score_cap
    if q.is_cuda and q.dtype != torch.float64:
        return paged_attention_prefill_triton(
            q, key_pages, value_pages, page_table, spans, *seen, scales
        )
    given = (q, key_pages, value_pages, page_table, on_host(spans), *seen)
    if serves(q) and q.dtype != torch.float64:
        return paged_attention_prefill_compiled(*given)
    return paged_attention_reference(*given)


def paged_decode_by_splits(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    scale: float,
    window_len: int = 0,
    sinks: Tensor | None = None,
    score_cap: float = 0.0,
    scales: PageScales | None = None,
) -> Tensor:
    """`paged_attention_decode`, on a card in the order of sums of `paged_prefill_by_splits`."""
    given = (q, key_pages, value_pages, page_table, positions, scale, window_len, sinks, score_cap)
    if not q.is_cuda or q.dtype == torch.float64:
        return paged_attention_decode(*given, scales)
    _check_pages(q, key_pages, value_pages, scales)
    _check_sinks(q, sinks)
    _check_tokens(q, page_table, positions)
    return split_decode_triton(*given, scales)


def paged_prefill_by_splits(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    spans: Spans,
    scale: float,
    window_len: int = 0,
    sinks: Tensor | None = None,
    score_cap: float = 0.0,
    scales: PageScales | None = None,
) -> Tensor:
    """`paged_attention_prefill`, on a card in one order of sums: a query's bits do not depend on
    its chunk, its neighbours or the table's width."""
    given = (q, key_pages, value_pages, page_table, spans, scale, window_len, sinks, score_cap)
    if not q.is_cuda or q.dtype == torch.float64:
        return paged_attention_prefill(*given, scales)
    _check_pages(q, key_pages, value_pages, scales)
    _check_sinks(q, sinks)
    check_rows(spans, page_table, len(q))
    return split_prefill_triton(*given, scales)


def reads_codes(table: Tensor, dtype: torch.dtype) -> bool:
    """Whether attention of queries in `dtype` reads pages of codes as they are: a card's kernels in
    bfloat16 do. In float32, whose tiles fill the registers, opening them spilled 300 B and more."""
    return table.is_cuda and dtype == torch.bfloat16


def _check_tokens(q: Tensor, page_table: Tensor, positions: Tensor) -> None:
    assert page_table.shape[0] == positions.shape[0] == q.shape[0], (page_table.shape, q.shape)


def _check_pages(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, scales: PageScales | None
) -> None:
    _, kv_heads, page_size, head_dim = key_pages.shape
    assert value_pages.shape == key_pages.shape, (key_pages.shape, value_pages.shape)
    assert q.ndim == 3, q.shape
    assert q.shape[2] == head_dim, q.shape
    assert q.shape[1] % kv_heads == 0, q.shape
    assert page_size & (page_size - 1) == 0, page_size
    assert key_pages.dtype == value_pages.dtype, (key_pages.dtype, value_pages.dtype)
    if scales is None:
        assert q.dtype == key_pages.dtype, (q.dtype, key_pages.dtype)
    else:
        assert reads_codes(q, q.dtype), "elsewhere pages are opened before"


def _check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    if sinks is not None:
        assert sinks.shape == (q.shape[1],), (sinks.shape, q.shape)
        assert sinks.dtype == wide_dtype(q.dtype), (sinks.dtype, q.dtype)
        assert sinks.is_contiguous(), sinks.stride()
