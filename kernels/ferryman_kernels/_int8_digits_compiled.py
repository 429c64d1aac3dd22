"""The int8 product of few tokens for the CPU, by products of bytes (AVX512-VNNI).

Formulas and names are those of `int8_product`. A row of x becomes integers with one power of two:

    v[i] = round(unit · x[i]),    2²¹ <= unit · max |x| < 2²²

bfloat16 has 8 bits, so inputs down to 1/16,384 of the greatest are exact, and smaller ones are
within 1/4,000,000 of it: less than float32 loses in a sum beside it. All sums are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ferryman_kernels._code_digits import STEP, add_digits, ask_ahead, no_counts, total_count
from ferryman_kernels._compiled import STRICT, Loop, narrow, part, prange, row_like, wide
from ferryman_kernels._int8_product_compiled import CODES_PER_ELEMENT, ROWS_OF_JOB
from ferryman_kernels._vectors import row_at

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
def _digits_of(x: Any, unit: Any, digits: Any, rest: Any) -> Any:
    """Writes a row's integers as three digits of base 256 to `digits` [3, inputs], the lowest
    first, and those behind `inputs` to `rest`. Returns the sum of the former."""
    count, inputs = np.int64(0), digits.shape[1]
    for i in range(inputs):
        number = np.int32(np.rint(wide(x[i]) * unit))
        count += number
        digits[0, i] = np.int8(number)
        upper = np.int32((number - np.int32(np.int8(number))) >> np.int32(8))
        digits[1, i] = np.int8(upper)
        digits[2, i] = np.int8((upper - np.int32(np.int8(upper))) >> np.int32(8))
    for i in range(len(rest)):
        rest[i] = np.int32(np.rint(wide(x[inputs + i]) * unit))
    return count


@part
def _sum_of_digits(codes: Any, digits: Any, inputs: Any) -> Any:
    """The sum of (code + 128) · v over a row of codes and a token's digits, at their addresses."""
    low, middle, high = no_counts(), no_counts(), no_counts()
    for i in range(0, inputs, STEP):
        ask_ahead(codes + i)
        low = add_digits(low, codes + i, digits + i)
        middle = add_digits(middle, codes + i, digits + inputs + i)
        high = add_digits(high, codes + i, digits + 2 * inputs + i)
    return total_count(low) + 256 * total_count(middle) + 65536 * total_count(high)


@part
def _plain_dot(codes: Any, at: Any, x: Any, first: Any, inputs: Any) -> Any:
    dot = np.float32(0.0)
    for i in range(inputs):
        dot += np.float32(codes[at + i]) * wide(x[first + i])
    return dot


def _product(
    like: Any, codes: int, in_dim: int, scales: int, out_dim: int, x: int, tokens: int, y: int
) -> None:
    """Tensors are addresses; `like` is an empty row of bfloat16."""
    stored, rows = row_at(codes, np.empty(0, np.int8)), row_at(x, like)
    own, out = row_at(scales, like), row_at(y, like)
    whole = in_dim // STEP * STEP
    digits = np.empty(tokens * 3 * whole + STEP, np.int8)
    shift = -digits.ctypes.data % STEP  # a line of the cache holds what one product takes
    rest = np.empty((tokens, in_dim - whole), np.int32)
    units, counts = np.empty(tokens, np.float32), np.empty(tokens, np.int64)
    for token in range(tokens):
        row = rows[token * in_dim : (token + 1) * in_dim]
        units[token] = _unit_of(row)
        own_digits = digits[shift + token * 3 * whole :][: 3 * whole].reshape(3, whole)
        counts[token] = _digits_of(row, units[token], own_digits, rest[token])
    for job in prange((out_dim + ROWS_OF_JOB - 1) // ROWS_OF_JOB):
        # Taken within the loop: numba ends an array's life after its last use.
        memory = digits.ctypes.data + shift
        for output in range(job * ROWS_OF_JOB, min((job + 1) * ROWS_OF_JOB, out_dim)):
            at = output * in_dim
            for token in range(tokens):
                if units[token] > 0:
                    number = _sum_of_digits(codes + at, memory + token * 3 * whole, whole)
                    number -= 128 * counts[token]
                    for i in range(whole, in_dim):
                        number += np.int64(stored[at + i]) * np.int64(rest[token, i - whole])
                    dot = np.float32(np.float64(number) / np.float64(units[token]))
                else:
                    dot = _plain_dot(stored, at, rows, token * in_dim, in_dim)
                out[token * out_dim + output] = narrow(dot * wide(own[output]), out)


_loop = Loop(_product, STRICT)


def digit_product_compiled(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The product with x [tokens, in_dim] bfloat16 of at most MOST_INPUTS inputs, where the
    processor `HAS_BYTE_DOTS`, rounded once.

    Every code is read once; a token's bits do not depend on the other tokens.
    """
    (out_dim, in_dim), tokens = codes.shape, len(x)
    y = x.new_empty((tokens, out_dim))
    x, codes, scales = x.contiguous(), codes.contiguous(), scales.contiguous()
    _loop(
        codes.numel() // CODES_PER_ELEMENT, row_like(x.dtype), codes.data_ptr(), in_dim,
        scales.data_ptr(), out_dim, x.data_ptr(), tokens, y.data_ptr(),
    )  # fmt: skip
    return y
