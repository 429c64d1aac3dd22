"""Decode attention for the CPU: each key and value is read once, in its page.

Formulas and names are those of `paged_attention`. One iteration of the shared loop is one group of
heads of one query: first the scores, then their softmax, then the weighted values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._compiled import Loop, as_array, as_flat, exp, narrow, prange, wide
from ferryman_kernels._precision import wide_dtype


def _attend(
    q: Any,
    keys: Any,
    values: Any,
    stride_page: int,
    page_size: int,
    page_table: Any,
    positions: Any,
    window_len: int,
    sinks: Any,
    score_cap: float,
    out: Any,
) -> None:
    """`q` and `out` [tokens, kv_heads, group, head_dim]; q is already scaled.

    `sinks` [kv_heads, group]: a score of -inf means no sink. A `score_cap` of 0 is none.
    """
    tokens, kv_heads, group, head_dim = q.shape
    for job in prange(tokens * kv_heads):
        token, kv_head = job // kv_heads, job % kv_heads
        end = positions[token] + 1
        start = max(0, end - window_len) if window_len > 0 else 0
        scores = np.empty((group, end - start), q.dtype)
        for position in range(start, end):
            page = page_table[token, position // page_size]
            at = page * stride_page + (kv_head * page_size + position % page_size) * head_dim
            row = keys[at : at + head_dim]
            for member in range(group):
                query, total = q[token, kv_head, member], q[token, kv_head, member, 0] * 0
                for d in range(head_dim):
                    total += query[d] * wide(row[d])
                if score_cap > 0:  # score_cap · tanh(total / score_cap)
                    total = score_cap - 2 * score_cap / (exp(2 * total / score_cap) + 1)
                scores[member, position - start] = total
        total = np.zeros((group, head_dim), q.dtype)
        for member in range(group):
            line = scores[member]
            sink = sinks[kv_head, member]
            peak = max(line.max(), sink)
            norm = exp(sink - peak)
            for i in range(len(line)):
                line[i] = exp(line[i] - peak)
                norm += line[i]
            for i in range(len(line)):
                line[i] /= norm
        for position in range(start, end):
            page = page_table[token, position // page_size]
            at = page * stride_page + (kv_head * page_size + position % page_size) * head_dim
            row = values[at : at + head_dim]
            for member in range(group):
                weight, line = scores[member, position - start], total[member]
                for d in range(head_dim):
                    line[d] += weight * wide(row[d])
        for member in range(group):
            line, target = total[member], out[token, kv_head, member]
            for d in range(head_dim):
                target[d] = narrow(line[d], target)


_attend_loop = Loop(_attend)


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
    tokens, q_heads, head_dim = q.shape
    kv_heads, page_size = key_pages.shape[1:3]
    assert key_pages[0].is_contiguous(), key_pages.stride()
    assert value_pages.stride() == key_pages.stride(), value_pages.stride()
    scaled = (q.to(wide_dtype(q.dtype)) * scale).reshape(tokens, kv_heads, -1, head_dim)
    if sinks is None:
        sinks = torch.full((q_heads,), -torch.inf, dtype=scaled.dtype)
    out = torch.empty(scaled.shape, dtype=q.dtype)
    _attend_loop(
        q.numel() * int(positions.max()),
        scaled.contiguous().numpy(), as_flat(key_pages), as_flat(value_pages),
        key_pages.stride(0), page_size, page_table.numpy(), positions.numpy(), window_len,
        sinks.view(kv_heads, -1).numpy(), score_cap, as_array(out),
    )  # fmt: skip
    return out.view(tokens, q_heads, head_dim)
