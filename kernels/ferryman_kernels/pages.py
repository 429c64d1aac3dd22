"""Pages of keys and values: writing new tokens, and moving whole pages out of and into a slab.

    write_kv:       page = page_table[row, position // page_size], at offset position % page_size
                    key_pages[page, :, offset] ← keys[token], and the same for values
    gather_pages:   pages[i] = slab[slots[i]]
    scatter_pages:  slab[slots[i]] ← pages[i]

A negative entry of the page table names no page, and nothing is written there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv_reference(
    key_pages: Tensor,
    value_pages: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
) -> None:
    page_size = key_pages.shape[2]
    pages = page_table[rows, positions // page_size]
    named = pages >= 0
    slots, offsets = pages[named], (positions % page_size)[named]
    key_pages[slots, :, offsets] = keys[named]
    value_pages[slots, :, offsets] = values[named]


def write_kv(
    key_pages: Tensor,
    value_pages: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
) -> None:
    """Write `keys` and `values` [tokens, kv_heads, head_dim] where each token's page says.

    The pages are strided views [slots, kv_heads, page_size, head_dim] of a slab; `page_table`
    [requests, pages]; `rows` [tokens] is each token's row of it, `positions` [tokens] absolute.
    """
    _, kv_heads, _, head_dim = key_pages.shape
    assert value_pages.shape == key_pages.shape, (key_pages.shape, value_pages.shape)
    assert keys.shape == values.shape == (len(rows), kv_heads, head_dim), (keys.shape, values.shape)
    assert keys.dtype == values.dtype == key_pages.dtype == value_pages.dtype, keys.dtype
    assert page_table.ndim == 2, (rows.shape, positions.shape)
    assert rows.shape == positions.shape, (rows.shape, positions.shape)
    write_kv_reference(key_pages, value_pages, keys, values, page_table, rows, positions)


def gather_pages(slab: Tensor, slots: Tensor) -> Tensor:
    """A copy [len(slots), slot_bytes] of the given slots of `slab` [num_slots, slot_bytes]."""
    assert slab.dtype == torch.uint8
    assert slab.ndim == 2
    assert slots.dtype == torch.int64
    return slab.index_select(0, slots)


def scatter_pages(slab: Tensor, slots: Tensor, pages: Tensor) -> None:
    """Write `pages` [len(slots), slot_bytes] into the given slots; no slot may be named twice."""
    assert slab.dtype == pages.dtype == torch.uint8
    assert slots.dtype == torch.int64
    assert pages.shape == (len(slots), slab.shape[1]), (pages.shape, slab.shape)
    slab.index_copy_(0, slots, pages)
