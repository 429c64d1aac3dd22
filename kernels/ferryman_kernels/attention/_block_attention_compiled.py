"""Attention of blocks of queries for the CPU: the queries of a block share each key and value.

Formulas and names are those of `paged_attention`. A row is one head of one query; a job is the rows
of a block that read one head of keys. A split's keys and values are laid in order in float32, and
then pass all rows, four rows at a time, in parts that the nearest cache holds.

A row's sums have the order of decode (`_attention_split_compiled`): it adds the keys that it sees
and no others, so its bits depend neither on the block nor on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.attention._attention_split_compiled import (
    LINE,
    SPLIT,
    join_splits,
    keys_in_page,
    soften,
)
from ferryman_kernels.attention._paged_attention_compiled import no_sinks
from ferryman_kernels.attention._tile_attention_compiled import prefill_loop
from ferryman_kernels.attention._tile_split_compiled import takes_tiles
from ferryman_kernels.attention.page_layout import check_page_layout
from ferryman_kernels.cpu._compiled import STRICT, Loop, compiled, part, prange, row_like, wide
from ferryman_kernels.cpu._lanes import LANES as WIDTH
from ferryman_kernels.cpu._lanes import add_scaled, lanes_at
from ferryman_kernels.cpu._scan_tiles import (
    PRODUCTS_PER_ELEMENT,
    ROWS,
    add_rows,
    padded,
    rows_at,
    store_rows,
)
from ferryman_kernels.cpu._vectors import (
    LANES,
    fused,
    load,
    row_at,
    spread,
    store,
    store_totals,
)
from ferryman_kernels.ragged import Span, first_tokens

BLOCK_ROWS = 64
"""The rows of a block, if a query has no more heads for one of keys."""
PART = 4096
"""The numbers of keys, or of values, that pass all rows before the next ones: 16 KiB."""


@part
def _lay_rows(
    pages: Any, page_table: Any, low: int, high: int, stride_page: int, page_size: int,
    kv_head: int, step: int, laid: Any, size: int, dim: int,
) -> None:  # fmt: skip
    """Widens rows at the positions from `low` to `high` into laid[position % SPLIT · size :]."""
    position = low
    while position < high:
        at, count = keys_in_page(page_table, position, high, stride_page, page_size, kv_head, step)
        for row in range(count):
            source, target = at + row * step, (position + row) % SPLIT * size
            for channel in range(0, dim // LANES * LANES, LANES):
                store(laid, target + channel, load(pages, source + channel))
            for channel in range(dim // LANES * LANES, dim):
                laid[target + channel] = wide(pages[source + channel])
        position += count


@part
def _score_rows(
    queries: Any, at: int, dim: int, keys: Any, first: int, end: int, scores: Any, line: int
) -> None:
    """Scores of the keys from `first` to `end` of a split by the four rows from queries[at] on."""
    whole, last = dim // LANES * LANES, (end - 1) * dim
    for key in range(first, end, 4):
        k0 = key * dim
        k1, k2, k3 = min(k0 + dim, last), min(k0 + 2 * dim, last), min(k0 + 3 * dim, last)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread(np.float32(0))
        c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = spread(np.float32(0))
        for channel in range(0, whole, LANES):
            here = at + channel
            a, b = load(queries, here), load(queries, here + dim)
            c, d = load(queries, here + 2 * dim), load(queries, here + 3 * dim)
            number = load(keys, k0 + channel)
            a0, b0 = fused(a, number, a0), fused(b, number, b0)
            c0, d0 = fused(c, number, c0), fused(d, number, d0)
            number = load(keys, k1 + channel)
            a1, b1 = fused(a, number, a1), fused(b, number, b1)
            c1, d1 = fused(c, number, c1), fused(d, number, d1)
            number = load(keys, k2 + channel)
            a2, b2 = fused(a, number, a2), fused(b, number, b2)
            c2, d2 = fused(c, number, c2), fused(d, number, d2)
            number = load(keys, k3 + channel)
            a3, b3 = fused(a, number, a3), fused(b, number, b3)
            c3, d3 = fused(c, number, c3), fused(d, number, d3)
        store_totals(scores, line + key, a0, a1, a2, a3)
        store_totals(scores, line + LINE + key, b0, b1, b2, b3)
        store_totals(scores, line + 2 * LINE + key, c0, c1, c2, c3)
        store_totals(scores, line + 3 * LINE + key, d0, d1, d2, d3)
    for channel in range(whole, dim):
        for row in range(ROWS):
            query, place = queries[at + row * dim + channel], line + row * LINE
            for key in range(first, end):
                number = keys[key * dim + channel]
                scores[place + key] = fused(query, number, scores[place + key])


@part
def _mix_row(
    weights: Any, line: int, values: Any, size: int, first: int, end: int, mixed: Any, at: int
) -> None:
    """Adds the weighted values of a split's keys `first` to `end` to mixed[at : at + size]."""
    for channel in range(0, size, WIDTH):
        sums = lanes_at(mixed, at + channel)
        for key in range(first, end):
            sums = add_scaled(sums, values, key * size + channel, weights[line + key])
        store(mixed, at + channel, sums)


