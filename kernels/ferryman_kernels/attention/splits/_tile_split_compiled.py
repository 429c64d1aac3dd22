"""Attention in bfloat16 for the CPU by tiles (AMX): prefill and decode multiply in one order.

Formulas and names are those of `paged_attention`; a job is a block of rows (heads of queries) that
read one head of keys. A split's keys and values are laid as the tiles' weights are, in pairs:

    keys      words[32 keys][pair of channels][32], a word is both channels of a pair of one key
    values    words[pair of keys][channels], a word is one channel of both keys of a pair

Scores are float32, weights are rounded to bfloat16 for the values. A tile's rows do not touch each
other: rows that see less than others of their tile have weights of zero there. So a row's bits are
those of its query alone, in decode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ferryman_kernels.attention.splits._attention_split_compiled import (
    LINE,
    SPLIT,
    soften,
)
from ferryman_kernels.cpu._compiled import compiled, numba, part
from ferryman_kernels.cpu._row_tiles import padded
from ferryman_kernels.cpu._tiles import (
    CONFIG_BYTES,
    ROWS,
    add_first_tokens,
    add_other_tokens,
    aligned_words,
    clear_sums,
    has_tiles,
)
from ferryman_kernels.cpu._vectors import (
    LANES,
    generated,
    in_each_lane,
    load,
    pointer_at,
    prefetch,
    row_at,
    shuffled,
    store_narrow,
)

if numba is not None:
    from llvmlite import ir
    from numba.core.cgutils import get_or_insert_function

WIDTH = 2 * ROWS
"""Rows of a group, keys of a block, and channels of one."""
_ROW_BYTES = 4 * WIDTH
AHEAD = 32
"""Keys from which the memory is asked for ahead."""


def takes_tiles(dtype: torch.dtype) -> bool:
    """Whether attention in `dtype` goes by tiles on this processor."""
    return dtype == torch.bfloat16 and has_tiles()


@part
def tile_configuration(rows: int) -> Any:
    """Tiles for blocks of so many rows: up to 16 in one tile, more in two."""
    config = np.zeros(CONFIG_BYTES, np.uint8)
    config[0] = 1
    for tile in range(8):
        config[16 + 2 * tile] = 64
        config[48 + tile] = ROWS
    config[48] = config[49] = config[52] = min(rows, ROWS)
    return config


@generated
def _store_first_rows(typing: Any, address: Any, stride: Any) -> Any:
    """_store_first_rows(address, stride): writes tiles 0 and 1 side by side to the memory there,
    `stride` bytes a row."""
    return _storing(0)


@generated
def _store_other_rows(typing: Any, address: Any, stride: Any) -> Any:
    """The same for tiles 2 and 3."""
    return _storing(2)


def _storing(first: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, name = ir.IntType(8), "llvm.x86.tilestored64"
        for side in range(2):
            place = builder.add(args[0], args[0].type(side * _ROW_BYTES // 2))
            call_args = byte(first + side), builder.inttoptr(place, byte.as_pointer()), args[1]
            signs = ir.FunctionType(ir.VoidType(), [arg.type for arg in call_args])
            builder.call(get_or_insert_function(builder.module, signs, name), call_args)
        return context.get_dummy_value()

    size = numba.types.intp
    return numba.types.void(size, size), generate


@generated
def _turn_words(typing: Any, rows: Any, places: Any, first: Any, words: Any, to: Any) -> Any:
    """_turn_words(rows, places, (low, channel), words, to): the words from `channel` on of the rows
    at places[low : low + 16] become columns: words[to + 32 · i + k] ← word i of row k."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, places, first, words, to = args
        low, channel = (builder.extract_value(first, i) for i in range(2))
        vector, turned = ir.VectorType(ir.IntType(32), LANES), []
        for row in range(LANES):
            index = builder.add(low, low.type(row))
            kind = signature.args[1]
            index_at = pointer_at(context, builder, kind, places, index, ir.IntType(64))
            place = builder.add(builder.load(index_at), channel)
            pointer = pointer_at(context, builder, signature.args[0], rows, place, vector)
            turned.append(builder.load(pointer, align=2))
        for bit in (8, 4, 2, 1):
            for row in (row for row in range(LANES) if not row & bit):
                a, b = turned[row], turned[row | bit]
                lower = [n + 16 - bit if n & bit else n for n in range(LANES)]
                upper = [n + 16 if n & bit else n + bit for n in range(LANES)]
                turned[row] = shuffled(builder, a, b, lower)
                turned[row | bit] = shuffled(builder, a, b, upper)
        for row, line in enumerate(turned):
            place = builder.add(to, to.type(row * WIDTH))
            pointer = pointer_at(context, builder, signature.args[3], words, place, vector)
            builder.store(line, pointer, align=4)
        return context.get_dummy_value()

    return numba.types.void(rows, places, first, words, numba.types.intp), generate


