"""The arithmetic of attention by tiles (AMX) over one split, held on processors that have none.

Weighted values, peak and sum of weights of each row are float32, so every order of sums shows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.kernels.tile_attention import (
    SPLIT,
    AttendedSplit,
    Halves,
    Softening,
    attended_split,
    joined,
    softened,
)
from tests.kernels.tile_processor import needs_tiles, on_tiles
from tests.kernels.vector_parts import Floats, rounded

from ferryman_kernels.attention.splits import _attention_split_compiled, _tile_split_compiled
from ferryman_kernels.attention.splits._tile_split_compiled import tile_configuration, tile_room
from ferryman_kernels.cpu._compiled import compiled
from ferryman_kernels.cpu._row_tiles import padded
from ferryman_kernels.cpu._tiles import CONFIG_BYTES, configure, copy_configuration

Seen = list[tuple[int, int]]
"""The keys of the split from and to which each row sees."""

ROWS: dict[str, Seen] = {
    "a row from the middle of a block": [(37, 70)],
    "the last keys of a split": [(495, SPLIT)],
    "sixteen heads of a token": [(0, 33)] * 16,
    "seventeen heads of a token": [(17, 97)] * 17,
    "tokens of a window": [(3 + token, 20 + token) for token in range(0, 40, 2) for _ in range(2)],
    "tokens that see none": [(0, 0)] * 3 + [(0, last) for last in range(1, 8)],
    "tokens past the window": [(500 + token, SPLIT) for token in range(13)] + [(SPLIT, SPLIT)] * 9,
}
DIMS = [(64, 64), (40, 40), (80, 80), (72, 48)]
"""Channels of a key and of a value. The last ones are of a latent, whose values are its rows."""


class DrawnSplit(NamedTuple):
    """A split's keys and values in memory, NaN between them, and its queries."""

    q: Halves
    keys: Halves
    values: Halves
    places: NDArray[np.int64]
    softening: Softening


