"""Decode attention for the CPU: each key and value is read once for its group of heads.

Formulas and names are those of `paged_attention`. A job is one split of one query's keys, for one
group of heads; it leaves each head's peak, sum of weights and weighted values. The splits of a
query are then joined in their order, the sink last.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.attention._tile_decode_compiled import decode_loop
from ferryman_kernels.attention.page_layout import check_page_layout
from ferryman_kernels.attention.splits._attention_split_compiled import (
    LINE,
    SPLIT,
    join_all,
    keys_in_page,
    mix_values,
    score_keys,
    soften,
    splits_of,
)
from ferryman_kernels.attention.splits._tile_split_compiled import takes_tiles
from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    compiled,
    prange,
    row_like,
)
from ferryman_kernels.cpu._vectors import copy_numbers, row_at

PRODUCTS_PER_ELEMENT = 4
"""Products of a query with keys that take the time of one element of other loops."""


@compiled
def _attend_share(
    share: int, shares: int, splits: Any, q: Any, kv_heads: int, keys: Any, values: Any,
    stride_page: int, page_size: int, page_table: Any, scale: Any, score_cap: Any, partial: Any,
) -> None:  # fmt: skip
    """The jobs of one thread: neighbours in the list, with as many keys as another thread's."""
    q_heads, head_dim = q.shape[1], q.shape[2]
    group, width = q_heads // kv_heads, head_dim + 2
    query, scores = np.empty(group * head_dim, partial.dtype), np.empty(group * LINE, partial.dtype)
    last = splits[len(splits) - 1]
    work = (last[3] + last[2] - last[1]) * kv_heads
    begin, end = work * share // shares, work * (share + 1) // shares
    for job in range(len(splits) * kv_heads):
        row, kv_head = job // kv_heads, job % kv_heads
        token, low, high = splits[row, 0], splits[row, 1], splits[row, 2]
        # A job is of the share in which its first key lies, so each job has exactly one.
        start = splits[row, 3] * kv_heads + kv_head * (high - low)
        if start < begin or start >= end:
            continue
        first_head = kv_head * group
        for member in range(group):
            copy_numbers(q[token, first_head + member], 0, query, member * head_dim, head_dim)
        position, base = low, low // SPLIT * SPLIT
        while position < high:
            at, count = keys_in_page(
                page_table[token], position, high, stride_page, page_size, kv_head, head_dim
            )
            score_keys(query, group, head_dim, keys, at, count, scores, position - base)
            position += count
        target = (row * q_heads + first_head) * width
        for member in range(group):
            line, end_of_row = scores[member * LINE : (member + 1) * LINE], target + head_dim
            for channel in range(target, end_of_row):
                partial[channel] = 0
            peak, norm = soften(line, low - base, high - base, scale, score_cap, line)
            partial[end_of_row], partial[end_of_row + 1] = peak, norm
            target += width
        target = (row * q_heads + first_head) * width
        position = low
        while position < high:
            at, count = keys_in_page(
                page_table[token], position, high, stride_page, page_size, kv_head, head_dim
            )
            first = position - base
            mix_values(scores, first, group, head_dim, values, at, count, partial, target, width)
            position += count


def _attend(
    shares: int, like: Any, q_address: int, q_size: Any, kv_heads: int, key_address: int,
    value_address: int, stride_page: int, page_size: int, indices: Any, table: int, pages: int,
    position_address: int, window_len: int, scale: Any, score_cap: Any, sinks: Any, y: int,
) -> None:  # fmt: skip
    """Tensors are addresses; q and y are of `q_size`, (tokens, q_heads, head_dim), and `like`, an
    empty row, has their dtype, `indices` that of table [tokens, pages] and positions. A sink of
    -inf, and a cap of 0, are none."""
    numbers, entries = q_size[0] * q_size[1] * q_size[2], q_size[0] * pages
    q = row_at(q_address, like)[:numbers].reshape(q_size)
    page_table = row_at(table, indices)[:entries].reshape(q_size[0], pages)
    splits = splits_of(row_at(position_address, indices)[: q_size[0]], window_len)
    partial = np.empty(len(splits) * q.shape[1] * (q.shape[2] + 2), sinks.dtype)
    keys, values = row_at(key_address, q), row_at(value_address, q)
    if len(splits) > 0:
        for share in prange(shares):
            _attend_share(
                np.int64(share), shares, splits, q, kv_heads, keys, values, stride_page, page_size,
                page_table, scale, score_cap, partial,
            )  # fmt: skip
    join_all(splits, partial, q_size[2], q_size[2] + 2, sinks, row_at(y, like), q_size)


_attend_loop = Loop(_attend, STRICT)


@lru_cache(maxsize=64)
def no_sinks(q_heads: int, dtype: torch.dtype) -> Any:
    return torch.full((q_heads,), -torch.inf, dtype=dtype).numpy()


def paged_attention_decode_compiled(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    scale: float,
    window_len: int,
    sinks: Tensor | None,
    score_cap: float,
) -> Tensor:
    _, kv_heads, page_size, _ = key_pages.shape
    check_page_layout(key_pages, value_pages)
    assert page_table.dtype is positions.dtype is torch.int64, (page_table.dtype, positions.dtype)
    q, table, positions = q.contiguous(), page_table.contiguous(), positions.contiguous()
    out, size, threads = torch.empty(q.shape, dtype=q.dtype), q.shape, torch.get_num_threads()
    added = no_sinks(size[1], wide_dtype(q.dtype)) if sinks is None else sinks.numpy()
    number, reach = added.dtype.type, table.shape[1] * page_size
    seen = min(reach, window_len) if window_len else reach
    loop = decode_loop if takes_tiles(q.dtype) else _attend_loop
    loop(
        size.numel() * seen // PRODUCTS_PER_ELEMENT,
        threads, row_like(q.dtype), q.data_ptr(), tuple(size), kv_heads, key_pages.data_ptr(),
        value_pages.data_ptr(), key_pages.stride(0), page_size, row_like(torch.int64),
        table.data_ptr(), table.shape[1], positions.data_ptr(), window_len, number(scale),
        number(score_cap), added, out.data_ptr(),
    )  # fmt: skip
    return out
