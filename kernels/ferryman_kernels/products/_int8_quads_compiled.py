"""The loops over panels of quads of int8 codes for the CPU.

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
    narrow,
    part,
    prange,
    row_like,
    wide,
)
from ferryman_kernels.cpu._lanes import HAS_DOTS, LANES, STEP_BYTES
from ferryman_kernels.cpu._panel_tiles import (
    LONG_RUN,
    MANY,
    PANEL_AHEAD_BYTES,
    RUN,
    add_span,
    add_tile,
    stride_of_asking,
)
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.products._packed_product_compiled import likes

_CODE_BYTES = STEP_BYTES // 2
_DIGITS = 3
MOST_ROWS = 512
"""Rows of x whose sums the second cache holds."""
_WHOLE_BITS = np.int32(21)
# A unit for numbers that are all smaller would be near the end of float32.
_LEAST_EXPONENT, _BIAS = np.int32(-100), np.int32(127)
_UNSIGNED = np.uint32(0x7FFFFFFF)


@part
def _unit_of(x: Any) -> Any:
    """The unit of a row. Zero for none: with NaN or infinity in it, or tiny numbers alone."""
    greatest = np.uint32(0)
    for i in range(len(x)):
        # Without their sign numbers are in the order of their bits; NaN is the greatest.
        greatest = max(greatest, np.uint32(np.float32(wide(x[i])).view(np.uint32) & _UNSIGNED))
    exponent = np.int32(greatest >> np.uint32(23)) - _BIAS
    if exponent < _LEAST_EXPONENT or exponent > _BIAS:
        return np.float32(0.0)
    bits = np.uint32(_BIAS + _WHOLE_BITS - exponent) << np.uint32(23)
    return np.uint32(bits).view(np.float32)


@part
def _digits_of(x: Any, unit: Any, digits: Any) -> Any:
    """Writes a row's integers as three digits of base 256 to `digits` [3, inputs], the lowest
    first. Returns their sum."""
    count = np.int64(0)
    for i in range(len(x)):
        number = np.int32(np.rint(wide(x[i]) * unit))
        count += number
        digits[0, i] = np.int8(number)
        upper = np.int32((number - np.int32(np.int8(number))) >> np.int32(8))
        digits[1, i] = np.int8(upper)
        digits[2, i] = np.int8((upper - np.int32(np.int8(upper))) >> np.int32(8))
    return count


@part
def _of_panel(like: Any, address: Any, token: Any, panel: Any, out_dim: Any) -> Any:
    """The numbers of a panel's outputs in a token's row, of rows [out_dim] from `address` on."""
    first, start = panel * LANES, token * out_dim
    return row_at(address, like)[start + first : start + min(first + LANES, out_dim)]


@part
def _write_exact(sums: Any, unit: Any, count: Any, factors: Any, out: Any) -> None:
    """Writes what the three rows of `sums` [3, 64] of a token's digits stand for."""
    low, middle, high = sums[0], sums[1], sums[2]
    part_of_unit, less = np.float64(1) / np.float64(unit), 128 * count
    for lane in range(len(out)):
        upper = 256 * np.int64(middle[lane]) + 65536 * np.int64(high[lane])
        number = np.float64(np.int64(low[lane]) + upper - less)
        out[lane] = narrow(np.float32(number * part_of_unit) * wide(factors[lane]), out)


