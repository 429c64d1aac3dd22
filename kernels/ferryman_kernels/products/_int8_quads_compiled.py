"""The loop over panels of quads of int8 codes for the CPU.

Formulas and names are those of `int8_product`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ferryman_kernels.cpu._code_quads import QUAD, widen_quads
from ferryman_kernels.cpu._compiled import (
    STRICT,
    WEIGHTS_PER_ELEMENT,
    Loop,
    part,
    prange,
)
from ferryman_kernels.cpu._lanes import HAS_DOTS, LANES, STEP_BYTES
from ferryman_kernels.cpu._panel_tiles import (
    LONG_RUN,
    MANY,
    PANEL_AHEAD_BYTES,
    RUN,
    WORD_BYTES,
    add_coded_tile,
    add_span,
    stride_of_asking,
)
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.products._int8_ends import may_underflow, write_scaled
from ferryman_kernels.products._packed_product_compiled import likes

MOST_ROWS = 512
"""Rows of x whose sums the second cache holds."""
_FEW = 4
"""The most rows for which codes are widened in registers: no row reads them again."""


def _product(
    widened: Any, multiplied: Any, like: Any, panels: int, in_dim: int, scales: int, out_dim: int,
    x: int, tokens: int, y: int,
) -> None:  # fmt: skip
    """Tensors are addresses; the first three as in `likes`."""
    inputs, words = x + in_dim * like.itemsize * np.arange(tokens), QUAD * like.itemsize
    # One row alone would not repay the joining of its codes to pairs.
    is_plain = tokens == 1 and not may_underflow(row_at(x, like)[:in_dim])
    for panel in prange((out_dim + LANES - 1) // LANES):
        at, output = panels + panel * LANES * in_dim, panel * LANES
        factors = row_at(scales + output * like.itemsize, like)
        for first in range(0, tokens, MOST_ROWS):
            rows = inputs[first : first + MOST_ROWS]
            sums = np.zeros((len(rows), LANES), np.float32)
            if is_plain:
                _add_few(widened, np.float32(0), at, in_dim // QUAD, rows, sums)
            elif len(rows) <= _FEW:
                _add_few(widened, multiplied, at, in_dim // QUAD, rows, sums)
            else:
                _add_many(widened, multiplied, at, in_dim // QUAD, words // WORD_BYTES, rows, sums)
            for row in range(len(rows)):
                out = row_at(y + ((first + row) * out_dim + output) * like.itemsize, like)
                write_scaled(sums[row], factors, out, min(LANES, out_dim - output))


@part
def _add_few(widened: Any, multiplied: Any, panel: Any, quads: Any, inputs: Any, sums: Any) -> None:
    """Adds the products of the panel at an address with the rows of x at the addresses `inputs`
    [rows] to `sums` [rows, 64]."""
    span, ask = (0, quads), (panel + PANEL_AHEAD_BYTES, STEP_BYTES)
    starts, totals, last = inputs.ctypes.data, sums.ctypes.data, len(inputs) - 1
    if last == 0:
        add_coded_tile(widened, multiplied, panel, span, (last,), starts, totals, ask)
    elif last == 1:
        add_coded_tile(widened, multiplied, panel, span, (0, last), starts, totals, ask)
    else:
        add_coded_tile(widened, multiplied, panel, span, (0, 1, 2, last), starts, totals, ask)


@part
def _add_many(
    widened: Any, multiplied: Any, panel: Any, quads: Any, words: Any, inputs: Any, sums: Any
) -> None:
    """The same for any number of rows, by way of steps in the nearest cache; a quad becomes so many
    `words` of each output."""
    count = len(inputs)
    stride, run = stride_of_asking(STEP_BYTES // words, count), RUN if count <= MANY else LONG_RUN
    steps = np.empty(run * STEP_BYTES, np.uint8)
    memory, starts, totals = np.intp(steps.ctypes.data), inputs.ctypes.data, sums.ctypes.data
    for first in range(0, quads, run // words):
        end, codes = min(first + run // words, quads), panel + first * STEP_BYTES
        for quad in range(end - first):
            widen_quads(widened, codes + quad * STEP_BYTES, memory + quad * words * STEP_BYTES)
        # Steps are counted from the panel's first one, which would lie so far before the memory.
        origin, span = memory - first * words * STEP_BYTES, (first * words, end * words)
        asked = codes + PANEL_AHEAD_BYTES
        add_span(widened, multiplied, origin, span, count, starts, totals, asked, stride)
    steps[0] = 0  # numba ends an array's life after its last use


_product_loop = Loop(_product, STRICT)

_TOKENS_AS_LONG_AS_READING = 4


def quad_product_compiled(x: Tensor, panels: Tensor, scales: Tensor) -> Tensor:
    """The product with x [tokens, in_dim], summed in float32 and rounded once."""
    tokens, in_dim = x.shape
    y = x.new_empty((tokens, len(scales)))
    _product_loop(
        panels.numel() // WEIGHTS_PER_ELEMENT * (1 + tokens // _TOKENS_AS_LONG_AS_READING),
        *likes(x.dtype, HAS_DOTS), panels.data_ptr(), in_dim, scales.data_ptr(), len(scales),
        x.data_ptr(), tokens, y.data_ptr(),
    )  # fmt: skip
    return y
