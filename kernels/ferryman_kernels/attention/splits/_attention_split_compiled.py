"""Attention of the heads of a group over one split of a request's keys, for compiled loops.

A group's `scores` are `group` lines of `LINE` numbers; `mixed` is its rows of weighted values. The
heads of a group are taken two at a time, so that a key or a value is loaded, and widened if it is
bfloat16, once for both. Keys are taken four at a time, because the sums of four dot products are
joined in half of the steps that four sums would take.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ferryman_kernels.cpu._compiled import compiled, exp, narrow, part, wide
from ferryman_kernels.cpu._row_tiles import padded
from ferryman_kernels.cpu._vectors import (
    LANES,
    exps,
    fused,
    greater,
    greatest,
    load,
    multiplied,
    plus,
    prefetch,
    quotient,
    spread,
    store,
    store_narrow,
    store_totals,
    total,
)

SPLIT = 512
"""Keys of one split. Splits begin at multiples of it, counted from a request's position 0, so the
bits of an answer depend neither on the batch nor on the threads."""
LINE = SPLIT + LANES
"""Room for the scores of a split, and for what is stored behind the last of them."""
AHEAD = 16
"""Keys from which the memory is asked for ahead; measured: 8 to 16 are the best of 4 to 32."""
_PADDED = 32
"""Keys to whole numbers of which places are padded."""
BLOCK = 4 * LANES
"""Channels of a value that are mixed in registers."""


@compiled
def splits_of(positions: Any, window_len: int) -> Any:
    """Rows (token, first key, last key + 1, keys of the rows before), a query's splits in order.

    A query at a negative position has none.
    """
    count = 0
    for position in positions:
        first = max(0, position + 1 - window_len) if window_len > 0 else 0
        count += position // SPLIT - first // SPLIT + 1 if position >= 0 else 0
    rows = np.empty((count, 4), np.int64)
    row, before = 0, 0
    for token in range(len(positions)):
        end = positions[token] + 1
        low = max(0, end - window_len) if window_len > 0 else 0
        while low < end:
            high = min(end, (low // SPLIT + 1) * SPLIT)
            rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3] = token, low, high, before
            row, before, low = row + 1, before + high - low, high
    return rows


@part
def keys_in_page(
    pages: Any, position: int, high: int, stride_page: int, page_size: int, kv_head: int,
    head_dim: int,
) -> tuple[int, int]:  # fmt: skip
    """The place of the key at `position` of a head, and the keys from there to the page's end, or
    to `high`."""
    offset = position % page_size
    at = pages[position // page_size] * stride_page + (kv_head * page_size + offset) * head_dim
    return at, min(high - position, page_size - offset)


@part
def lay_places(
    places: Any, page_table: Any, low: int, high: int, stride_page: int, page_size: int,
    kv_head: int, step: int,
) -> None:  # fmt: skip
    """places[position % SPLIT] ← where the row of each position from `low` to `high` begins. Beside
    them, to whole blocks, are those of the first and of the last one."""
    position = low
    while position < high:
        at, count = keys_in_page(page_table, position, high, stride_page, page_size, kv_head, step)
        for row in range(count):
            places[position % SPLIT + row] = at + row * step
        position += count
    first, end = low % SPLIT, (high - 1) % SPLIT + 1
    for key in range(first // _PADDED * _PADDED, first):
        places[key] = places[first]
    for key in range(end, padded(end, _PADDED)):
        places[key] = places[end - 1]


@part
def score_keys(
    q: Any, group: int, head_dim: int, keys: Any, at: int, count: int, scores: Any, first: int
) -> None:
    """Scores of the `count` keys from keys[at] on, all of one page, by each row of `q`.

    Those of head `member` go to scores[member · LINE + first] and behind; up to three more numbers
    are spoilt there.
    """
    last, line_size = at + (count - 1) * head_dim, 64 // keys.itemsize
    for key in range(0, count, 4):
        k0 = at + key * head_dim
        for ahead in range(0, 4 * head_dim, line_size):
            prefetch(keys, k0 + AHEAD * head_dim + ahead)
        k1, k2 = min(k0 + head_dim, last), min(k0 + 2 * head_dim, last)
        k3 = min(k0 + 3 * head_dim, last)
        for member in range(0, group - 1, 2):
            line = member * LINE + first + key
            _score_two(q, member * head_dim, head_dim, keys, k0, k1, k2, k3, scores, line)
        if group % 2 == 1:
            line = (group - 1) * LINE + first + key
            _score_one(q, (group - 1) * head_dim, head_dim, keys, k0, k1, k2, k3, scores, line)
    # Channels beyond a multiple of 16: no published model has them, tiny ones in tests do.
    for channel in range(head_dim // LANES * LANES, head_dim):
        for member in range(group):
            query, line = q[member * head_dim + channel], member * LINE + first
            for key in range(count):
                number = wide(keys[at + key * head_dim + channel])
                scores[line + key] = fused(query, number, scores[line + key])


@part
def _score_two(
    q: Any, at: int, head_dim: int, keys: Any,
    k0: int, k1: int, k2: int, k3: int, scores: Any, line: int,
) -> None:  # fmt: skip
    """Scores of four keys by the two heads from q[at] on."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread(q.dtype.type(0))
    for channel in range(0, head_dim // LANES * LANES, LANES):
        a, b = load(q, at + channel), load(q, at + head_dim + channel)
        key = load(keys, k0 + channel)
        a0, b0 = fused(a, key, a0), fused(b, key, b0)
        key = load(keys, k1 + channel)
        a1, b1 = fused(a, key, a1), fused(b, key, b1)
        key = load(keys, k2 + channel)
        a2, b2 = fused(a, key, a2), fused(b, key, b2)
        key = load(keys, k3 + channel)
        a3, b3 = fused(a, key, a3), fused(b, key, b3)
    store_totals(scores, line, a0, a1, a2, a3)
    store_totals(scores, line + LINE, b0, b1, b2, b3)


@part
def _score_one(
    q: Any, at: int, head_dim: int, keys: Any,
    k0: int, k1: int, k2: int, k3: int, scores: Any, line: int,
) -> None:  # fmt: skip
    """The same by one head."""
    a0 = a1 = a2 = a3 = spread(q.dtype.type(0))
    for channel in range(0, head_dim // LANES * LANES, LANES):
        a = load(q, at + channel)
        a0 = fused(a, load(keys, k0 + channel), a0)
        a1 = fused(a, load(keys, k1 + channel), a1)
        a2 = fused(a, load(keys, k2 + channel), a2)
        a3 = fused(a, load(keys, k3 + channel), a3)
    store_totals(scores, line, a0, a1, a2, a3)


@part
def soften(line: Any, first: int, end: int, scale: Any, score_cap: Any, weights: Any) -> Any:
    """Turns scale · line[first : end] into weights exp(score - peak); returns the peak and their
    sum, whose lanes are those of the line: a split's keys have the same ones for every query.

    `weights` may be the line's own memory, in bfloat16 too. Where every score is -inf the weights
    are 0: such a split adds nothing, though the others may have a finite peak. NaN makes weights
    NaN, whether it is the peak or not.
    """
    begin, whole = first // LANES * LANES, -(-end // LANES) * LANES
    zero, unit, two = line.dtype.type(0), line.dtype.type(1), line.dtype.type(2)
    factor = spread(unit if score_cap > 0 else scale)
    if score_cap > 0:  # score_cap · tanh(score / score_cap)
        for key in range(first, end):
            swing = exp(two * (line[key] * scale) / score_cap) + unit
            line[key] = score_cap - two * score_cap / swing
    # Numbers beside the first and the last score share their vectors, and must add nothing.
    for key in range(begin, first):
        line[key] = -np.inf
    for key in range(end, whole):
        line[key] = -np.inf
    none = spread(-zero)
    high = fused(load(line, begin), factor, none)
    for key in range(begin + LANES, whole, LANES):
        high = greater(fused(load(line, key), factor, none), high)
    peak = greatest(high)
    base, norm = spread(zero if peak == -np.inf else -peak), spread(zero)
    for key in range(begin, whole, LANES):
        weight = exps(fused(load(line, key), factor, base))
        store_narrow(weights, key, weight)
        norm = fused(weight, spread(unit), norm)
    return peak, total(norm)


@part
def join_splits(
    partial: Any, at: int, step: int, count: int, size: int, sink: Any, out: Any, to: int, dim: int
) -> None:
    """out[to : to + dim] ← Σ exp(peak - top)·mixed / (Σ exp(peak - top)·norm + exp(sink - top)), in
    order.

    The first of `count` splits has its weighted values at partial[at], its peak and sum of weights
    `size` numbers on; the next split's are `step` numbers on. Shares are written over the peaks.
    """
    zero, top = partial.dtype.type(0), sink
    for split in range(count):
        peak = partial[at + split * step + size]
        top = peak if peak > top else top
    norm = zero
    for split in range(count):
        row = at + split * step + size
        partial[row] = exp(partial[row] - top)
        norm += partial[row] * partial[row + 1]
    norm += exp(sink - top)
    whole, divisor = dim // LANES * LANES, spread(norm)
    for channel in range(0, whole, LANES):
        mixed = spread(zero)
        for split in range(count):
            row = at + split * step
            added = multiplied(spread(partial[row + size]), load(partial, row + channel))
            mixed = plus(mixed, added)
        # A query without keys, which pads a batch, has no norm and gets zeros.
        store_narrow(out, to + channel, quotient(mixed, divisor) if count > 0 else mixed)
    for channel in range(whole, dim):
        number = zero
        for split in range(count):
            row = at + split * step
            number += partial[row + size] * partial[row + channel]
        out[to + channel] = narrow(number / norm if count > 0 else zero, out)


@compiled
def join_all(
    splits: Any, partial: Any, size: int, stride: int, sinks: Any, out: Any, out_size: Any
) -> None:
    """Joins what each of decode's splits left for each head in its `stride` numbers; `out` is flat,
    of (tokens, q_heads, head_dim)."""
    tokens, q_heads, head_dim = out_size
    begin = 0
    for token in range(tokens):
        end = begin
        while end < len(splits) and splits[end, 0] == token:
            end += 1
        for head in range(q_heads):
            at, step = (begin * q_heads + head) * stride, q_heads * stride
            to = (token * q_heads + head) * head_dim
            join_splits(partial, at, step, end - begin, size, sinks[head], out, to, head_dim)
        begin = end


@part
def mix_values(
    weights: Any, first: int, group: int, head_dim: int, values: Any, at: int, count: int,
    mixed: Any, row: int, width: int,
) -> None:  # fmt: skip
    """Adds the `count` weighted values from values[at] on, all of one page, to `group` rows.

    Those of head `member` are mixed[row + member · width :]; its weights begin at
    weights[member · LINE + first].
    """
    blocks = head_dim // BLOCK * BLOCK
    for member in range(0, group - 1, 2):
        line, target = member * LINE + first, row + member * width
        for low in range(0, blocks, BLOCK):
            _mix_two(weights, line, values, at + low, head_dim, count, mixed, target + low, width)
    if group % 2 == 1:
        line, target = (group - 1) * LINE + first, row + (group - 1) * width
        for low in range(0, blocks, BLOCK):
            _mix_one(weights, line, values, at + low, head_dim, count, mixed, target + low)
    # The rest of 80 or 96 channels goes vector by vector, then number by number.
    for member in range(group):
        line, target = member * LINE + first, row + member * width
        for low in range(blocks, head_dim // LANES * LANES, LANES):
            sums = load(mixed, target + low)
            for key in range(count):
                value = load(values, at + key * head_dim + low)
                sums = fused(spread(weights[line + key]), value, sums)
            store(mixed, target + low, sums)
        for channel in range(head_dim // LANES * LANES, head_dim):
            number = mixed[target + channel]
            for key in range(count):
                value = wide(values[at + key * head_dim + channel])
                number = fused(weights[line + key], value, number)
            mixed[target + channel] = number


@part
def _mix_two(
    weights: Any, line: int, values: Any, at: int, head_dim: int, count: int,
    mixed: Any, row: int, width: int,
) -> None:  # fmt: skip
    """A block of channels, for two heads."""
    other = row + width
    # Eight sums stay in registers while the keys pass: an array would be written for each key.
    a0, a1 = load(mixed, row), load(mixed, row + LANES)
    a2, a3 = load(mixed, row + 2 * LANES), load(mixed, row + 3 * LANES)
    b0, b1 = load(mixed, other), load(mixed, other + LANES)
    b2, b3 = load(mixed, other + 2 * LANES), load(mixed, other + 3 * LANES)
    for key in range(count):
        a, b = spread(weights[line + key]), spread(weights[line + LINE + key])
        start = at + key * head_dim
        value = load(values, start)
        a0, b0 = fused(a, value, a0), fused(b, value, b0)
        value = load(values, start + LANES)
        a1, b1 = fused(a, value, a1), fused(b, value, b1)
        value = load(values, start + 2 * LANES)
        a2, b2 = fused(a, value, a2), fused(b, value, b2)
        value = load(values, start + 3 * LANES)
        a3, b3 = fused(a, value, a3), fused(b, value, b3)
    store(mixed, row, a0)
    store(mixed, row + LANES, a1)
    store(mixed, row + 2 * LANES, a2)
    store(mixed, row + 3 * LANES, a3)
    store(mixed, other, b0)
    store(mixed, other + LANES, b1)
    store(mixed, other + 2 * LANES, b2)
    store(mixed, other + 3 * LANES, b3)


@part
def _mix_one(
    weights: Any, line: int, values: Any, at: int, head_dim: int, count: int, mixed: Any, row: int
) -> None:
    """The same for one head."""
    a0, a1 = load(mixed, row), load(mixed, row + LANES)
    a2, a3 = load(mixed, row + 2 * LANES), load(mixed, row + 3 * LANES)
    for key in range(count):
        a, start = spread(weights[line + key]), at + key * head_dim
        a0 = fused(a, load(values, start), a0)
        a1 = fused(a, load(values, start + LANES), a1)
        a2 = fused(a, load(values, start + 2 * LANES), a2)
        a3 = fused(a, load(values, start + 3 * LANES), a3)
    store(mixed, row, a0)
    store(mixed, row + LANES, a1)
    store(mixed, row + 2 * LANES, a2)
    store(mixed, row + 3 * LANES, a3)
