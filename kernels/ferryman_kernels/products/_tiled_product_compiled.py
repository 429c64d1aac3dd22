"""The packed product of many tokens by tiles, with copies of its operands that lie as tiles do.

Formulas and names are those of `packed_product`, tiles those of `_near_tiles`. 32 tokens are a
pair of tiles, 32 outputs a half of a panel. All inputs are copied once. Their blocks are taken in
runs: a run of a half of a panel is copied to the nearest cache, and all pairs of a slice of the
tokens are multiplied by it before the next half's. The sums of a group of halves wait in memory
between two runs, as they are in tiles. So each is added to block by block in the order of the
inputs, as it is by `_panel_sums` for few tokens, and has the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ferryman_kernels.cpu._compiled import STRICT, Loop, narrow, part, prange, wide
from ferryman_kernels.cpu._lanes import LANES, STEP_BYTES, half_at, store_rounded
from ferryman_kernels.cpu._near_tiles import (
    BLOCK_BYTES,
    LINE_BYTES,
    add_near_half,
    add_near_tokens,
    ask_for_row,
    copy_line,
    copy_weights,
    load_sums,
)
from ferryman_kernels.cpu._tiles import (
    CONFIG_BYTES,
    ROWS,
    aligned_words,
    clear_sums,
    configure,
    copy_configuration,
    store_sums,
    tile_configuration,
)
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.cpu.launches import for_many_tokens

_MANY_TOKENS, _MANY_OUTPUTS = 192, 256
_PAIR, _HALF = 2 * ROWS, LANES // 2
_SUMS = _PAIR * _HALF
_SUM_BYTES = 4 * _HALF  # of a token
_PANEL_BLOCK_BYTES = ROWS * STEP_BYTES
# The nearest cache holds the longest run, 40 KiB; the second one a slice's inputs of it and the
# sums of a group, 0.7 and 0.5 MiB.
_LONGEST_RUN, _SLICE_PAIRS, _GROUP = 20, 16, 8


def repays_copies(tokens: int, out_dim: int) -> bool:
    """Whether a product of such a size is quicker with copies."""
    return out_dim >= _MANY_OUTPUTS and (tokens >= _MANY_TOKENS or for_many_tokens.get())


@part
def _cut(count: Any, most: Any) -> Any:
    """The length of the fewest equal parts of at most so many each."""
    parts = (count + most - 1) // most
    return (count + parts - 1) // parts


@part
def _copy_pair(
    x: Any, stride: Any, tokens: Any, blocks: Any, run: Any, pairs: Any, pair: Any, copied: Any
) -> None:
    """Copies the inputs of a pair: copied[run][pair][block], of as many blocks as a run has.
    Memory behind the last token is multiplied too, and written nowhere."""
    for row in range(min(_PAIR, tokens - pair * _PAIR)):
        source = x + (pair * _PAIR + row) * stride
        for first in range(0, blocks, run):
            length = min(run, blocks - first)
            to = copied + (first * pairs + pair * length) * BLOCK_BYTES + row * LINE_BYTES
            for block in range(length):
                copy_line(source + (first + block) * LINE_BYTES, to + block * BLOCK_BYTES)


@part
def _room(run: Any, is_one_run: Any) -> Any:
    """A thread's memory: a run of a half of a panel, the sums of a group between two runs, and
    those of a pair with a half's bias behind them."""
    waiting = 1 if is_one_run else _GROUP * _SLICE_PAIRS * _SUMS
    return (
        aligned_words(run * BLOCK_BYTES // 4), aligned_words(waiting),
        aligned_words(_SUMS + _HALF).view(np.float32),
    )  # fmt: skip


@part
def _add_run(
    x: Any, weights: Any, blocks: Any, tokens: Any, asked: Any, row: Any, rows: Any
) -> None:
    """Adds the products of a pair. Meanwhile it asks for each `rows`-th row of the blocks that are
    copied next, from `row` on: all at once they would hold up the inputs."""
    for block in range(blocks):
        for each in range(row, ROWS, rows):
            ask_for_row(asked + block * _PANEL_BLOCK_BYTES + each * STEP_BYTES)
        if tokens > ROWS:
            add_near_tokens(x + block * BLOCK_BYTES, weights + block * BLOCK_BYTES)
        else:
            add_near_half(x + block * BLOCK_BYTES, weights + block * BLOCK_BYTES)


@part
def _half_at(address: Any, panel_bytes: Any, half: Any, block: Any) -> Any:
    """Where a half of a panel has its rows of a block."""
    side = half % 2 * _SUM_BYTES
    return address + half // 2 * panel_bytes + side + block * _PANEL_BLOCK_BYTES


@part
def _write(sums: Any, tokens: Any, y: Any, at: Any, out_dim: Any, width: Any) -> None:
    """Writes a half's sums of a pair to y from `at` on; behind them is the half's bias."""
    if width == _HALF:
        bias = half_at(sums, _SUMS)
        for token in range(tokens):
            store_rounded(y, at + token * out_dim, half_at(sums, token * _HALF), bias)
        return
    for token in range(tokens):
        for lane in range(width):
            total = sums[token * _HALF + lane] + sums[_SUMS + lane]
            y[at + token * out_dim + lane] = narrow(total, y)


@part
def _multiply_group(
    halves: Any, pairs: Any, address: Any, panel_bytes: Any, copied: Any, sizes: Any, added: Any,
    near: Any, waiting: Any, sums: Any, y: Any,
) -> None:  # fmt: skip
    """The products of the halves of panels from halves[0] to halves[1] with such pairs. Memory of
    `_room` is addresses, or has no owner: to count the users of an array takes a tenth of the time.
    """
    (blocks, run, tokens, all_pairs, out_dim), count = sizes, pairs[1] - pairs[0]
    for start in range(0, blocks, run):
        length, kept = min(run, blocks - start), waiting
        inputs = copied + (start * all_pairs + pairs[0] * length) * BLOCK_BYTES
        for half in range(halves[0], halves[1]):
            panel = _half_at(address, panel_bytes, half, start)
            for block in range(length):
                copy_weights(panel + block * _PANEL_BLOCK_BYTES, near + block * BLOCK_BYTES)
            asked = _half_at(address, panel_bytes, half + 1, start)
            if half + 1 == halves[1] and start + length < blocks:
                asked = _half_at(address, panel_bytes, halves[0], start + length)
            first, width = half * _HALF, min(_HALF, out_dim - half * _HALF)
            for lane in range(_HALF):
                sums[_SUMS + lane] = wide(added[first + lane]) if first + lane < len(added) else 0
            for pair in range(pairs[0], pairs[1]):
                if start > 0:
                    load_sums(kept)
                else:
                    clear_sums()
                real, row = min(_PAIR, tokens - pair * _PAIR), pair - pairs[0]
                _add_run(inputs + row * length * BLOCK_BYTES, near, length, real, asked, row, count)
                if start + length < blocks:
                    store_sums(kept, _SUM_BYTES)
                else:
                    store_sums(sums.ctypes.data, _SUM_BYTES)
                    _write(sums, real, y, pair * _PAIR * out_dim + first, out_dim, width)
                kept += 4 * _SUMS


def _product(
    like: Any, address: int, panel_bytes: int, bias: int, bias_dim: int, x: int, stride: int,
    blocks: int, tokens: int, y: int, out_dim: int, threads: int,
) -> None:  # fmt: skip
    """Tensors are addresses, those but of the panels in the dtype of `like`, an empty row."""
    added, out, run = row_at(bias, like)[:bias_dim], row_at(y, like), _cut(blocks, _LONGEST_RUN)
    pairs, halves = (tokens + _PAIR - 1) // _PAIR, (out_dim + _HALF - 1) // _HALF
    copied = aligned_words(pairs * blocks * BLOCK_BYTES // 4)
    for pair in prange(pairs):
        _copy_pair(x, stride, tokens, blocks, run, pairs, pair, copied.ctypes.data)
    length = _cut(pairs, _SLICE_PAIRS)
    group = min(_GROUP, max(1, halves // threads))
    groups = (halves + group - 1) // group
    jobs, sizes = (pairs + length - 1) // length * groups, (blocks, run, tokens, pairs, out_dim)
    workers = min(jobs, threads)
    for worker in prange(workers):
        before, (near, waiting, sums) = np.zeros(CONFIG_BYTES, np.uint8), _room(run, run == blocks)
        own_sums = row_at(sums.ctypes.data, sums)
        copy_configuration(before)
        configure(tile_configuration(ROWS, ROWS))
        for job in range(jobs * worker // workers, jobs * (worker + 1) // workers):
            first, half = job // groups * length, job % groups * group
            _multiply_group(
                (half, min(half + group, halves)), (first, min(first + length, pairs)), address,
                panel_bytes, copied.ctypes.data, sizes, added, near.ctypes.data,
                waiting.ctypes.data, own_sums, out,
            )  # fmt: skip
        configure(before)
        near[0], waiting[0], sums[0] = 0, 0, 0  # numba ends an array's life after its last use
    copied[0] = 0


tiled_loop = Loop(_product, STRICT)
