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
from ferryman_kernels.products._int8_ends import may_underflow, write_scaled

BLOCK = 2 * ROWS
"""Inputs, and tokens, of a step over tiles."""
SUM_BYTES = 4 * WIDTH


@part
def _configuration(tokens: Any) -> Any:
    """Tiles for up to 32 tokens."""
    return tile_configuration(min(tokens, ROWS), max(1, tokens - ROWS))


@part
def _add_block(
    codes: Any, blocks: Any, pairs: Any, slot: Any, fresh: Any, x: Any, stride_x: Any, tokens: Any,
    sums: Any,
) -> None:  # fmt: skip
    """The products of up to 32 tokens with a panel of `blocks` blocks, to the address `sums`.

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
    store_sums(sums, SUM_BYTES)


def _product(
    like: Any, codes: int, blocks: int, scales: int, x: int, tokens: int, stride_x: int, y: int,
    out_dim: int,
) -> None:  # fmt: skip
    """Tensors are addresses; `like` is an empty row of the dtype of all but the codes."""
    whole, rest = _configuration(min(tokens, BLOCK)), _configuration(tokens % BLOCK)
    first_token = row_at(x, like)[: blocks * BLOCK]
    by_vectors = tokens == 1 and not may_underflow(first_token)
    inputs = np.empty(blocks * BLOCK if by_vectors else 0, np.float32)
    for i in range(len(inputs)):
        inputs[i] = wide(first_token[i])
    for panel in prange((out_dim + WIDTH - 1) // WIDTH):
        at, first = codes + panel * blocks * ROWS * STEP_BYTES, panel * WIDTH
        factors, out = row_at(scales + first * like.itemsize, like), y + first * like.itemsize
        width = min(WIDTH, out_dim - first)
        if by_vectors:
            _multiply_one_token(at, blocks, inputs, factors, out, width)
        else:
            _multiply_tokens(
                at, blocks, x, stride_x, tokens, whole, rest, factors, out, width, out_dim
            )


@part
def _multiply_tokens(
    codes: Any, blocks: Any, x: Any, stride_x: Any, tokens: Any, whole: Any, rest: Any,
    scales: Any, y: Any, width: Any, out_dim: Any,
) -> None:  # fmt: skip
    """The products of the panel at the address `codes` with all tokens, `width` outputs to each row
    from the address y on; `whole` and `rest` configure tiles for 32 tokens and for the last ones.
    """
    size = ROWS * PAIRS_BYTES
    before, sums = np.empty(CONFIG_BYTES, np.uint8), np.empty((BLOCK, BLOCK), np.float32)
    copy_configuration(before)
    # A single group of tokens needs no block again.
    slot = size if tokens > BLOCK else 0
    # Its address is taken within the loop below, not before: numba would end its life there.
    pairs = np.empty(max(slot * blocks, size), np.uint8)
    for first in range(0, tokens, BLOCK):
        count = min(BLOCK, tokens - first)
        if first == 0:
            configure(whole)
        elif count < BLOCK:
            configure(rest)
        totals = sums.ctypes.data
        _add_block(
            codes, blocks, pairs.ctypes.data, slot, first == 0, x + first * stride_x, stride_x,
            count, totals,
        )  # fmt: skip
        for token in range(count):
            # Views that numba counts would take as long as the products.
            out = row_at(y + (first + token) * out_dim * scales.itemsize, scales)
            write_scaled(row_at(totals + token * SUM_BYTES, sums), scales, out, width)
    configure(before)


@part
def _multiply_one_token(codes: Any, blocks: Any, x: Any, scales: Any, y: Any, width: Any) -> None:
    """The same for one token, by vectors: faster, and with the bits of tiles, which add the first
    inputs of a block's pairs, the second ones, and then both to what was there."""
    total, sums = no_sums(), np.empty(2 * WIDTH, np.float32)
    for block in range(blocks):
        of_block = no_sums()
        for step in range(block * ROWS, (block + 1) * ROWS):
            of_block = add_two_inputs(of_block, codes + step * STEP_BYTES, x, 2 * step)
        total = add_block(total, of_block)
    store(sums, 0, total)
    write_scaled(sums, scales, row_at(y, scales), width)


_product_loop = Loop(_product, STRICT)

# Products with 16 tokens take as long as reading the codes.
_TOKENS_AS_LONG_AS_READING = 32


def tile_product_compiled(x: Tensor, panels: Tensor, scales: Tensor) -> Tensor:
    """x [tokens, in_dim] is contiguous, in_dim that of the panels."""
    tokens, in_dim = x.shape
    y = x.new_empty((tokens, len(scales)))
    elements = panels.numel() // WEIGHTS_PER_ELEMENT
    _product_loop(
        elements + elements * tokens // _TOKENS_AS_LONG_AS_READING,
        row_like(x.dtype), panels.data_ptr(), in_dim // BLOCK, scales.data_ptr(), x.data_ptr(),
        tokens, in_dim * x.itemsize, y.data_ptr(), len(scales),
    )  # fmt: skip
    return y