@generated
def _pair_rows(typing: Any, rows: Any, places: Any, masks: Any, words: Any, to: Any) -> Any:
    """_pair_rows(rows, (a, b), (lower, upper), words, to): words[to : to + 16] ← pairs of the
    numbers from rows[a] and rows[b] on, the first one in the lower half; masks are for them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, places, masks, words, to = args
        half, whole = (ir.VectorType(ir.IntType(bits), LANES) for bits in (16, 32))
        halves = []
        for index in range(2):
            place = builder.extract_value(places, index)
            pointer = pointer_at(context, builder, signature.args[0], rows, place, half)
            mask = in_each_lane(builder, builder.extract_value(masks, index), LANES)
            wide = builder.zext(builder.load(pointer, align=2), whole)
            halves.append(builder.and_(wide, mask))
        upper = builder.shl(halves[1], ir.Constant(whole, [16] * LANES))
        pointer = pointer_at(context, builder, signature.args[3], words, to, whole)
        builder.store(builder.or_(halves[0], upper), pointer, align=4)
        return context.get_dummy_value()

    return numba.types.void(rows, places, masks, words, numba.types.intp), generate


@part
def _ask_for_row(rows: Any, place: int, dim: int) -> None:
    for channel in range(0, dim, WIDTH):
        prefetch(rows, place + channel)


@part
def _lay_keys(
    keys: Any, places: Any, begin: int, end: int, dim: int, size: int, staged: Any, laid: Any
) -> None:
    """Lays a split's keys from `begin` to `end`, whose rows begin at their places. Rows that are no
    whole blocks of channels are staged."""
    rows, own_places = staged
    for low in range(begin // LANES * LANES, end, LANES):
        to = low // WIDTH * size // 2 * WIDTH + low % WIDTH
        for ahead in range(low + AHEAD, min(low + AHEAD + LANES, end)):
            _ask_for_row(keys, places[ahead], dim)
        if dim == size:
            for channel in range(0, size, WIDTH):
                _turn_words(keys, places, (low, channel), laid, to + channel // 2 * WIDTH)
            continue
        for row in range(LANES):
            source = places[low + row]
            for channel in range(0, dim // LANES * LANES, LANES):
                store_narrow(rows, row * size + channel, load(keys, source + channel))
            for channel in range(dim // LANES * LANES, dim):
                rows[row * size + channel] = keys[source + channel]
        for channel in range(0, size, WIDTH):
            _turn_words(rows, own_places, (0, channel), laid, to + channel // 2 * WIDTH)


@part
def _lay_values(
    values: Any, places: Any, begin: int, end: int, dim: int, size: int, laid: Any
) -> None:
    """The same for values, with zeros for the other keys of their blocks."""
    none, every = np.int32(0), np.int32(0xFFFF)
    for key in range(begin // WIDTH * WIDTH, padded(end, WIDTH), 2):
        target, a, b = key // 2 * size, places[key], places[key + 1]
        if key + AHEAD + 1 < end:
            _ask_for_row(values, places[key + AHEAD], dim)
            _ask_for_row(values, places[key + AHEAD + 1], dim)
        lower = every if key >= begin and key < end else none
        upper = every if key + 1 >= begin and key + 1 < end else none
        for channel in range(0, dim // LANES * LANES, LANES):
            _pair_rows(values, (a + channel, b + channel), (lower, upper), laid, target + channel)
        for channel in range(dim // LANES * LANES, dim):
            first = np.int32(values[a + channel]) & lower
            laid[target + channel] = first | (np.int32(values[b + channel]) & upper) << 16


@part
def _mix(
    laid: int, size: int, first: int, end: int, weights: int, others: bool, mixed: int, stride: int
) -> None:
    """The weighted values of the blocks from `first` to `end`, to up to 32 rows of `mixed`. Laid
    values, weights and rows are addresses, `stride` is bytes."""
    for channel in range(0, size, WIDTH):
        clear_sums()
        for block in range(first, end):
            pairs = laid + (block * ROWS * size + channel) * 4
            x = weights + block * WIDTH * 2
            add_first_tokens(pairs, size * 4, x, LINE * 4)
            if others:
                add_other_tokens(x + ROWS * LINE * 4, LINE * 4)
        _store_first_rows(mixed + channel * 4, stride)
        if others:
            _store_other_rows(mixed + channel * 4 + ROWS * stride, stride)


@part
def _score(
    laid: int, size: int, first: int, end: int, queries: int, others: bool, scores: int
) -> None:
    """The scores of the keys of the blocks from `first` to `end` by up to 32 rows."""
    for block in range(first, end):
        clear_sums()
        for channel in range(0, size, WIDTH):
            pairs, x = laid + (block * size + channel) // 2 * _ROW_BYTES, queries + channel * 2
            add_first_tokens(pairs, _ROW_BYTES, x, size * 2)
            if others:
                add_other_tokens(x + ROWS * size * 2, size * 2)
        _store_first_rows(scores + block * _ROW_BYTES, LINE * 4)
        if others:
            _store_other_rows(scores + block * _ROW_BYTES + ROWS * LINE * 4, LINE * 4)


@part
def _is_finite(row: Any, at: int, count: int) -> bool:
    is_finite = True
    for channel in range(at, at + count):
        is_finite = is_finite and abs(row[channel]) < np.inf
    return is_finite


@part
def _soften_rows(
    seen: Any, first: int, stop: int, scale: Any, score_cap: Any, scores: Any, halves: Any,
    mixed: Any, at: int, stride: int,
) -> None:  # fmt: skip
    """Turns the scores of a group's rows into weights in bfloat16, which are zero for the keys of
    the blocks from `first` to `stop` that a row does not see. A row's peak and sum of weights go to
    mixed[at + row · stride] and the next number."""
    for row in range(len(seen)):
        low, high, target = seen[row, 0], seen[row, 1], at + row * stride
        # Views that numba counts would take as long as a few keys.
        weights = row_at(halves.ctypes.data + row * LINE * 4, halves)
        mixed[target], mixed[target + 1] = -np.inf, 0
        if low < high:
            line = row_at(scores.ctypes.data + row * LINE * 4, scores)
            peak, norm = soften(line, low, high, scale, score_cap, weights)
            mixed[target], mixed[target + 1] = peak, norm
        else:
            low = high = first * WIDTH
        for key in range(first * WIDTH, low // LANES * LANES):
            weights[key] = 0
        for key in range(padded(high, LANES), stop * WIDTH):
            weights[key] = 0


@part
def _mix_alone(
    seen: Any, values: Any, places: Any, dims: Any, room: Any, mixed: Any, at: int, stride: int
) -> None:
    """Multiplies each row of a group with the values that it sees alone: a weight of zero does not
    keep a value that is NaN or infinite from any row."""
    (_, _, dim, size), (_, _, laid_values, scores, _, mixed_alone) = dims, room
    for row in range(len(seen)):
        low, high = seen[row, 0], seen[row, 1]
        if low < high:
            _lay_values(values, places, low, high, dim, size, laid_values)
            _mix(
                laid_values.ctypes.data, size, low // WIDTH, -(-high // WIDTH), scores.ctypes.data,
                len(seen) > ROWS, mixed_alone.ctypes.data, size * 4,
            )  # fmt: skip
            for channel in range(size):
                mixed[at + row * stride + channel] = mixed_alone[row * size + channel]


@compiled
def attend_by_tiles(
    queries: Any, rows: int, seen: Any, keys: Any, values: Any, places: Any, dims: Any, scale: Any,
    score_cap: Any, room: Any, mixed: Any, stride: int,
) -> None:  # fmt: skip
    """Does what `attend_by_vectors` does, with memory of `tile_room` and tiles that are configured
    for so many rows. Up to 16 rows are as many in `mixed`, more are padded to 32."""
    dim, size, value_dim, value_size = dims
    staged, laid_keys, laid_values, scores, halves, _ = room
    begin, end = seen[0, 0], seen[rows - 1, 1]
    for key in range(begin, min(begin + AHEAD, end)):
        _ask_for_row(values, places[key], value_dim)
    _lay_keys(keys, places, begin, end, dim, size, staged, laid_keys)
    _lay_values(values, places, begin, end, value_dim, value_size, laid_values)
    for group in range(0, rows, WIDTH):
        last = min(group + WIDTH, rows)
        first, stop = seen[group, 0] // WIDTH, -(-seen[last - 1, 1] // WIDTH)
        others, at, group_seen = last - group > ROWS, group * stride, seen[group:last]
        x = queries.ctypes.data + group * size * 2
        _score(laid_keys.ctypes.data, size, first, stop, x, others, scores.ctypes.data)
        _soften_rows(
            group_seen, first, stop, scale, score_cap, scores, halves, mixed, at + value_size,
            stride,
        )  # fmt: skip
        _mix(
            laid_values.ctypes.data, value_size, first, stop, scores.ctypes.data, others,
            mixed.ctypes.data + at * 4, stride * 4,
        )  # fmt: skip
        if not _is_finite(mixed, (last - 1) * stride, value_dim):
            _mix_alone(group_seen, values, places, dims, room, mixed, at, stride)
            _lay_values(values, places, begin, end, value_dim, value_size, laid_values)


@part
def tile_room(dims: Any) -> Any:
    """The memory of one thread: staged keys, laid keys and values, scores and weights, rows."""
    (_, size, value_dim, value_size), scores = dims, aligned_words(WIDTH * LINE).view(np.float32)
    laid_values = aligned_words(SPLIT * value_size // 2)
    if value_dim < value_size:
        laid_values[:] = 0
    return (
        (np.zeros(LANES * size, np.uint16), np.arange(LANES) * size),
        aligned_words(SPLIT * size // 2),
        laid_values,
        scores,
        scores.view(np.uint16),
        np.empty(WIDTH * value_size, np.float32),
    )