@part
def _write_plain(codes: Any, x: Any, factors: Any, out: Any) -> None:
    """Writes the products of a panel's outputs with a row that has no integers."""
    for lane in range(len(out)):
        dot = np.float32(0.0)
        for i in range(len(x)):
            dot += np.float32(codes[(i // QUAD * LANES + lane) * QUAD + i % QUAD]) * wide(x[i])
        out[lane] = narrow(dot * wide(factors[lane]), out)


def _digit_product(
    like: Any, code: Any, panels: int, in_dim: int, scales: int, out_dim: int, x: int, tokens: int,
    y: int,
) -> None:  # fmt: skip
    """Tensors are addresses; `like` is an empty row of bfloat16, `code` a code."""
    rows = row_at(x, like)[: tokens * in_dim].reshape(tokens, in_dim)
    digits = np.empty((tokens, _DIGITS, in_dim), np.int8)
    units, counts = np.empty(tokens, np.float32), np.empty(tokens, np.int64)
    for token in range(tokens):
        units[token] = _unit_of(rows[token])
        counts[token] = _digits_of(rows[token], units[token], digits[token])
    offsets = in_dim * np.arange(tokens * _DIGITS)
    for panel in prange((out_dim + LANES - 1) // LANES):
        at = panels + panel * LANES * in_dim
        sums = np.zeros((tokens, _DIGITS, LANES), np.int32)
        # The digits' address is taken in each job: numba ends an array's life after its last use,
        # and moves a later one before the jobs.
        inputs = np.intp(digits.ctypes.data) + offsets
        _add_digits(code, at, in_dim // QUAD, tokens, inputs, sums.ctypes.data)
        factors = _of_panel(like, scales, 0, panel, out_dim)
        for token in range(tokens):
            out = _of_panel(like, y, token, panel, out_dim)
            if units[token] > 0:
                _write_exact(sums[token], units[token], counts[token], factors, out)
            else:
                _write_plain(row_at(at, np.empty(0, np.int8)), rows[token], factors, out)


@part
def _add_digits(code: Any, panel: Any, steps: Any, tokens: Any, inputs: Any, sums: Any) -> None:
    """Adds the products of the panel at an address with three rows of digits for each token, which
    begin at the addresses `inputs`."""
    starts = inputs.ctypes.data
    groups, last = (tokens + 1) // 2, (tokens - 1) * _DIGITS
    run, stride = steps if groups == 1 else RUN, STEP_BYTES // groups
    for first in range(0, steps, run):
        span, asked = (
            (first, min(first + run, steps)),
            panel + first * STEP_BYTES + PANEL_AHEAD_BYTES,
        )
        for group in range(groups):
            # A token that is missing is the last one again: with fewer products the loop overtakes
            # the processor's prefetching, and was slower by a third.
            row, other = 2 * _DIGITS * group, min(2 * _DIGITS * group + _DIGITS, last)
            rows = row, row + 1, row + 2, other, other + 1, other + 2
            ask = asked + group * (span[1] - first) * stride, stride
            add_tile(code, code, panel, span, rows, starts, sums, ask)


def _pair_product(
    weight: Any, multiplied: Any, like: Any, panels: int, in_dim: int, scales: int, out_dim: int,
    x: int, tokens: int, y: int,
) -> None:  # fmt: skip
    """Tensors are addresses; the others as in `likes`."""
    inputs = x + in_dim * like.itemsize * np.arange(tokens)
    for panel in prange((out_dim + LANES - 1) // LANES):
        at, factors = panels + panel * LANES * in_dim, _of_panel(like, scales, 0, panel, out_dim)
        for first in range(0, tokens, MOST_ROWS):
            own = inputs[first : first + MOST_ROWS]
            sums = np.zeros((len(own), LANES), np.float32)
            _add_panel(weight, multiplied, at, in_dim // 2, own, sums)
            for row in range(len(own)):
                out, dots = _of_panel(like, y, first + row, panel, out_dim), sums[row]
                for lane in range(len(out)):
                    out[lane] = narrow(dots[lane] * wide(factors[lane]), out)


@part
def _add_panel(
    weight: Any, multiplied: Any, panel: Any, steps: Any, inputs: Any, sums: Any
) -> None:
    """Adds the products of the panel at an address with the rows of x at the addresses `inputs`
    [rows] to `sums` [rows, 64]."""
    count = len(inputs)
    stride, run = stride_of_asking(_CODE_BYTES, count), RUN if count <= MANY else LONG_RUN
    pairs = np.empty(run * STEP_BYTES, np.uint8)
    memory, starts, own = np.intp(pairs.ctypes.data), inputs.ctypes.data, sums.ctypes.data
    for first in range(0, steps, run):
        span, codes = (first, min(first + run, steps)), panel + first * _CODE_BYTES
        for step in range(0, span[1] - first, 2):
            widen_quads(codes + step * _CODE_BYTES, memory + step * STEP_BYTES)
        # Steps are counted from the panel's first one, which would lie so far before the memory.
        origin = memory - first * STEP_BYTES
        asked = codes + PANEL_AHEAD_BYTES
        add_span(weight, multiplied, origin, span, count, starts, own, asked, stride)
    pairs[0] = 0  # numba ends an array's life after its last use


_digit_loop, _pair_loop = Loop(_digit_product, STRICT), Loop(_pair_product, STRICT)

_TOKENS_AS_LONG_AS_READING = 4


def digit_product_compiled(x: Tensor, panels: Tensor, scales: Tensor) -> Tensor:
    """The product with x [tokens, in_dim] bfloat16, of up to four tokens, exact but for its end."""
    tokens, in_dim = x.shape
    y = x.new_empty((tokens, len(scales)))
    _digit_loop(
        panels.numel() // WEIGHTS_PER_ELEMENT,
        row_like(x.dtype), np.int8(0), panels.data_ptr(), in_dim, scales.data_ptr(),
        len(scales), x.data_ptr(), tokens, y.data_ptr(),
    )  # fmt: skip
    return y


def pair_product_compiled(x: Tensor, panels: Tensor, scales: Tensor) -> Tensor:
    """The product with x [tokens, in_dim] bfloat16, summed in float32 and rounded once."""
    tokens, in_dim = x.shape
    y = x.new_empty((tokens, len(scales)))
    _pair_loop(
        panels.numel() // WEIGHTS_PER_ELEMENT * (1 + tokens // _TOKENS_AS_LONG_AS_READING),
        *likes(x.dtype, HAS_DOTS), panels.data_ptr(), in_dim, scales.data_ptr(), len(scales),
        x.data_ptr(), tokens, y.data_ptr(),
    )  # fmt: skip
    return y