def drawn(seen: Seen, dims: tuple[int, int], cap: float = 0.0) -> DrawnSplit:
    draw = np.random.default_rng(len(seen) + dims[0])
    begin, end = seen[0][0], seen[-1][1]
    q = draw.standard_normal((len(seen), dims[0]), np.float32)
    rows = np.full((2, 2 * SPLIT, dims[0]), np.nan, np.float32)
    order = draw.permutation(2 * SPLIT)
    for kind in range(2):
        rows[kind, order[begin:end]] = draw.standard_normal((end - begin, dims[0]), np.float32)
    places = np.zeros(SPLIT, np.int64)
    near = slice(begin // 32 * 32, padded(end, 32))
    places[near] = order[np.clip(np.arange(near.start, near.stop), begin, end - 1)] * dims[0]
    keys, values = rounded(rows)
    softening = Softening(dims[0] ** -0.5, cap)
    return DrawnSplit(rounded(q), keys, keys if dims[1] < dims[0] else values, places, softening)


def expected(split: DrawnSplit, seen: Seen, value_dim: int) -> Floats:
    """Of each row the weighted values, its peak, its sum of weights."""
    rows, dim = [], split.q.shape[1]
    for query, (low, high) in zip(split.q, seen, strict=True):
        if low == high:
            rows.append(np.array([0] * value_dim + [-np.inf, 0], np.float32))
            continue
        at = split.places[low:high] // dim
        own = split.keys[at], split.values[at, :value_dim], (low, high)
        row = attended_split(query[None], *own, split.softening)
        rows.append(np.concatenate([row.mixed[0], row.peaks, row.norms]))
    return np.array(rows)


def found(split: DrawnSplit, seen: Seen, value_dim: int, attend: Any) -> Floats:
    """The same by a loop, whose rows are padded."""
    (rows, dim), all_rows = split.q.shape, padded(len(seen), 32)
    size, value_size = padded(dim, 32), padded(value_dim, 32)
    queries = np.zeros((all_rows, size), np.uint16)
    queries[:rows, :dim] = split.q
    queries[rows:, :dim] = split.q[-1]
    all_seen = np.array(seen + seen[-1:] * (all_rows - rows), np.int64)
    dims, stride = (dim, size, value_dim, value_size), value_size + 16
    mixed = np.full(all_rows * stride, np.nan, np.float32)
    attend(
        queries.reshape(-1), rows, all_seen, split.keys.reshape(-1), split.values.reshape(-1),
        split.places, dims, np.float32(split.softening.scale), np.float32(split.softening.cap),
        tile_room(dims), mixed, stride,
    )  # fmt: skip
    lines = mixed.reshape(all_rows, stride)[:rows]
    return np.concatenate([lines[:, :value_dim], lines[:, value_size : value_size + 2]], 1)


def by_numpy(queries: Any, rows: int, *args: Any) -> None:
    with on_tiles(_tile_split_compiled, _attention_split_compiled) as processor:
        processor.configure(tile_configuration(rows))
        _tile_split_compiled.attend_by_tiles(queries, rows, *args)


@compiled
def by_processor(
    queries: Any, rows: Any, seen: Any, keys: Any, values: Any, places: Any, dims: Any, scale: Any,
    score_cap: Any, room: Any, mixed: Any, stride: Any,
) -> None:  # fmt: skip
    before = np.empty(CONFIG_BYTES, np.uint8)
    copy_configuration(before)
    configure(tile_configuration(rows))
    _tile_split_compiled.attend_by_tiles(
        queries, rows, seen, keys, values, places, dims, scale, score_cap, room, mixed, stride
    )
    configure(before)


LOOPS = [
    pytest.param(by_numpy, id="numpy"),
    pytest.param(by_processor, id="processor", marks=needs_tiles),
]
each_loop = pytest.mark.parametrize("attend", LOOPS)


@each_loop
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_a_split_has_the_order_of_tiles(name: str, dims: tuple[int, int], attend: Any) -> None:
    seen = ROWS[name]
    split = drawn(seen, dims)
    right = expected(split, seen, dims[1])
    assert np.array_equal(found(split, seen, dims[1], attend), right, equal_nan=True)
    assert np.isfinite(right[:, : dims[1]]).all()


@each_loop
def test_capped_scores_have_it(attend: Any) -> None:
    seen, dims = ROWS["tokens of a window"], (64, 64)
    split = drawn(seen, dims, cap=2.0)
    assert np.array_equal(found(split, seen, 64, attend), expected(split, seen, 64))


@each_loop
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("key", [10, 11, 46, 47])
def test_rows_beside_no_number_have_it_alone(key: int, number: float, attend: Any) -> None:
    """A weight of zero times infinity is NaN, so each row takes the values that it sees alone: some
    are past this key, or not there yet, in the block that it is in."""
    seen = ROWS["tokens of a window"]
    split = drawn(seen, (40, 40))
    split.values[split.places[key] // 40, 5] = rounded(np.array([number]))[0]
    right = expected(split, seen, 40)
    assert np.array_equal(found(split, seen, 40, attend), right, equal_nan=True)
    sees = [low <= key < high for low, high in seen]
    assert (~np.isfinite(right[:, 5])).tolist() == sees
    assert True in sees
    assert False in sees


@pytest.mark.parametrize("by", ["numpy", "compiler"])
@pytest.mark.parametrize("dim", [40, 64])
def test_splits_are_joined_in_rising_order_and_the_sink_is_last(dim: int, by: str) -> None:
    """Here the answer is not rounded to bfloat16, so the order shows. Joining needs no tiles."""
    draw, heads, size = np.random.default_rng(dim), 2, padded(dim, 32)
    partial = draw.standard_normal((3, heads, size + 16), np.float32)
    partial[:, :, size + 1] = draw.random((3, heads)) * 300
    sinks = draw.standard_normal(heads, np.float32)
    splits = [AttendedSplit(row[:, :dim], row[:, size], row[:, size + 1]) for row in partial]
    right = joined(splits, sinks)
    tokens, out = np.zeros((3, 4), np.int64), np.zeros(heads * dim, np.float32)
    with on_tiles(*[_attention_split_compiled] * (by == "numpy")):
        _attention_split_compiled.join_all(
            tokens, partial.reshape(-1), size, size + 16, sinks, out, (1, heads, dim)
        )
    assert np.array_equal(out.reshape(heads, dim), right)


@compiled
def by_compiler(line: Any, first: Any, end: Any, scale: Any, cap: Any, weights: Any) -> Any:
    return _attention_split_compiled.soften(line, first, end, scale, cap, weights)


def softened_by_numpy(*args: Any) -> Any:
    with on_tiles(_attention_split_compiled):
        return _attention_split_compiled.soften(*args)


@pytest.mark.parametrize("soften", [softened_by_numpy, by_compiler], ids=["numpy", "compiler"])
@pytest.mark.parametrize("cap", [0.0, 9.0])
@pytest.mark.parametrize(("first", "end"), [(0, SPLIT), (37, 70), (500, 501)])
def test_weights_of_a_split_have_its_lanes(first: int, end: int, cap: float, soften: Any) -> None:
    """Those of scores far below the peak are zero. Softening needs no tiles."""
    line = np.random.default_rng(end).standard_normal(SPLIT + 16).astype(np.float32) * 99
    line[first + 1 : end : 9] = -np.inf
    right = softened(line[None, first:end], first, Softening(0.3, cap))
    weights = np.zeros(SPLIT + 16, np.uint16)
    peak, norm = soften(line, first, end, np.float32(0.3), np.float32(cap), weights)
    assert (peak, norm) == (right.peaks[0], right.norms[0])
    assert np.array_equal(weights[first:end], rounded(right.weights[0]))
