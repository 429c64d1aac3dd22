"""Decode attention in bfloat16 by tiles, for processors that have them.

Formulas and names are those of `paged_attention`, a job is as in `_paged_attention_compiled`. The
arithmetic of a split is that of prefill.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ferryman_kernels.attention.splits._attention_split_compiled import (
    SPLIT,
    join_all,
    lay_places,
    splits_of,
)
from ferryman_kernels.attention.splits._tile_split_compiled import (
    WIDTH,
    attend_by_tiles,
    tile_configuration,
    tile_room,
)
from ferryman_kernels.cpu._compiled import STRICT, Loop, compiled, part, prange
from ferryman_kernels.cpu._row_tiles import padded
from ferryman_kernels.cpu._tiles import CONFIG_BYTES, ROWS, configure, copy_configuration
from ferryman_kernels.cpu._vectors import LANES, copy_numbers, row_at


@part
def _rows_of(q: Any, token: int, head: int, group: int, rows: int, size: int, laid: Any) -> None:
    """Lays rows of the queries from `token` on, `group` heads of each from `head` on."""
    for row in range(rows):
        query = q[token + row // group, head + row % group]
        copy_numbers(query, 0, laid, row * size, len(query))


@compiled
def _attend_one(
    split: Any, q: Any, kv_head: int, group: int, keys: Any, values: Any, sizes: Any, dims: Any,
    page_table: Any, scale: Any, score_cap: Any, room: Any, own_room: Any, partial: Any, at: int,
) -> None:  # fmt: skip
    """A job of decode: the heads of one query that read one head of keys, over one split."""
    (stride_page, page_size, step), (_, size, _, value_size) = sizes, dims
    (queries, seen, places, mixed), stride = own_room, value_size + LANES
    token, low, high = split[0], split[1], split[2]
    _rows_of(q, token, kv_head * group, group, group, size, queries)
    base = low // SPLIT * SPLIT
    lay_places(places, page_table[token], low, high, stride_page, page_size, kv_head, step)
    for row in range(group):
        seen[row, 0], seen[row, 1] = low - base, high - base
    # Two tiles write 32 rows, one as many as it has.
    rows = mixed if group > ROWS else partial[at:]
    attend_by_tiles(
        queries, group, seen, keys, values, places, dims, scale, score_cap, room, rows, stride
    )
    if group > ROWS:
        partial[at : at + group * stride] = mixed[: group * stride]


def _decode(
    shares: int, like: Any, q_address: int, q_size: Any, kv_heads: int, key_address: int,
    value_address: int, stride_page: int, page_size: int, indices: Any, table: int, pages: int,
    position_address: int, window_len: int, scale: Any, score_cap: Any, sinks: Any, y: int,
) -> None:  # fmt: skip
    """Arguments are those of `_paged_attention_compiled`'s loop."""
    dim, group, entries = q_size[2], q_size[1] // kv_heads, q_size[0] * pages
    q = row_at(q_address, like)[: q_size[0] * q_size[1] * dim].reshape(q_size)
    page_table = row_at(table, indices)[:entries].reshape(q_size[0], pages)
    splits = splits_of(row_at(position_address, indices)[: q_size[0]], window_len)
    keys, values = row_at(key_address, like), row_at(value_address, like)
    size, jobs = padded(dim, WIDTH), len(splits) * kv_heads
    stride, dims = size + LANES, (dim, size, dim, size)
    partial = np.empty(jobs * group * stride, np.float32)
    for share in prange(shares):
        before = np.empty(CONFIG_BYTES, np.uint8)
        copy_configuration(before)
        configure(tile_configuration(group))
        room, rows = tile_room(dims), padded(group, WIDTH)
        own_room = (
            np.zeros(rows * size, np.uint16), np.empty((group, 2), np.int64),
            np.empty(SPLIT, np.int64), np.empty(rows * stride, np.float32),
        )  # fmt: skip
        for job in range(np.int64(share), jobs, shares):
            _attend_one(
                splits[job // kv_heads], q, job % kv_heads, group, keys, values,
                (stride_page, page_size, dim), dims, page_table, scale, score_cap, room, own_room,
                partial, job * group * stride,
            )  # fmt: skip
        configure(before)
    join_all(splits, partial, size, stride, sinks, row_at(y, like), q_size)


decode_loop = Loop(_decode, STRICT)
