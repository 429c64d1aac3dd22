"""The products of a panel with a slice of the tokens, for the loops of `packed_product`.

Formulas and names are those of `packed_product`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ferryman_kernels.cpu._compiled import narrow, numba, part, wide
from ferryman_kernels.cpu._lanes import LANES, STEP_BYTES, lanes_at, store_rounded
from ferryman_kernels.cpu._panel_tiles import (
    LONG_RUN,
    MANY,
    PANEL_AHEAD_BYTES,
    RUN,
    add_span,
    stride_of_asking,
)
from ferryman_kernels.cpu._tiles import (
    ASKED_BYTES,
    CONFIG_BYTES,
    ROWS,
    add_few_tokens,
    add_first_tokens,
    add_other_tokens,
    ask_for_lines,
    clear_sums,
    configure,
    configure_rows,
    copy_configuration,
    store_few_sums,
    store_sums,
    tile_configuration,
)
from ferryman_kernels.cpu._vectors import AHEAD_BYTES

if numba is not None:
    from numba.extending import overload

_BLOCK = ROWS * STEP_BYTES  # the bytes of a panel that one step over tiles multiplies
_BLOCK_OF_TOKEN = 2 * ROWS * 2  # and those of a token's inputs
_SLICE_BYTES, _LEAST_SLICE, _MOST_SLICE = 1 << 20, 128, 256


@part
def slice_length(row_bytes: Any) -> Any:
    """The tokens that pass all panels before the next ones do: the second cache holds their inputs
    beside a panel."""
    return max(_LEAST_SLICE, min(_MOST_SLICE, _SLICE_BYTES // row_bytes))


@part
def _sums_by_vectors(
    stored: Any, multiplied: Any, panel: Any, steps: Any, x: Any, stride: Any, rows: Any, sums: Any
) -> None:
    # Three rows or more use a weight while it is in registers. The others follow after a few steps:
    # after a whole panel the memory would have waited for their products. One group alone is faster
    # without asking for memory.
    inputs = x + stride * np.arange(rows)
    starts, totals = inputs.ctypes.data, sums.ctypes.data
    run, ahead, asking = steps, 0, 0
    if rows > 4:
        run, ahead = RUN if rows <= MANY else LONG_RUN, PANEL_AHEAD_BYTES
        asking = stride_of_asking(STEP_BYTES, rows)
    sums[: rows * LANES] = 0
    for first in range(0, steps, run):
        span, asked = (first, min(first + run, steps)), panel + first * STEP_BYTES + ahead
        add_span(stored, multiplied, panel, span, rows, starts, totals, asked, asking)
    inputs[0] = 0  # numba ends an array's life after its last use


@part
def _sums_by_tiles(
    panel: Any, blocks: Any, x: Any, stride: Any, rows: Any, config: Any, sums: Any
) -> None:
    """The panel's products with `rows` tokens, to the address `sums`; `config` is the tiles' last
    configuration."""
    pairs, rest = rows // (2 * ROWS), rows % (2 * ROWS)
    if 0 < rest <= ROWS:
        at, totals = x + (rows - rest) * stride, sums + (rows - rest) * STEP_BYTES
        configure_rows(config, rest, rest)
        clear_sums()
        for block in range(blocks):
            start = panel + block * _BLOCK
            for lines in range(0, _BLOCK, ASKED_BYTES):
                ask_for_lines(start + AHEAD_BYTES + lines)
            add_few_tokens(start, STEP_BYTES, at + block * _BLOCK_OF_TOKEN, stride)
        store_few_sums(totals, STEP_BYTES)
    elif rest > 0:
        _add_pairs_of_tiles(panel, blocks, x, stride, pairs, pairs + 1, rest, config, sums)
    if pairs > 0:
        _add_pairs_of_tiles(panel, blocks, x, stride, 0, pairs, 2 * ROWS, config, sums)


@part
def _add_pairs_of_tiles(
    panel: Any, blocks: Any, x: Any, stride: Any, first: Any, end: Any, rows: Any, config: Any,
    sums: Any,
) -> None:  # fmt: skip
    """Products of pairs `first` to `end` of tiles of tokens, of `rows` tokens each. Meanwhile the
    next panel is read: without that products and memory wait for each other."""
    asked, asking = panel + blocks * _BLOCK, max(1, _BLOCK // (2 * (end - first) * ASKED_BYTES))
    configure_rows(config, ROWS, rows - ROWS)
    for half in range(0, STEP_BYTES, STEP_BYTES // 2):
        for pair in range(first, end):
            start = x + pair * 2 * ROWS * stride
            clear_sums()
            for block in range(blocks):
                if asked < panel + 2 * blocks * _BLOCK:
                    for _ in range(asking):
                        ask_for_lines(asked)
                        asked += ASKED_BYTES
                at = start + block * _BLOCK_OF_TOKEN
                add_first_tokens(panel + half + block * _BLOCK, STEP_BYTES, at, stride)
                add_other_tokens(at + ROWS * stride, stride)
            store_sums(sums + pair * 2 * ROWS * STEP_BYTES + half, STEP_BYTES)


def keep_configuration(multiplied: Any, before: Any) -> None:
    """Writes the tiles' configuration to `before`, where products go by tiles."""
    raise NotImplementedError("only in compiled loops")


