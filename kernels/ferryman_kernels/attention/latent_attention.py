"""Multi-head latent attention in its absorbed form (DeepSeek-V2): every head reads the same rows.

    row     = (latent, rope), one a token for any number of heads         [latent_dim + rope_dim]
    score   = scale · q·row                        for the rows a token attends to: those up to its
                                                   own, all or the last `window_len`, or chosen ones
    out     = softmax(score)·latent                [tokens, heads, latent_dim]
    with sinks: softmax over those scores and sink[head], a score without a value

The up-projections of keys and values are multiplied into q before and into `out` afterwards.
Softmax is computed in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.attention._block_attention_compiled import (
    Blocks,
    StoredRows,
    attend_blocks,
    blocks_of,
    single_tokens,
)
from ferryman_kernels.attention._latent_attention_triton import (
    latent_attention_triton,
    split_latent_attention_triton,
)
from ferryman_kernels.attention.latent_pages import all_positions, places_of
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.ragged import Span, first_tokens

BLOCK = 1 << 22
"""The number of elements of rows, or of scores, in memory at once."""


def latent_attention_reference(
    q: Tensor,
    pages: Tensor,
    places: Tensor,
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """All tokens at once; a place without a row (-1) reads the token's first row instead.

    A token without places, which pads a batch, gets zeros.
    """
    page_size, wide = pages.shape[1], wide_dtype(q.dtype)
    read = torch.where(places < 0, places[:, :1], places).clamp_min(0)
    rows = pages[read // page_size, read % page_size].to(wide)
    scores = torch.bmm(q.to(wide), rows.transpose(1, 2)).mul_(scale)
    weights = _weights(scores.masked_fill_((places < 0)[:, None], -torch.inf), sinks)
    mixed = torch.bmm(weights, rows[..., :latent_dim])
    return mixed.masked_fill_((places[:, :1] < 0)[:, None], 0.0).to(q.dtype)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [tokens, heads, rows], of which sinks [heads] take a part."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores.dtype)[None, :, None].expand(len(scores), -1, 1)
    return torch.cat((scores, sink), dim=2).softmax(-1)[..., :-1]


def latent_attention(
    q: Tensor,
    pages: Tensor,
    places: Tensor,
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries `q` [tokens, heads, latent_dim + rope_dim], each over the rows at its places.

    `pages` is a strided view [slots, page_size, latent_dim + rope_dim]; `places` [tokens, chosen]
    are those of `places_of` and `choose_decode`, then -1; only a token that pads a batch has none.
    `sinks` [heads] are in the accumulation dtype. Returns [tokens, heads, latent_dim].
    """
    _check(q, pages, latent_dim, sinks)
    assert places.ndim == 2, places.shape
    assert len(places) == len(q), (places.shape, q.shape)
    if q.is_cuda and q.dtype != torch.float64:
        return latent_attention_triton(q, pages, places, latent_dim, scale, sinks)
    if _serves(q):
        return _attend_to_places(q, pages, places, latent_dim, scale, sinks)
    out = torch.empty(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    block = max(1, BLOCK // (places.shape[1] * q.shape[2]))
    for low in range(0, len(q), block):
        tokens = slice(low, low + block)
        out[tokens] = latent_attention_reference(
            q[tokens], pages, places[tokens], latent_dim, scale, sinks
        )
    return out


def latent_attention_prefill(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    spans: Sequence[Span],
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
    window_len: int = 0,
) -> Tensor:
    """Causal attention of several chunks, flattened; q and pages as for `latent_attention`.

    Request i's queries are at the absolute positions spans[i]. Rows up to its end are already
    written to the pages in page_table[i]. On a CPU a row has the bits of its token alone, in
    decode; a card takes one product for each block of queries.
    """
    _check(q, pages, latent_dim, sinks)
    assert page_table.shape[0] == len(spans), (page_table.shape, spans)
    assert sum(end - start for start, end in spans) == len(q), (spans, q.shape)
    if _serves(q):
        sizes = (pages.stride(0), pages.shape[1])
        blocks = blocks_of(tuple(spans), q.shape[1], window_len)
        stored = _rows(pages, sizes, latent_dim)
        return attend_blocks(q, stored, page_table, blocks, scale, window_len, sinks)
    if window_len:
        # Pages before a window may be gone, so each token names what it sees.
        asked = q, pages, page_table, spans, latent_dim, scale, sinks, window_len
        return _by_places(latent_attention, *asked)
    out = torch.empty(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    for table, (start, end), first in zip(page_table, spans, first_tokens(spans), strict=False):
        named = table[: -(-end // pages.shape[1])]
        rows = pages[named].flatten(0, 1).to(wide_dtype(q.dtype))
        block = max(1, BLOCK // (q.shape[1] * end))
        for low in range(start, end, block):
            high = min(low + block, end)
            tokens = slice(first + low - start, first + high - start)
            out[tokens] = _attend_causally(q[tokens], rows[:high], low, latent_dim, scale, sinks)
    return out


def _attend_causally(
    q: Tensor, rows: Tensor, first: int, latent_dim: int, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attention of the queries from position `first` on over `rows` [positions, dim]."""
    tokens, heads, _ = q.shape
    scores = (q.to(rows.dtype).flatten(0, 1) @ rows.T).mul_(scale).view(tokens, heads, -1)
    positions = torch.arange(first, first + tokens, device=q.device)
    ahead = torch.arange(len(rows), device=q.device) > positions[:, None]
    weights = _weights(scores.masked_fill_(ahead[:, None], -torch.inf), sinks)
    mixed = weights.flatten(0, 1) @ rows[:, :latent_dim]
    return mixed.view(tokens, heads, latent_dim)


def latent_attention_decode(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
    window_len: int = 0,
) -> Tensor:
    """One query of each row of `page_table` over its whole past, or a window of it: dense decode.

    On a CPU windows are cut where those of a chunk are, from position 0 on.
    """
    if window_len and _serves(q):
        _check(q, pages, latent_dim, sinks)
        tokens, reach = torch.arange(len(q)), page_table.shape[1] * pages.shape[1]
        spans = torch.stack((tokens, tokens, positions, positions + 1), dim=1)
        blocks = Blocks(spans.numpy(), len(q) * min(window_len, reach))
        rows = _rows(pages, (pages.stride(0), pages.shape[1]), latent_dim)
        return attend_blocks(q, rows, page_table, blocks, scale, window_len, sinks)
    places = _all_places(q, pages, page_table, positions, window_len)
    return latent_attention(q, pages, places, latent_dim, scale, sinks)


def latent_attention_by_splits(
    q: Tensor,
    pages: Tensor,
    places: Tensor,
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """`latent_attention`, on a card in one order of sums for any number of places."""
    if not q.is_cuda or q.dtype == torch.float64:
        return latent_attention(q, pages, places, latent_dim, scale, sinks)
    _check(q, pages, latent_dim, sinks)
    assert places.shape[:1] == q.shape[:1], (places.shape, q.shape)
    return split_latent_attention_triton(q, pages, places, latent_dim, scale, sinks)


def latent_prefill_by_splits(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    spans: Sequence[Span],
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
    window_len: int = 0,
) -> Tensor:
    """`latent_attention_prefill`; on a card each token names the places it sees, as decode
    does."""
    asked = q, pages, page_table, spans, latent_dim, scale, sinks, window_len
    if not q.is_cuda or q.dtype == torch.float64:
        return latent_attention_prefill(*asked)
    return _by_places(latent_attention_by_splits, *asked)


def _by_places(
    attend: Callable[[Tensor, Tensor, Tensor, int, float, Tensor | None], Tensor],
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    spans: Sequence[Span],
    latent_dim: int,
    scale: float,
    sinks: Tensor | None,
    window_len: int,
) -> Tensor:
    """`attend` for each token of several chunks, with the places that it sees."""
    page_size, parts = pages.shape[1], list[Tensor]()
    for row, ((start, end), first) in enumerate(zip(spans, first_tokens(spans), strict=False)):
        table = page_table[row : row + 1, : -(-end // page_size)]
        block = max(1, BLOCK // (min(window_len, end) if window_len else end))
        for low in range(start, end, block):
            high = min(low + block, end)
            rows = torch.zeros(high - low, dtype=torch.int64, device=q.device)
            seen = all_positions(torch.arange(low, high, device=q.device), high, window_len)
            places = places_of(seen, table, rows, page_size)
            asking = q[first + low - start : first + high - start]
            parts.append(attend(asking, pages, places, latent_dim, scale, sinks))
    return torch.cat(parts)


def latent_decode_by_splits(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
    window_len: int = 0,
) -> Tensor:
    """`latent_attention_decode`, over those splits."""
    if not q.is_cuda or q.dtype == torch.float64:
        asked = q, pages, page_table, positions, latent_dim, scale, sinks, window_len
        return latent_attention_decode(*asked)
    places = _all_places(q, pages, page_table, positions, window_len)
    return latent_attention_by_splits(q, pages, places, latent_dim, scale, sinks)


def _all_places(
    q: Tensor, pages: Tensor, page_table: Tensor, positions: Tensor, window_len: int
) -> Tensor:
    """The places of everything up to each position, or of a window of it."""
    rows, page_size = torch.arange(len(q), device=q.device), pages.shape[1]
    seen = all_positions(positions, page_table.shape[1] * page_size, window_len)
    return places_of(seen, page_table, rows, page_size)


def reads_addresses(pages: Tensor) -> bool:
    """Whether attention reads rows at their addresses; elsewhere torch's products take them."""
    return (pages.is_cuda and pages.dtype != torch.float64) or _serves(pages)


def _serves(q: Tensor) -> bool:
    return serves(q) and q.dtype != torch.float64


def _rows(pages: Tensor, sizes: tuple[int, int], latent_dim: int) -> StoredRows:
    """The latents in `pages` as keys and values of one head; `sizes` are from a page to the next
    one, in numbers, and the rows of a page."""
    dim = pages.shape[2]
    assert pages.stride()[1:] == (dim, 1), pages.stride()
    at = pages.data_ptr()
    return StoredRows(at, at, (*sizes, dim), 1, latent_dim)


def _attend_to_places(
    q: Tensor, pages: Tensor, places: Tensor, latent_dim: int, scale: float, sinks: Tensor | None
) -> Tensor:
    """Each token's places are a request of its own, with pages of one row: the table names where a
    row begins. A token's sums follow the order of its places."""
    page_size, dim = pages.shape[1:]
    begins = places // page_size * pages.stride(0) + places % page_size * dim
    blocks = single_tokens((places >= 0).sum(1), places.shape[1])
    return attend_blocks(q, _rows(pages, (1, 1), latent_dim), begins, blocks, scale, 0, sinks)


def _check(q: Tensor, pages: Tensor, latent_dim: int, sinks: Tensor | None) -> None:
    assert q.ndim == pages.ndim == 3, (q.shape, pages.shape)
    assert q.shape[2] == pages.shape[2] >= latent_dim, (q.shape, pages.shape, latent_dim)
    assert q.dtype == pages.dtype, (q.dtype, pages.dtype)
    if sinks is not None:
        assert sinks.shape == (q.shape[1],), (sinks.shape, q.shape)
        assert sinks.dtype == wide_dtype(q.dtype), (sinks.dtype, q.dtype)
        assert sinks.is_contiguous(), sinks.stride()
