"""Attention of rows over one split of a request's keys by vectors, for compiled loops.

A row is one head of one query. A split's keys and values are laid in order in float32, and then
pass all rows, four rows at a time, in parts that the nearest cache holds. A row's sums have the
order of decode (`_attention_split_compiled`): it adds the keys that it sees and no others, so its
bits depend neither on the block nor on the other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ferryman_kernels.attention.splits._attention_split_compiled import LINE, SPLIT, soften
from ferryman_kernels.cpu._compiled import compiled, part, wide
from ferryman_kernels.cpu._lanes import LANES as WIDTH
from ferryman_kernels.cpu._lanes import add_scaled, lanes_at
from ferryman_kernels.cpu._row_tiles import ROWS, add_rows, padded, rows_at, store_rows
from ferryman_kernels.cpu._vectors import (
    LANES,
    fused,
    load,
    spread,
    store,
    store_totals,
)

GROUP = 64
"""Rows whose scores are in memory at once."""
PART = 4096
"""The numbers of keys, or of values, that pass all rows before the next ones: 16 KiB."""


@part
def _lay_rows(rows: Any, places: Any, begin: int, end: int, dim: int, size: int, laid: Any) -> None:
    """Widens a split's rows from `begin` to `end`, which begin at their places."""
    for key in range(begin, end):
        source, target = places[key], key * size
        for channel in range(0, dim // LANES * LANES, LANES):
            store(laid, target + channel, load(rows, source + channel))
        for channel in range(dim // LANES * LANES, dim):
            laid[target + channel] = wide(rows[source + channel])


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
        low, last = max(first, seen[row, 0]), min(end, seen[row, 1], begin)
        _mix_row(weights, line + row * LINE, values, size, low, last, mixed, at + row * width)
    for channel in range(0, size, WIDTH):
        sums = rows_at(mixed, at + channel, width)
        places = begin * size + channel, size, 1, LINE
        sums = add_rows(sums, values, places, weights, line + begin, stop - begin)
        store_rows(mixed, at + channel, width, sums)
    for row in range(ROWS):
        low, last = max(first, seen[row, 0], stop), min(end, seen[row, 1])
        _mix_row(weights, line + row * LINE, values, size, low, last, mixed, at + row * width)


@compiled
def attend_by_vectors(
    queries: Any, rows: int, seen: Any, keys: Any, values: Any, places: Any, dims: Any, scale: Any,
    score_cap: Any, room: Any, mixed: Any, stride: int,
) -> None:  # fmt: skip
    """Attention of rows over the keys that they see of one split: seen[row, 0] to seen[row, 1],
    neither of which falls from a row to the next. Rows are padded to four by the last one.

    A row of `mixed`, each `stride` numbers, gets its weighted values, its peak and its sum of
    weights. `room` is memory of `vector_room`.
    """
    (dim, size, value_dim, value_size), (laid_keys, laid_values, scores) = dims, room
    all_rows, part_keys = padded(rows, ROWS), max(LANES, PART // dim)
    begin, end = seen[0, 0], seen[rows - 1, 1]
    _lay_rows(keys, places, begin, end, dim, dim, laid_keys)
    _lay_rows(values, places, begin, end, value_dim, value_size, laid_values)
    for group in range(0, all_rows, GROUP):
        stop = min(group + GROUP, all_rows)
        for first in range(begin, end, part_keys):
            for row in range(group, stop, ROWS):
                low = max(first, seen[row, 0])
                high = min(first + part_keys, end, seen[row + ROWS - 1, 1])
                if low < high:
                    line = (row - group) * LINE
                    _score_rows(queries, row * size, dim, laid_keys, low, high, scores, line)
        for row in range(group, stop):
            target = row * stride + value_size
            mixed[target - value_size : target] = 0
            mixed[target], mixed[target + 1] = -np.inf, 0
            if seen[row, 0] < seen[row, 1]:
                line = scores[(row - group) * LINE : (row - group + 1) * LINE]
                peak, norm = soften(line, seen[row, 0], seen[row, 1], scale, score_cap, line)
                mixed[target], mixed[target + 1] = peak, norm
        for first in range(begin, end, part_keys):
            for row in range(group, stop, ROWS):
                tile_seen, last = seen[row : row + ROWS], min(first + part_keys, end)
                if max(first, tile_seen[0, 0]) < min(last, tile_seen[ROWS - 1, 1]):
                    _mix_rows(
                        scores, (row - group) * LINE, laid_values, value_size, tile_seen, first,
                        last, mixed, row * stride, stride,
                    )  # fmt: skip


@part
def vector_room(dims: Any) -> Any:
    """The memory of one thread: laid keys, laid values, scores."""
    return (
        np.empty(SPLIT * dims[0], np.float32),
        np.zeros(SPLIT * dims[3], np.float32),
        np.empty(GROUP * LINE, np.float32),
    )
