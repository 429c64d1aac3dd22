"""The loops over panels of int8 codes for the CPU: up to 32 tokens share each read of a code.

Formulas and names are those of `int8_product`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ferryman_kernels.cpu._code_pairs import (
    PAIRS_BYTES,
    STEP_BYTES,
    WIDTH,
    add_block,
    add_two_inputs,
    widen_codes,
)
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
from ferryman_kernels.cpu._lanes import no_sums
from ferryman_kernels.cpu._tiles import (
    CONFIG_BYTES,
    ROWS,
    add_first_tokens,
    add_other_tokens,
    clear_sums,
    configure,
    copy_configuration,
    store_sums,
    tile_configuration,
)
from ferryman_kernels.cpu._vectors import row_at, store

BLOCK = 2 * ROWS
"""Inputs, and tokens, of a step over tiles."""
SUM_BYTES = 4 * WIDTH
_LEAST = np.float32(2.0**-126)  # a tile takes smaller numbers for zero


@part
def _configuration(tokens: Any) -> Any:
    """Tiles for up to 32 tokens."""
    return tile_configuration(min(tokens, ROWS), max(1, tokens - ROWS))


@part
def _add_block(
    codes: Any, blocks: Any, pairs: Any, slot: Any, fresh: Any, x: Any, stride_x: Any, tokens: Any,
    sums: Any,
) -> None:  # fmt: skip
    """The products of up to 32 tokens with a panel of `blocks` blocks, to `sums` [32, 32].

    Its codes become pairs at the address `pairs`, each block `slot` bytes behind the last one, or
    they are there already.
    """
    clear_sums()
    for block in range(blocks):
        at = pairs + block * slot
        if fresh:
            for step in range(ROWS):
                widen_codes(codes + (block * ROWS + step) * STEP_BYTES, at + step * PAIRS_BYTES)
        add_first_tokens(at, PAIRS_BYTES, x + block * 2 * BLOCK, stride_x)
        if tokens > ROWS:
            add_other_tokens(x + ROWS * stride_x + block * 2 * BLOCK, stride_x)
    store_sums(sums.ctypes.data, SUM_BYTES)


def _product(
    like: Any, codes: int, blocks: int, scales: int, x: int, tokens: int, stride_x: int, y: int,
    out_dim: int,
) -> None:  # fmt: skip
    """Tensors are addresses; `like` is an empty row of the dtype of all but the codes."""
    size = ROWS * PAIRS_BYTES
    whole, rest = _configuration(min(tokens, BLOCK)), _configuration(tokens % BLOCK)
    for panel in prange((out_dim + WIDTH - 1) // WIDTH):
        before, sums = np.empty(CONFIG_BYTES, np.uint8), np.empty((BLOCK, BLOCK), np.float32)
        copy_configuration(before)
        # A single group of tokens needs no block again.
        slot = size if tokens > BLOCK else 0
        # Its address is taken within the loop below, not before: numba would end its life there.
        pairs = np.empty(max(slot * blocks, size), np.uint8)
        first_output = panel * WIDTH
        width = min(WIDTH, out_dim - first_output)
        own = row_at(scales, like)[first_output : first_output + width]
        for first in range(0, tokens, BLOCK):
            count = min(BLOCK, tokens - first)
            if first == 0:
                configure(whole)
            elif count < BLOCK:
                configure(rest)
            _add_block(
                codes + panel * blocks * ROWS * STEP_BYTES, blocks, pairs.ctypes.data, slot,
                first == 0, x + first * stride_x, stride_x, count, sums,
            )  # fmt: skip
            for token in range(count):
                at = (first + token) * out_dim + first_output
                out, row = row_at(y, like)[at : at + width], sums[token]
                for lane in range(width):
                    out[lane] = narrow(row[lane] * wide(own[lane]), out)
        configure(before)


def _one_token(
    like: Any, codes: int, blocks: int, scales: int, x: int, y: int, out_dim: int
) -> None:
    """As `_product` for one token, by vectors: faster, and with the bits of tiles, which add the
    first inputs of a block's pairs, the second ones, and then both to what was there."""
    stored, inputs = row_at(x, like), np.empty(blocks * BLOCK, np.float32)
    for i in range(inputs.shape[0]):
        number = wide(stored[i])
        inputs[i] = np.float32(0.0) if abs(number) < _LEAST else number
    for panel in prange((out_dim + WIDTH - 1) // WIDTH):
        total, first_output, sums = no_sums(), panel * WIDTH, np.empty(2 * WIDTH, np.float32)
        at = codes + panel * blocks * ROWS * STEP_BYTES
        for block in range(blocks):
            of_block = no_sums()
            for step in range(block * ROWS, (block + 1) * ROWS):
                of_block = add_two_inputs(of_block, at + step * STEP_BYTES, inputs, 2 * step)
            total = add_block(total, of_block)
        store(sums, 0, total)
        width = min(WIDTH, out_dim - first_output)
        own = row_at(scales, like)[first_output : first_output + width]
        out = row_at(y, like)[first_output : first_output + width]
        for lane in range(width):
            out[lane] = narrow(sums[lane] * wide(own[lane]), out)


_product_loop, _one_token_loop = Loop(_product), Loop(_one_token, STRICT)

# Products with 16 tokens take as long as reading the codes.
_TOKENS_AS_LONG_AS_READING = 32


def tile_product_compiled(x: Tensor, panels: Tensor, scales: Tensor) -> Tensor:
    """x [tokens, in_dim] is contiguous, in_dim that of the panels."""
    tokens, in_dim = x.shape
    y = x.new_empty((tokens, len(scales)))
    elements = panels.numel() // WEIGHTS_PER_ELEMENT
    if tokens == 1:
        _one_token_loop(
            elements, row_like(x.dtype), panels.data_ptr(), in_dim // BLOCK, scales.data_ptr(),
            x.data_ptr(), y.data_ptr(), len(scales),
        )  # fmt: skip
        return y
    _product_loop(
        elements + elements * tokens // _TOKENS_AS_LONG_AS_READING,
        row_like(x.dtype), panels.data_ptr(), in_dim // BLOCK, scales.data_ptr(), x.data_ptr(),
        tokens, in_dim * x.itemsize, y.data_ptr(), len(scales),
    )  # fmt: skip
    return y
