"""Attention of blocks of queries for the CPU: the queries of a block share each key and value.

Formulas and names are those of `paged_attention`. A row is one head of one query; a job is the rows
of a block that read one head of keys. Splits are multiplied by tiles where the processor has them,
or by vectors; those of a row are joined in their order, the sink last, as in decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.attention._paged_attention_compiled import no_sinks
from ferryman_kernels.attention.page_layout import check_page_layout
from ferryman_kernels.attention.splits._attention_split_compiled import (
    SPLIT,
    join_splits,
    lay_places,
)
from ferryman_kernels.attention.splits._tile_split_compiled import (
    WIDTH,
    attend_by_tiles,
    takes_tiles,
    tile_configuration,
    tile_room,
)
from ferryman_kernels.attention.splits._vector_split_compiled import attend_by_vectors, vector_room
from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    compiled,
    numba,
    part,
    prange,
    row_like,
)
from ferryman_kernels.cpu._lanes import LANES as VECTOR_WIDTH
from ferryman_kernels.cpu._row_tiles import PRODUCTS_PER_ELEMENT, padded
from ferryman_kernels.cpu._tiles import CONFIG_BYTES, configure, copy_configuration
from ferryman_kernels.cpu._vectors import LANES, copy_numbers, row_at
from ferryman_kernels.ragged import Span, first_tokens

if numba is not None:
    from numba.extending import overload

BLOCK_ROWS = 128
"""The rows of a block, if a query has no more heads for one of keys."""


def attend_split(
    queries: Any, rows: Any, seen: Any, pages: Any, places: Any, dims: Any, scale: Any,
    score_cap: Any, room: Any, mixed: Any, stride: Any,
) -> None:  # fmt: skip
    """`attend_by_tiles` for queries that are laid in bfloat16, else `attend_by_vectors`."""
    raise NotImplementedError("only in compiled loops")


def split_room(dims: Any, laid: Any) -> Any:
    """The memory of one thread, for queries laid in the dtype of `laid`."""
    raise NotImplementedError("only in compiled loops")


def _attend_split(queries: Any, *_: Any) -> Callable[..., None]:
    def by_vectors(
        queries: Any, rows: Any, seen: Any, pages: Any, places: Any, dims: Any, scale: Any,
        score_cap: Any, room: Any, mixed: Any, stride: Any,
    ) -> None:  # fmt: skip
        attend_by_vectors(
            queries, rows, seen, pages[0], pages[1], places, dims, scale, score_cap, room, mixed,
            stride,
        )  # fmt: skip

    def by_tiles(
        queries: Any, rows: Any, seen: Any, pages: Any, places: Any, dims: Any, scale: Any,
        score_cap: Any, room: Any, mixed: Any, stride: Any,
    ) -> None:  # fmt: skip
        before = np.empty(CONFIG_BYTES, np.uint8)
        copy_configuration(before)
        configure(tile_configuration(rows))
        attend_by_tiles(
            queries, rows, seen, pages[0], pages[1], places, dims, scale, score_cap, room, mixed,
            stride,
        )  # fmt: skip
        configure(before)

    return by_tiles if queries.dtype == numba.types.uint16 else by_vectors


def _split_room(dims: Any, laid: Any) -> Callable[..., Any]:
    if laid.dtype == numba.types.uint16:
        return lambda dims, laid: tile_room(dims)
    return lambda dims, laid: vector_room(dims)


if numba is not None:
    for stub, chosen in ((attend_split, _attend_split), (split_room, _split_room)):
        overload(stub, jit_options={"error_model": "numpy"}, strict=False)(chosen)


@part
def _first_key(position: int, window_len: int) -> int:
    return max(0, position + 1 - window_len) if window_len > 0 else 0


@compiled
def _attend_block(
    block: Any, q: Any, q_heads: int, kv_head: int, group: int, pages: Any, sizes: Any, dims: Any,
    page_table: Any, window_len: int, scale: Any, score_cap: Any, sinks: Any, laid: Any, room: Any,
    out: Any,
) -> None:  # fmt: skip
    """A job. `block` is its row of the table, its first token, and its positions."""
    (stride_page, page_size, step), (dim, size, value_dim, value_size) = sizes, dims
    token, low, high, first_head = block[1], block[2], block[3], kv_head * group
    rows, stride = (high - low) * group, value_size + LANES
    all_rows = padded(rows, WIDTH)
    queries = np.zeros(all_rows * size, laid.dtype)
    for line in range(all_rows):
        real = min(line, rows - 1)
        query = ((token + real // group) * q_heads + first_head + real % group) * dim
        copy_numbers(q, query, queries, line * size, dim)
    first_split = _first_key(low, window_len) // SPLIT
    splits = (high - 1) // SPLIT - first_split + 1
    partial = np.empty(splits * all_rows * stride, np.float32)
    seen, places = np.empty((all_rows, 2), np.int64), np.empty(SPLIT, np.int64)
    for split in range(splits):
        base = (first_split + split) * SPLIT
        begin, end = max(_first_key(low, window_len), base), min(high, base + SPLIT)
        lay_places(places, page_table[block[0]], begin, end, stride_page, page_size, kv_head, step)
        for line in range(all_rows):
            position = low + min(line, rows - 1) // group
            seen[line, 0] = min(max(_first_key(position, window_len) - base, 0), SPLIT)
            seen[line, 1] = min(max(position + 1 - base, 0), SPLIT)
        attend_split(
            queries, rows, seen, pages, places, dims, scale, score_cap, room,
            partial[split * all_rows * stride :], stride,
        )  # fmt: skip
    own_partial = row_at(partial.ctypes.data, partial)
    for line in range(rows):
        position, head = low + line // group, first_head + line % group
        row_split = _first_key(position, window_len) // SPLIT
        at = (row_split - first_split) * all_rows * stride + line * stride
        count = position // SPLIT - row_split + 1
        to = ((token + line // group) * q_heads + head) * value_dim
        join_splits(
            own_partial, at, all_rows * stride, count, value_size, sinks[head], out, to, value_dim
        )
    partial[:0] = 0  # numba ends an array's life after its last use


def _attend(
    shares: int, like: Any, laid: Any, q_address: int, q_size: Any, page_addresses: Any, sizes: Any,
    dims: Any, kv_heads: int, indices: Any, table: int, table_size: Any, blocks: Any,
    window_len: int, scale: Any, score_cap: Any, sinks: Any, y: int,
) -> None:  # fmt: skip
    """Tensors are addresses; those of q, keys and values are of the dtype of `like`, the table's
    entries of that of `indices`; queries are laid in that of `laid`. `sizes` are the numbers from a
    page to the next one, the rows of a page, and the numbers from a row to the next one; `dims`
    those of a key and of a value, each with the padded one."""
    q, out = row_at(q_address, like), row_at(y, like)
    page_table = row_at(table, indices)[: table_size[0] * table_size[1]].reshape(table_size)
    pages = row_at(page_addresses[0], like), row_at(page_addresses[1], like)
    jobs, group = len(blocks) * kv_heads, q_size[1] // kv_heads
    for share in prange(shares):
        room = split_room(dims, laid)
        # Neighbours in the list are of one request, and the later one has more keys.
        for job in range(np.int64(share), jobs, shares):
            _attend_block(
                blocks[job // kv_heads], q, q_size[1], job % kv_heads, group, pages, sizes, dims,
                page_table, window_len, scale, score_cap, sinks, laid, room, out,
            )  # fmt: skip


attend_loop = Loop(_attend, STRICT)


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
        key_pages.data_ptr(), value_pages.data_ptr(), (key_pages.stride(0), page_size, dim),
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

    `sizes` are the numbers from a page to the next one, the rows of a page, and the numbers from a
    row to the next one.
    """

    keys: int
    values: int
    sizes: tuple[int, int, int]
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
    by_tiles, value_dim = takes_tiles(q.dtype), rows.value_dim
    width = WIDTH if by_tiles else VECTOR_WIDTH
    key_size = -(-size[2] // width) * width if by_tiles else size[2]
    attend_loop(
        blocks.pairs * size[1] * (size[2] + value_dim) // PRODUCTS_PER_ELEMENT,
        torch.get_num_threads(), row_like(q.dtype),
        row_like(q.dtype if by_tiles else torch.float32), q.data_ptr(), tuple(size),
        (rows.keys, rows.values), rows.sizes,
        (size[2], key_size, value_dim, -(-value_dim // width) * width), rows.kv_heads,
        row_like(torch.int64), table.data_ptr(), tuple(table.shape), blocks.rows, window_len,
        np.float32(scale), np.float32(score_cap), added, out.data_ptr(),
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
