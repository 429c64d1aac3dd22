"""Pages of keys and values: writing new tokens, and moving whole pages out of and into a slab.

    write_kv:       page = page_table[row, position // page_size], at offset position % page_size
                    key_pages[page, :, offset] ← keys[token], and the same for values
    gather_pages:   pages[i] = slab[slots[i]]
    scatter_pages:  slab[slots[i]] ← pages[i]

A negative entry of the page table is no page, and nothing is written there; nor for a token at a
negative position, which pads a batch.
"""

from __future__ import annotations

from ctypes import memmove

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, next_power_of_two, tl
from ferryman_kernels.attention._write_kv_compiled import write_kv_compiled
from ferryman_kernels.attention.page_layout import check_page_layout
from ferryman_kernels.cpu._compiled import serves


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
    pages = page_table[rows, positions.clamp_min(0) // page_size]
    named = (pages >= 0) & (positions >= 0)
    slots, offsets = pages[named], (positions % page_size)[named]
    key_pages[slots, :, offsets] = keys[named]
    value_pages[slots, :, offsets] = values[named]


@Kernel
def _write_kv_kernel(
    key_pages_ptr: tl.tensor,
    value_pages_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    stride_page: int,
    stride_keys_token: int,
    stride_keys_head: int,
    stride_values_token: int,
    stride_values_head: int,
    stride_table_row: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Writes all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    column = tl.maximum(position, 0) // page_size
    page = tl.load(page_table_ptr + row * stride_table_row + column).to(tl.int64)
    page = tl.where(position >= 0, page, -1)
    offs_head = tl.arange(0, BLOCK_HEADS)[:, None]
    offs_dim = tl.arange(0, BLOCK_DIM)[None, :]
    heads_here = tl.where(page >= 0, kv_heads, 0)  # a token without a page writes no head
    mask = (offs_head < heads_here) & (offs_dim < head_dim)
    key_at = token * stride_keys_token + offs_head * stride_keys_head + offs_dim
    value_at = token * stride_values_token + offs_head * stride_values_head + offs_dim
    keys = tl.load(keys_ptr + key_at, mask=mask)
    values = tl.load(values_ptr + value_at, mask=mask)
    at = page * stride_page + (offs_head * page_size + position % page_size) * head_dim + offs_dim
    tl.store(key_pages_ptr + at, keys, mask=mask)
    tl.store(value_pages_ptr + at, values, mask=mask)


def write_kv_triton(
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
    assert keys.stride(2) == values.stride(2) == page_table.stride(1) == 1, keys.stride()
    assert rows.stride(0) == positions.stride(0) == 1, (rows.stride(), positions.stride())
    _write_kv_kernel[len(keys),](
        key_pages, value_pages, keys, values, page_table, rows, positions,
        key_pages.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        page_table.stride(0), page_size, kv_heads, head_dim,
        BLOCK_HEADS=next_power_of_two(kv_heads), BLOCK_DIM=next_power_of_two(head_dim),
    )  # fmt: skip


def write_kv(
    key_pages: Tensor,
    value_pages: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
) -> None:
    """Writes `keys` and `values` [tokens, kv_heads, head_dim] to the page of each token.

    The pages are strided views [slots, kv_heads, page_size, head_dim] of a slab; `page_table`
    [requests, pages]; `rows` [tokens] is each token's row of it, `positions` [tokens] absolute.
    """
    _, kv_heads, _, head_dim = key_pages.shape
    assert value_pages.shape == key_pages.shape, (key_pages.shape, value_pages.shape)
    assert keys.shape == values.shape == (len(rows), kv_heads, head_dim), (keys.shape, values.shape)
    assert keys.dtype == values.dtype == key_pages.dtype == value_pages.dtype, keys.dtype
    assert page_table.ndim == 2, page_table.shape
    assert rows.shape == positions.shape, (rows.shape, positions.shape)
    if keys.is_cuda:
        write = write_kv_triton
    else:
        write = write_kv_compiled if serves(keys) else write_kv_reference
    write(key_pages, value_pages, keys, values, page_table, rows, positions)


def gather_pages(slab: Tensor, slots: Tensor) -> Tensor:
    """A copy [len(slots), slot_bytes] of the given slots of `slab` [num_slots, slot_bytes]."""
    words = _in_words(slab, slots)
    if slab.is_cuda:
        return words.index_select(0, slots).view(torch.uint8)
    pages, size = torch.empty(len(slots), slab.shape[1], dtype=torch.uint8), slab.shape[1]
    for index, slot in enumerate(_slots_of(slab, slots)):
        memmove(pages.data_ptr() + index * size, slab.data_ptr() + slot * size, size)
    return pages


def scatter_pages(slab: Tensor, slots: Tensor, pages: Tensor) -> None:
    """Writes `pages` [len(slots), slot_bytes] into the given slots; no slot may occur twice."""
    assert pages.shape == (len(slots), slab.shape[1]), (pages.shape, slab.shape)
    words, size = _in_words(slab, slots), slab.shape[1]
    if slab.is_cuda:
        words.index_copy_(0, slots, _in_words(pages, slots))
        return
    for index, slot in enumerate(_slots_of(slab, slots)):
        memmove(slab.data_ptr() + slot * size, pages.data_ptr() + index * size, size)


def _slots_of(slab: Tensor, slots: Tensor) -> list[int]:
    """The slots as numbers. Addresses are computed from them, so all must be inside the slab."""
    found: list[int] = slots.tolist()
    assert all(0 <= slot < len(slab) for slot in found), (found, len(slab))
    return found


def _in_words(slab: Tensor, slots: Tensor) -> Tensor:
    """The slab as int64: slots are multiples of 64 bytes, and 8 bytes move at a time."""
    assert slab.dtype == torch.uint8, slab.dtype
    assert slab.ndim == 2, slab.shape
    assert slab.shape[1] % 64 == 0, slab.shape
    assert slab.is_contiguous(), slab.stride()
    assert slots.dtype == torch.int64, slots.dtype
    return slab.view(torch.int64)