@part
def _mix_rows(
    weights: Any, line: int, values: Any, size: int, seen: Any, first: int, end: int, mixed: Any,
    at: int, width: int,
) -> None:  # fmt: skip
    """The same for four rows `width` apart, each over the keys that it sees: from seen[row, 0] to
    seen[row, 1]. Keys that all see are loaded once; those before and after are a row's own."""
    begin, stop = first, end
    for row in range(ROWS):
        begin, stop = max(begin, seen[row, 0]), min(stop, seen[row, 1])
    stop = max(begin, stop)
    for row in range(ROWS):
        own, last = max(first, seen[row, 0]), min(end, seen[row, 1], begin)
        _mix_row(weights, line + row * LINE, values, size, own, last, mixed, at + row * width)
    for channel in range(0, size, WIDTH):
        sums = rows_at(mixed, at + channel, width)
        places = begin * size + channel, size, 1, LINE
        sums = add_rows(sums, values, places, weights, line + begin, stop - begin)
        store_rows(mixed, at + channel, width, sums)
    for row in range(ROWS):
        own, last = max(first, seen[row, 0], stop), min(end, seen[row, 1])
        _mix_row(weights, line + row * LINE, values, size, own, last, mixed, at + row * width)


@part
def _seen_of(seen: Any, low: int, group: int, rows: int, base: int, window_len: int) -> None:
    """seen[row] ← the first key that a row sees of the split from `base` on, and their end."""
    for row in range(len(seen)):
        end = low + min(row, rows - 1) // group + 1
        first = max(0, end - window_len) if window_len > 0 else 0
        seen[row, 0], seen[row, 1] = max(first - base, 0), min(max(end - base, 0), SPLIT)


