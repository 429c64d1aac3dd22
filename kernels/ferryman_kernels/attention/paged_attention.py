"""Causal attention over keys and values in pages (grouped query heads).

    keys of a request = its pages in order, at positions 0, 1, 2, …
    out[position]     = softmax(scale · q·keysᵀ)·values over keys 0 … position
                        (window layers: over the last `window_len` of them, itself included)
    with sinks:           softmax over those scores and sink[head], a score without a value
                          (gpt-oss; Xiao et al. 2023 keep real tokens for it)
    with a cap:           score = cap · tanh(score / cap) before the softmax (Gemma 2); sinks are
                          not capped

Softmax is computed in float32 (float64 for float64). Keys that no query sees are not read: their
pages may be gone (-1 in the table), or may have another owner by now.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.attention._paged_attention_compiled import paged_attention_decode_compiled
from ferryman_kernels.attention._paged_attention_triton import (
    paged_attention_decode_triton,
    paged_attention_prefill_triton,
)
from ferryman_kernels.attention.page_layout import PageScales
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.ragged import Span

QUERY_BLOCK = 256
"""Queries that share one mask on the CPU; this bounds the size of the mask."""


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
    """The formula, one request after the other, with one mask for all of its queries."""
    parts = [
        _attend(queries, key_pages, value_pages, pages, span, scale, window_len, sinks, score_cap)
        for queries, pages, span in zip(
            torch.split(q, [end - start for start, end in spans]), page_table, spans, strict=True
        )
    ]
    return torch.cat(parts)


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


def _prefill_cpu(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    spans: Sequence[Span],
    scale: float,
    window_len: int,
    sinks: Tensor | None,
    score_cap: float,
) -> Tensor:
    """Gathers each request's pages once; each block of queries reads only keys up to its end."""
    out, first = torch.empty_like(q), 0
    for index, (start, end) in enumerate(spans):
        skipped = _first_key(start, window_len) // key_pages.shape[2]
        keys = _lay_in_order(key_pages, page_table[index], skipped, end)
        values = _lay_in_order(value_pages, page_table[index], skipped, end)
        base = skipped * key_pages.shape[2]
        for low in range(start, end, QUERY_BLOCK):
            high = min(low + QUERY_BLOCK, end)
            rows = slice(first + low - start, first + high - start)
            lead = _first_key(low, window_len)
            window = slice(lead - base, high - base)
            queries = torch.arange(low, high, device=q.device)
            keys_at = torch.arange(lead, high, device=q.device)
            hidden = _is_hidden(queries, keys_at, window_len)
            out[rows] = _attend_block(
                q[rows], keys[:, window], values[:, window], hidden, scale, sinks, score_cap
            )
        first += end - start
    return out


def _lay_in_order(pages: Tensor, table: Tensor, skipped: int, end: int) -> Tensor:
    """Keys or values of one request [kv_heads, positions, head_dim], from page `skipped` on."""
    page_size = pages.shape[2]
    named = table[skipped : -(-end // page_size)]
    return pages[named].transpose(0, 1).flatten(1, 2)


def _attend_block(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    scale: float,
    sinks: Tensor | None,
    score_cap: float,
) -> Tensor:
    """Attention of one block of queries. The heads of a group share their keys by a stride of 0:
    [kv_heads, group, queries, head_dim].

    A sink scales all of a head's values alike: with Z = Σ exp(score) by Z / (Z + exp(sink)) =
    sigmoid(log Z - sink).
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads = keys.shape[0]
    group = q_heads // kv_heads
    queries = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
    if score_cap or (q.is_cuda and sinks is not None):
        out = _attend_capped(queries, keys, values, hidden, scale, sinks, score_cap)
    elif sinks is None:
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=~hidden, scale=scale)
    else:
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        # The op behind F.scaled_dot_product_attention on a CPU, which also returns log Z.
        out, log_total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        left = torch.sigmoid(log_total - sinks.view(kv_heads, group, 1))
        out = out * left[..., None]
    return out.permute(2, 0, 1, 3).reshape(tokens, q_heads, head_dim)


def _attend_capped(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    scale: float,
    sinks: Tensor | None,
    score_cap: float,
) -> Tensor:
    """torch's own op has no cap, and none for a card returns log Z: so the scores of a block are
    written out, in the wide dtype."""
    wide = wide_dtype(queries.dtype)
    scores = torch.matmul(queries.to(wide), keys.to(wide).transpose(2, 3)).mul_(scale)
    scores = _capped(scores, score_cap).masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.view(*scores.shape[:2], 1, 1).expand(-1, -1, scores.shape[2], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return torch.matmul(weights, values.to(wide)).to(queries.dtype)


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
    assert page_table.shape[0] == positions.shape[0] == q.shape[0], (page_table.shape, q.shape)
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
    return _prefill_cpu(
        q, key_pages, value_pages, page_table, spans, scale, window_len, sinks, score_cap
    )


def paged_attention_prefill(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    spans: Sequence[Span],
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
    assert page_table.shape[0] == len(spans), (page_table.shape, spans)
    assert sum(end - start for start, end in spans) == q.shape[0], (spans, q.shape)
    given = (q, key_pages, value_pages, page_table, spans, scale, window_len, sinks, score_cap)
    if q.is_cuda and q.dtype != torch.float64:
        return paged_attention_prefill_triton(*given, scales)
    return _prefill_cpu(*given)


def reads_codes(table: Tensor, dtype: torch.dtype) -> bool:
    """Whether attention of queries in `dtype` reads pages of codes as they are: a card's kernels in
    bfloat16 do. In float32, whose tiles fill the registers, opening them spilled 300 B and more."""
    return table.is_cuda and dtype == torch.bfloat16


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
