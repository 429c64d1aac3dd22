"""Keys and values of a step written to their pages on the CPU, in one loop; as in `pages`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman_kernels.attention.page_layout import check_page_layout
from ferryman_kernels.cpu._compiled import STRICT, Loop, row_like
from ferryman_kernels.cpu._vectors import copy_numbers, row_at


def _write(
    like: Any, key_pages: int, value_pages: int, stride_page: int, page_size: int,
    keys: int, stride_keys: Any, values: int, stride_values: Any,
    kv_heads: int, head_dim: int, indices: Any, table: int, stride_table: int, rows: int,
    positions: int, tokens: int,
) -> None:  # fmt: skip
    """Tensors are addresses of their first element; `like` and `indices` are empty rows of the
    dtypes of keys and of indices. A stride is of (token, head), or of a row, in elements."""
    key_to, value_to = row_at(key_pages, like), row_at(value_pages, like)
    key_from, value_from = row_at(keys, like), row_at(values, like)
    page_table, row_of = row_at(table, indices), row_at(rows, indices)
    position_of = row_at(positions, indices)
    for token in range(tokens):
        position = position_of[token]
        # A token that pads a batch has no position, and its row of the table may name no page.
        entry = row_of[token] * stride_table + position // page_size
        page = page_table[entry] if position >= 0 else -1
        if page < 0:
            continue
        for head in range(kv_heads):
            at = page * stride_page + (head * page_size + position % page_size) * head_dim
            key = token * stride_keys[0] + head * stride_keys[1]
            value = token * stride_values[0] + head * stride_values[1]
            copy_numbers(key_from, key, key_to, at, head_dim)
            copy_numbers(value_from, value, value_to, at, head_dim)


_write_loop = Loop(_write, STRICT)


def write_kv_compiled(
    key_pages: Tensor,
    value_pages: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
) -> None:
    _, kv_heads, page_size, head_dim = key_pages.shape
    check_page_layout(key_pages, value_pages)
    key_strides, value_strides = keys.stride(), values.stride()
    assert key_strides[2] == value_strides[2] == 1, (key_strides, value_strides)
    assert page_table.dtype is rows.dtype is positions.dtype is torch.int64, page_table.dtype
    table, rows, positions = page_table.contiguous(), rows.contiguous(), positions.contiguous()
    # The loop has nothing to share: copies of a step are few, and a prompt's are a memory's work.
    _write_loop.on_one_thread(
        row_like(keys.dtype), key_pages.data_ptr(), value_pages.data_ptr(), key_pages.stride(0),
        page_size, keys.data_ptr(), key_strides[:2], values.data_ptr(), value_strides[:2],
        kv_heads, head_dim, row_like(torch.int64), table.data_ptr(), table.shape[1],
        rows.data_ptr(), positions.data_ptr(), len(positions),
    )  # fmt: skip