@compiled
def _attend_block(
    block: Any, q: Any, kv_head: int, group: int, keys: Any, values: Any, sizes: Any,
    page_table: Any, window_len: int, scale: Any, score_cap: Any, sinks: Any, laid_keys: Any,
    laid_values: Any, out: Any,
) -> None:  # fmt: skip
    """A job. `block` is its request's row of the table, its first token, and its positions."""
    (stride_page, page_size, dim, step), token = sizes, block[1]
    low, high, first_head, value_dim = block[2], block[3], kv_head * group, out.shape[2]
    rows, size = (high - low) * group, padded(value_dim, WIDTH)
    all_rows, width, part_keys = padded(rows, ROWS), size + LANES, max(LANES, PART // dim)
    queries = np.empty(all_rows * dim, np.float32)
    for row in range(all_rows):
        real = min(row, rows - 1)
        query = q[token + real // group, first_head + real % group]
        for channel in range(dim):
            queries[row * dim + channel] = wide(query[channel]) * scale
    scores, seen = np.empty(all_rows * LINE, np.float32), np.empty((all_rows, 2), np.int64)
    one, first_key = np.float32(1), max(0, low + 1 - window_len) if window_len > 0 else 0
    first_split = first_key // SPLIT
    splits = (high - 1) // SPLIT - first_split + 1
    partial, stride = np.zeros(splits * all_rows * width, np.float32), all_rows * width
    for split in range(splits):
        base = (first_split + split) * SPLIT
        begin, end = max(first_key - base, 0), min(high - base, SPLIT)
        for pages, laid, line, length in (
            (keys, laid_keys, dim, dim), (values, laid_values, size, value_dim)
        ):  # fmt: skip
            _lay_rows(
                pages, page_table[block[0]], base + begin, base + end, stride_page, page_size,
                kv_head, step, laid, line, length,
            )  # fmt: skip
        _seen_of(seen, low, group, rows, base, window_len)
        for first in range(begin, end, part_keys):
            for row in range(0, all_rows, ROWS):
                own = max(first, seen[row, 0])
                last = min(first + part_keys, end, seen[row + ROWS - 1, 1])
                if own < last:
                    _score_rows(queries, row * dim, dim, laid_keys, own, last, scores, row * LINE)
        for row in range(all_rows):
            if seen[row, 0] < seen[row, 1]:
                line = scores[row * LINE : (row + 1) * LINE]
                peak, norm = soften(line, seen[row, 0], seen[row, 1], one, score_cap, line)
                at = split * stride + row * width + size
                partial[at], partial[at + 1] = peak, norm
        for first in range(begin, end, part_keys):
            last = min(first + part_keys, end)
            for row in range(0, all_rows, ROWS):
                if max(first, seen[row, 0]) < min(last, seen[row + ROWS - 1, 1]):
                    _mix_rows(
                        scores, row * LINE, laid_values, size, seen[row : row + ROWS], first, last,
                        partial, split * stride + row * width, width,
                    )  # fmt: skip
    mixed = np.empty(value_dim, np.float32)
    for row in range(rows):
        position, head = low + row // group, first_head + row % group
        own = max(0, position + 1 - window_len) // SPLIT if window_len > 0 else 0
        at, count = (own - first_split) * stride + row * width, position // SPLIT - own + 1
        target = out[token + row // group, head]
        join_splits(partial, at, stride, count, size, sinks[head], mixed, target)


def _attend(
    shares: int, like: Any, q_address: int, q_size: Any, key_address: int, value_address: int,
    sizes: Any, kv_heads: int, indices: Any, table: int, table_size: Any, blocks: Any,
    window_len: int, scale: Any, score_cap: Any, sinks: Any, y: int, y_size: Any,
) -> None:  # fmt: skip
    """Tensors are addresses; those of q, keys and values are of the dtype of `like`, the table's
    entries of that of `indices`. `sizes` are the numbers from a page to the next one, the rows of a
    page, the numbers of a key and those from a row to the next one."""
    q = row_at(q_address, like)[: q_size[0] * q_size[1] * q_size[2]].reshape(q_size)
    out = row_at(y, like)[: y_size[0] * y_size[1] * y_size[2]].reshape(y_size)
    page_table = row_at(table, indices)[: table_size[0] * table_size[1]].reshape(table_size)
    keys, values = row_at(key_address, like), row_at(value_address, like)
    jobs, group = len(blocks) * kv_heads, q_size[1] // kv_heads
    for share in prange(shares):
        laid_keys = np.zeros(SPLIT * q_size[2], np.float32)
        laid_values = np.zeros(SPLIT * padded(y_size[2], WIDTH), np.float32)
        # Neighbours in the list are of one request, and the later one has more keys.
        for job in range(np.int64(share), jobs, shares):
            _attend_block(
                blocks[job // kv_heads], q, job % kv_heads, group, keys, values, sizes, page_table,
                window_len, scale, score_cap, sinks, laid_keys, laid_values, out,
            )  # fmt: skip


_attend_loop = Loop(_attend, STRICT)


def paged_attention_prefill_compiled(
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
    """`q` [tokens, q_heads, head_dim] in float32 or bfloat16, at the positions of `spans`."""
    check_page_layout(key_pages, value_pages)
    _, kv_heads, page_size, dim = key_pages.shape
    rows = StoredRows(
        key_pages.data_ptr(), value_pages.data_ptr(), (key_pages.stride(0), page_size, dim, dim),
        kv_heads, dim,
    )  # fmt: skip
    blocks = blocks_of(tuple(spans), q.shape[1] // kv_heads, window_len)
    return attend_blocks(q, rows, page_table, blocks, scale, window_len, sinks, score_cap)


class Blocks(NamedTuple):
    """Rows [row of the table, first token, first position, end], and about how many pairs of a
    query and a key they have."""

    rows: Any
    pairs: int


class StoredRows(NamedTuple):
    """Keys and values in memory, in the dtype of the queries.

    `sizes` are the numbers from a page to the next one, the rows of a page, the numbers of a key,
    and those from a row to the next one.
    """

    keys: int
    values: int
    sizes: tuple[int, int, int, int]
    kv_heads: int
    value_dim: int


def attend_blocks(
    q: Tensor,
    rows: StoredRows,
    page_table: Tensor,
    blocks: Blocks,
    scale: float,
    window_len: int = 0,
    sinks: Tensor | None = None,
    score_cap: float = 0.0,
) -> Tensor:
    """Returns [tokens, q_heads, value_dim]; zeros for a token that sees nothing."""
    assert page_table.dtype is torch.int64, page_table.dtype
    q, table, size = q.contiguous(), page_table.contiguous(), q.shape
    out = torch.empty(*size[:2], rows.value_dim, dtype=q.dtype)
    added = no_sinks(size[1], torch.float32) if sinks is None else sinks.numpy()
    loop = prefill_loop if takes_tiles(q.dtype) else _attend_loop
    loop(
        blocks.pairs * size[1] * (size[2] + rows.value_dim) // PRODUCTS_PER_ELEMENT,
        torch.get_num_threads(), row_like(q.dtype), q.data_ptr(), tuple(size), rows.keys,
        rows.values, rows.sizes, rows.kv_heads, row_like(torch.int64), table.data_ptr(),
        tuple(table.shape), blocks.rows, window_len, np.float32(scale), np.float32(score_cap),
        added, out.data_ptr(), tuple(out.shape),
    )  # fmt: skip
    return out


@lru_cache(maxsize=32)
def blocks_of(spans: tuple[Span, ...], group: int, window_len: int = 0) -> Blocks:
    """The blocks of chunks, for `group` heads of queries to one of keys; once for all layers of a
    step."""
    tokens, pairs, rows = max(1, BLOCK_ROWS // group), 0, []
    for request, ((start, end), first) in enumerate(zip(spans, first_tokens(spans), strict=False)):
        lows = range(start, end, tokens)
        rows += [(request, first + low - start, low, min(low + tokens, end)) for low in lows]
        pairs += (end - start) * (min(end, window_len) if window_len else end)
    return Blocks(np.array(rows, np.int64).reshape(-1, 4), pairs)


def single_tokens(counts: Tensor, most: int) -> Blocks:
    """A block for each token, which sees the first counts[token] keys of its own row of the table,
    at most `most`. The numbers are read when the loop runs."""
    tokens = torch.arange(len(counts))
    rows = torch.stack((tokens, tokens, counts - 1, counts), dim=1)
    return Blocks(rows.numpy(), len(counts) * most)
