"""The int8 product's loops for the CPU: one row of x, and codes on their way to a wider product.

Formulas and names are those of `int8_product`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._code_pairs import ROWS, add_row_dots, store_row_dots, widen_row
from ferryman_kernels._compiled import Loop, as_array, narrow, part, prange, row_like, wide
from ferryman_kernels._lanes import LANES, add_codes, no_sums
from ferryman_kernels._vectors import AHEAD_BYTES, prefetch, row_at, total

# Codes that are multiplied at once, and their bytes as bfloat16.
_STEP, _STEP_BYTES = 32, 64
ROWS_OF_JOB = 32


def _one_row(codes: Any, in_dim: int, scales: Any, x: Any, y: Any) -> None:
    whole = in_dim // LANES * LANES
    for output in prange(y.shape[0]):
        sums, at = no_sums(), output * in_dim
        for i in range(0, whole, LANES):
            prefetch(codes, at + i + AHEAD_BYTES)
            sums = add_codes(sums, codes, at + i, x, i)
        dot = total(sums)
        for i in range(whole, in_dim):
            dot += np.float32(codes[at + i]) * x[i]
        y[output] = narrow(dot * wide(scales[output]), y)


@part
def _four_rows(
    pairs: Any, stride: Any, x: Any, stride_x: Any, token: Any, tokens: Any, dots: Any
) -> None:
    """The products of four rows of bfloat16, at the address `pairs`, with four tokens from `token`
    on, to `dots` [tokens, 4]; a token that is missing is the last one again."""
    last = tokens - 1
    t1, t2, t3 = min(token + 1, last), min(token + 2, last), min(token + 3, last)
    x0, x1, x2, x3 = x + token * stride_x, x + t1 * stride_x, x + t2 * stride_x, x + t3 * stride_x
    sums0, sums1, sums2, sums3 = no_sums(), no_sums(), no_sums(), no_sums()
    for at in range(0, stride, _STEP_BYTES):
        sums0 = add_row_dots(sums0, pairs + at, stride, x0 + at)
        sums1 = add_row_dots(sums1, pairs + at, stride, x1 + at)
        sums2 = add_row_dots(sums2, pairs + at, stride, x2 + at)
        sums3 = add_row_dots(sums3, pairs + at, stride, x3 + at)
    store_row_dots(dots[token], 0, sums0)
    store_row_dots(dots[t1], 0, sums1)
    store_row_dots(dots[t2], 0, sums2)
    store_row_dots(dots[t3], 0, sums3)


def _few_rows(
    like: Any, codes: int, in_dim: int, scales: int, out_dim: int, x: int, tokens: int,
    stride_x: int, y: int,
) -> None:  # fmt: skip
    """Tensors are addresses; `like` is an empty row of bfloat16. A row of x has `stride_x` bytes, a
    multiple of 64, with zeros behind its inputs."""
    whole, stored = in_dim // _STEP * _STEP, row_at(codes, np.empty(0, np.int8))
    own, out = row_at(scales, like), row_at(y, like)
    for job in prange((out_dim + ROWS_OF_JOB - 1) // ROWS_OF_JOB):
        dots = np.empty((tokens, ROWS), np.float32)
        pairs = np.zeros((ROWS, stride_x // 2), like.dtype)
        for first in range(job * ROWS_OF_JOB, min((job + 1) * ROWS_OF_JOB, out_dim), ROWS):
            # Taken within the loop: numba ends an array's life after its last use.
            memory = pairs.ctypes.data
            count = min(ROWS, out_dim - first)
            for row in range(count):
                at, into = (first + row) * in_dim, pairs[row]
                for i in range(0, whole, _STEP):
                    widen_row(codes + at + i, memory + row * stride_x + 2 * i)
                for i in range(whole, in_dim):
                    into[i] = narrow(np.float32(stored[at + i]), into)
            for token in range(0, tokens, 4):
                _four_rows(memory, stride_x, x, stride_x, token, tokens, dots)
            for token in range(tokens):
                for row in range(count):
                    scaled = dots[token, row] * wide(own[first + row])
                    out[token * out_dim + first + row] = narrow(scaled, out)


def _widen(codes: Any, widened: Any) -> None:
    for row in prange(codes.shape[0]):
        stored, out = codes[row], widened[row]
        for i in range(stored.shape[0]):
            out[i] = narrow(np.float32(stored[i]), out)


_one_row_loop, _few_rows_loop, _widen_loop = Loop(_one_row), Loop(_few_rows), Loop(_widen)

# As in `_packed_product_compiled`.
CODES_PER_ELEMENT = 4
_TOKENS_AS_LONG_AS_READING = 4


def one_row_compiled(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The product with x [1, in_dim], summed in float32 and rounded once."""
    y = torch.empty(1, len(codes), dtype=x.dtype)
    row = as_array(x[0].float().contiguous())
    flat = as_array(codes.flatten())
    elements = codes.numel() // CODES_PER_ELEMENT
    _one_row_loop(elements, flat, codes.shape[1], as_array(scales), row, as_array(y[0]))
    return y


def few_rows_compiled(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The product with x [tokens, in_dim] bfloat16, where the processor `HAS_DOTS`, rounded once.

    Every code is read once; a token's bits do not depend on the other tokens.
    """
    (out_dim, in_dim), tokens = codes.shape, len(x)
    y = x.new_empty((tokens, out_dim))
    # Infinity beyond a row's end would not be zero with a code of zero.
    x = F.pad(x, (0, -in_dim % _STEP)) if in_dim % _STEP else x.contiguous()
    codes, scales = codes.contiguous(), scales.contiguous()
    _few_rows_loop(
        codes.numel() // CODES_PER_ELEMENT * (1 + tokens // _TOKENS_AS_LONG_AS_READING),
        row_like(x.dtype), codes.data_ptr(), in_dim, scales.data_ptr(), out_dim, x.data_ptr(),
        tokens, x.shape[1] * x.itemsize, y.data_ptr(),
    )  # fmt: skip
    return y


def widen_compiled(codes: Tensor, widened: Tensor) -> None:
    """Writes `codes` [rows, in_dim] to `widened`, of the same shape and a float dtype."""
    _widen_loop(codes.numel(), as_array(codes), as_array(widened))
