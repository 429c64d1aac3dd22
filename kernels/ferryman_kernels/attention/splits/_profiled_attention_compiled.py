"""Attention with profiles of distance for the CPU; formulas and names are those of
`profiled_attention`.

One loop for prompts and for single tokens: a job is one split of one query's keys, as in
`_paged_attention_compiled`, so the bits of a query depend on itself and on what it sees alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.attention._paged_attention_compiled import PRODUCTS_PER_ELEMENT, no_sinks
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
from ferryman_kernels.cpu._compiled import STRICT, Loop, compiled, part, prange, row_like, wide
from ferryman_kernels.cpu._vectors import copy_numbers, row_at


@part
def _add_profile(
    line: Any, first: int, end: int, scale: Any, nearest: int, profile: Any, at: int, extent: int
) -> None:
    """line[key] ← scale · line[key] + profile[at + distance] for the keys from `first` to `end`, of
    which key 0 is `nearest` positions before the query; beyond `extent` a profile is zero."""
    for key in range(first, end):
        distance = nearest - key
        score = line[key] * scale
        line[key] = score + wide(profile[at + distance]) if distance < extent else score


@compiled
def _attend_split(
    split: Any, position: int, kv_head: int, q: Any, kv_heads: int, keys: Any, values: Any,
    stride_page: int, page_size: int, pages: Any, scale: Any, profiles: Any, extent: int,
    room: Any, partial: Any, target: int,
) -> None:  # fmt: skip
    """The heads of one group of one query over one split, into partial[target :]."""
    (query, scores), (q_heads, head_dim) = room, q.shape[1:]
    group, width = q_heads // kv_heads, head_dim + 2
    token, low, high = split[0], split[1], split[2]
    base, head = low // SPLIT * SPLIT, kv_head * group
    for member in range(group):
        copy_numbers(q[token, head + member], 0, query, member * head_dim, head_dim)
    begin = low
    while begin < high:
        at, count = keys_in_page(pages, begin, high, stride_page, page_size, kv_head, head_dim)
        score_keys(query, group, head_dim, keys, at, count, scores, begin - base)
        begin += count
    for member in range(group):
        line, row = scores[member * LINE : (member + 1) * LINE], target + member * width
        profile = (token * q_heads + head + member) * extent
        first, end = low - base, high - base
        _add_profile(line, first, end, scale, position - base, profiles, profile, extent)
        for channel in range(row, row + head_dim):
            partial[channel] = 0
        # Terms are added already, so the scores are neither scaled nor capped again.
        none, unit = line.dtype.type(0), line.dtype.type(1)
        peak, norm = soften(line, first, end, unit, none, line)
        partial[row + head_dim], partial[row + head_dim + 1] = peak, norm
    begin = low
    while begin < high:
        at, count = keys_in_page(pages, begin, high, stride_page, page_size, kv_head, head_dim)
        first = begin - base
        mix_values(scores, first, group, head_dim, values, at, count, partial, target, width)
        begin += count


def _attend(
    shares: int, like: Any, q_address: int, q_size: Any, kv_heads: int, key_address: int,
    value_address: int, stride_page: int, page_size: int, indices: Any, table: int, pages: int,
    position_address: int, window_len: int, scale: Any, profile_address: int, extent: int,
    sinks: Any, y: int,
) -> None:  # fmt: skip
    """Tensors are addresses, as in `_paged_attention_compiled`; profiles are [tokens, q_heads,
    extent]."""
    tokens, q_heads, head_dim = q_size
    q = row_at(q_address, like)[: tokens * q_heads * head_dim].reshape(q_size)
    page_table = row_at(table, indices)[: tokens * pages].reshape(tokens, pages)
    profiles = row_at(profile_address, like)[: tokens * q_heads * extent]
    positions = row_at(position_address, indices)[:tokens]
    splits = splits_of(positions, window_len)
    group, width = q_heads // kv_heads, head_dim + 2
    jobs = len(splits) * kv_heads
    partial = np.empty(jobs * group * width, sinks.dtype)
    keys, values = row_at(key_address, q), row_at(value_address, q)
    for share in prange(shares):
        room = np.empty(group * head_dim, sinks.dtype), np.empty(group * LINE, sinks.dtype)
        for job in range(np.int64(share), jobs, shares):
            split = splits[job // kv_heads]
            token = split[0]
            _attend_split(
                split, positions[token], job % kv_heads, q, kv_heads, keys, values, stride_page,
                page_size, page_table[token], scale, profiles, extent, room, partial,
                job * group * width,
            )  # fmt: skip
    join_all(splits, partial, head_dim, width, sinks, row_at(y, like), q_size)


_attend_loop = Loop(_attend, STRICT)


def profiled_attention_compiled(
    q: Tensor,
    profiles: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    scale: float,
    window_len: int,
) -> Tensor:
    _, kv_heads, page_size, _ = key_pages.shape
    check_page_layout(key_pages, value_pages)
    assert page_table.dtype is positions.dtype is torch.int64, (page_table.dtype, positions.dtype)
    q, profiles = q.contiguous(), profiles.contiguous()
    table, positions = page_table.contiguous(), positions.contiguous()
    out, size = torch.empty(q.shape, dtype=q.dtype), q.shape
    sinks = no_sinks(size[1], wide_dtype(q.dtype))
    reach = table.shape[1] * page_size
    seen = min(reach, window_len) if window_len else reach
    _attend_loop(
        size.numel() * seen // PRODUCTS_PER_ELEMENT,
        torch.get_num_threads(), row_like(q.dtype), q.data_ptr(), tuple(size), kv_heads,
        key_pages.data_ptr(), value_pages.data_ptr(), key_pages.stride(0), page_size,
        row_like(torch.int64), table.data_ptr(), table.shape[1], positions.data_ptr(), window_len,
        sinks.dtype.type(scale), profiles.data_ptr(), profiles.shape[2], sinks, out.data_ptr(),
    )  # fmt: skip
    return out