def put_back(multiplied: Any, before: Any) -> None:
    """Configures the tiles as `before` says, where products go by tiles."""
    raise NotImplementedError("only in compiled loops")


def sums_of(
    stored: Any, multiplied: Any, panel: Any, steps: Any, x: Any, stride: Any, rows: Any,
    config: Any, sums: Any,
) -> None:  # fmt: skip
    """The panel's products with `rows` tokens, by tiles if `multiplied` is None, else by vectors.

    The type decides, before anything is compiled: a processor without tiles has no code for them.
    """
    raise NotImplementedError("only in compiled loops")


def _keep_configuration(multiplied: Any, before: Any) -> Callable[..., None]:
    if _is_tiled(multiplied):
        return lambda multiplied, before: copy_configuration(before)
    return lambda multiplied, before: None


def _put_back(multiplied: Any, before: Any) -> Callable[..., None]:
    if _is_tiled(multiplied):
        return lambda multiplied, before: configure(before)
    return lambda multiplied, before: None


def _sums_of(stored: Any, multiplied: Any, *_: Any) -> Callable[..., None]:
    def by_tiles(
        stored: Any, multiplied: Any, panel: Any, steps: Any, x: Any, stride: Any, rows: Any,
        config: Any, sums: Any,
    ) -> None:  # fmt: skip
        _sums_by_tiles(panel, steps // ROWS, x, stride, rows, config, sums.ctypes.data)

    def by_vectors(
        stored: Any, multiplied: Any, panel: Any, steps: Any, x: Any, stride: Any, rows: Any,
        config: Any, sums: Any,
    ) -> None:  # fmt: skip
        _sums_by_vectors(stored, multiplied, panel, steps, x, stride, rows, sums)

    return by_tiles if _is_tiled(multiplied) else by_vectors


def _is_tiled(multiplied: Any) -> bool:
    return isinstance(multiplied, numba.types.NoneType)


if numba is not None:
    for stub, chosen in (
        (keep_configuration, _keep_configuration),
        (put_back, _put_back),
        (sums_of, _sums_of),
    ):
        overload(stub, jit_options={"error_model": "numpy"}, strict=False)(chosen)


@part
def opened_for(multiplied: Any, tokens: Any) -> Any:
    """A thread's memory for slices of at most so many tokens: their sums, a panel's bias, the
    tiles' configuration, and what it was before."""
    config, before = tile_configuration(0, 0), np.zeros(CONFIG_BYTES, np.uint8)
    keep_configuration(multiplied, before)
    return np.empty(tokens * LANES, np.float32), np.empty(LANES, np.float32), config, before


@part
def close(multiplied: Any, opened: Any) -> None:
    put_back(multiplied, opened[3])


@part
def multiply_panel(
    stored: Any, multiplied: Any, opened: Any, panel: Any, steps: Any, x: Any, stride: Any,
    rows: Any, added: Any, first: Any, y: Any, out_dim: Any,
) -> None:  # fmt: skip
    """The products of the panel at an address with as many rows of x, each `stride` bytes, as there
    are `rows` of y, flat [tokens, out_dim], to their outputs from `first` on; with the bias `added`
    [out_dim], or [0]. A row's bits do not depend on the others, nor on their number."""
    sums_of(stored, multiplied, panel, steps, x, stride, len(rows), opened[2], opened[0])
    write_panel(opened, rows, added, first, y, out_dim)


@part
def write_panel(opened: Any, rows: Any, added: Any, first: Any, y: Any, out_dim: Any) -> None:
    """Writes the sums that `opened` holds, as `multiply_panel` does."""
    sums, bias, _, _ = opened
    width = min(LANES, out_dim - first)
    bias[:] = 0
    for lane in range(min(width, len(added))):
        bias[lane] = wide(added[first + lane])
    biases = lanes_at(bias, 0)
    for i in range(len(rows)):
        at = rows[i] * out_dim + first
        if width == LANES:
            store_rounded(y, at, lanes_at(sums, i * LANES), biases)
        else:
            for lane in range(width):
                y[at + lane] = narrow(sums[i * LANES + lane] + bias[lane], y)
