"""The packed product's loops for the CPU, and their launches.

Formulas and names are those of `packed_product`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    part,
    prange,
    row_like,
)
from ferryman_kernels.cpu._lanes import HAS_DOTS, LANES
from ferryman_kernels.cpu._panel_tiles import WORD_BYTES
from ferryman_kernels.cpu._tiles import ROWS, has_tiles
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.products._panel_sums import (
    close,
    multiply_panel,
    opened_for,
    slice_length,
)
from ferryman_kernels.products._tiled_product_compiled import repays_copies, tiled_loop


def _product(
    stored: Any, multiplied: Any, like: Any, address: int, panel_bytes: int, bias: int,
    bias_dim: int, x: int, stride: int, steps: int, tokens: int, y: int, out_dim: int,
    threads: int,
) -> None:  # fmt: skip
    """Tensors are addresses; the first three as in `likes`."""
    added, numbers, out = row_at(bias, like)[:bias_dim], np.arange(tokens), row_at(y, like)
    panels, length = (out_dim + LANES - 1) // LANES, slice_length(steps * WORD_BYTES)
    jobs = (tokens + length - 1) // length * panels
    workers = min(jobs, threads)
    for worker in prange(workers):
        opened = opened_for(multiplied, min(tokens, length))
        for job in range(jobs * worker // workers, jobs * (worker + 1) // workers):
            first, panel = job // panels * length, job % panels
            rows, at = numbers[first : first + length], address + panel * panel_bytes
            multiply_panel(
                stored, multiplied, opened, at, steps, x + first * stride, stride, rows, added,
                panel * LANES, out, out_dim,
            )  # fmt: skip
        close(multiplied, opened)


def _rows(
    address: int, panel_bytes: int, out_dim: int, rows: int, indices: Any, count: int, y: int,
    like: Any, words: int, none: int,
) -> None:  # fmt: skip
    """Writes the words of `count` outputs, whose indices are at the address `rows`, to y [count,
    words]; `none` where there is no such output."""
    outputs = row_at(rows, indices)[:count]
    out = row_at(y, like)[: count * words].reshape(count, words)
    for row in prange(count):
        output = outputs[row]
        if 0 <= output < out_dim:
            panel = row_at(address + output // LANES * panel_bytes, like)
            for word in range(words):
                out[row, word] = panel[word * LANES + output % LANES]
        else:
            for word in range(words):
                out[row, word] = none


@part
def sorted_by_expert(chosen: Any, experts: int) -> tuple[Any, Any, Any]:
    """Pairs by rising expert, each expert's first place among them, and the experts present."""
    starts = np.zeros(experts + 1, np.int64)
    for pair in range(chosen.shape[0]):
        starts[chosen[pair] + 1] += 1
    present, count = np.empty(experts, np.int64), 0
    for expert in range(experts):
        # Experts that were not chosen get no job: a job would only find that out.
        if starts[expert + 1] > 0:
            present[count] = expert
            count += 1
        starts[expert + 1] += starts[expert]
    order, places = np.empty(chosen.shape[0], np.int64), starts.copy()
    for pair in range(chosen.shape[0]):
        order[places[chosen[pair]]] = pair
        places[chosen[pair]] += 1
    return order, starts, present[:count]


def _grouped(
    stored: Any, multiplied: Any, like: Any, addresses: Any, panel_bytes: int, biases: int,
    stride_bias: int, bias_dim: int, x: int, tokens: int, in_dim: int, chosen: int, indices: Any,
    pairs: int, gathered: int, padded: int, steps: int, y: int, out_dim: int,
    threads: int,
) -> None:  # fmt: skip
    """Tensors are addresses; `indices` is an empty row of the dtype of `chosen` [pairs]. Rows of x
    are copied to `gathered` [pairs, padded] in the order of their experts, zeros behind each."""
    order, starts, present = sorted_by_expert(row_at(chosen, indices)[:pairs], len(addresses))
    panels, per_row = (out_dim + LANES - 1) // LANES, pairs // tokens
    out = row_at(y, like)
    inputs = row_at(x, like)[: tokens * in_dim].reshape(tokens, in_dim)
    sorted_inputs = row_at(gathered, like)[: pairs * padded].reshape(pairs, padded)
    for pair in prange(pairs):
        sorted_inputs[pair, :in_dim] = inputs[order[pair] // per_row]
        sorted_inputs[pair, in_dim:] = 0
    stride = padded * like.itemsize
    jobs, length = present.shape[0] * panels, slice_length(stride)
    workers = min(jobs, threads)
    for worker in prange(workers):
        opened = opened_for(multiplied, min(pairs, length))
        for job in range(jobs * worker // workers, jobs * (worker + 1) // workers):
            # A job is a panel with all of its expert's pairs, so every weight is read once.
            expert, panel = present[job // panels], job % panels
            at, end = addresses[expert] + panel * panel_bytes, starts[expert + 1]
            added = row_at(biases + expert * stride_bias * like.itemsize, like)[:bias_dim]
            for first in range(starts[expert], end, length):
                rows, start = order[first : min(first + length, end)], gathered + first * stride
                multiply_panel(
                    stored, multiplied, opened, at, steps, start, stride, rows, added,
                    panel * LANES, out, out_dim,
                )  # fmt: skip
        close(multiplied, opened)


_product_loop, _grouped_loop = Loop(_product, STRICT), Loop(_grouped, STRICT)
_rows_loop = Loop(_rows, STRICT)

# About so many tokens are multiplied by a panel in the time in which it is read.
_TOKENS_AS_LONG_AS_READING = 16
_WORD = np.empty(0, np.int32)
_NO_NUMBER = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC07FC0}
_WORDS_OF_LINE = 16
"""The words that a processor reads with one of a row: neighbours in a panel are other rows'."""


@cache
def likes(dtype: torch.dtype, has_dots: bool) -> tuple[Any, Any, Any]:
    """A number by whose type the loops know how a weight is stored, one for how they multiply
    inputs of `dtype`, and an empty row of it."""
    weight = np.uint16(0) if dtype is torch.bfloat16 else np.float32(0)
    return weight, weight if has_dots else np.float32(0), row_like(dtype)


@cache
def _kinds(dtype: torch.dtype, has_dots: bool, is_tiled: bool) -> tuple[Any, Any, Any, int]:
    """`likes`, but None for a product by tiles, and to what multiple inputs are read."""
    stored, multiplied, like = likes(dtype, has_dots)
    if dtype is not torch.bfloat16:
        return stored, multiplied, like, 1
    return (stored, None, like, 2 * ROWS) if is_tiled else (stored, multiplied, like, 2)


def packed_product_compiled(
    x: Tensor, address: int, panel_bytes: int, bias: Tensor, out_dim: int
) -> Tensor:
    stored, multiplied, like, multiple = _kinds(x.dtype, HAS_DOTS, has_tiles())
    if x.shape[1] % multiple:
        # Memory beyond a row's end may be infinite, which is not zero with a weight of zero.
        x = F.pad(x, (0, -x.shape[1] % multiple))
    elif x.stride(1) != 1:
        x = x.contiguous()
    (tokens, in_dim), size = x.shape, x.itemsize
    y = torch.empty(tokens, out_dim, dtype=x.dtype)
    elements = out_dim * in_dim
    elements += elements * tokens // _TOKENS_AS_LONG_AS_READING
    if multiplied is None and repays_copies(tokens, out_dim):
        tiled_loop(
            elements,
            like, address, panel_bytes, bias.data_ptr(), bias.numel(), x.data_ptr(),
            x.stride(0) * size, in_dim // multiple, tokens, y.data_ptr(), out_dim,
            torch.get_num_threads(),
        )  # fmt: skip
        return y
    _product_loop(
        elements,
        stored, multiplied, like, address, panel_bytes, bias.data_ptr(), bias.numel(), x.data_ptr(),
        x.stride(0) * size, in_dim * size // WORD_BYTES, tokens, y.data_ptr(), out_dim,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def panel_rows_compiled(
    address: int, panel_bytes: int, out_dim: int, rows: Tensor, numbers: Tensor
) -> None:
    """Fills `numbers` [n, in_dim], rows of whole words, with the outputs `rows` [n]."""
    rows = rows.contiguous()
    count, words = len(numbers), numbers.shape[1] * numbers.itemsize // WORD_BYTES
    _rows_loop(
        count * words * _WORDS_OF_LINE,
        address, panel_bytes, out_dim, rows.data_ptr(), row_like(rows.dtype), count,
        numbers.data_ptr(), _WORD, words, _NO_NUMBER[numbers.dtype],
    )  # fmt: skip


def packed_grouped_product_compiled(
    x: Tensor, addresses: Any, panel_bytes: int, biases: Tensor, chosen: Tensor, out_dim: int
) -> Tensor:
    *kinds, multiple = _kinds(x.dtype, HAS_DOTS, has_tiles())
    (tokens, in_dim), pairs = x.shape, chosen.numel()
    x, chosen = x.contiguous(), chosen.contiguous()
    gathered = x.new_empty((pairs, -(-in_dim // multiple) * multiple))
    padded = gathered.shape[1]
    y = x.new_empty((pairs, out_dim))
    work = min(pairs, len(addresses)) + pairs // _TOKENS_AS_LONG_AS_READING
    count, bias_dim = biases.shape
    _grouped_loop(
        work * out_dim * in_dim,
        *kinds, addresses, panel_bytes, biases.data_ptr(), bias_dim if count > 1 else 0,
        bias_dim, x.data_ptr(), tokens, in_dim, chosen.data_ptr(), row_like(chosen.dtype), pairs,
        gathered.data_ptr(), padded, padded * x.itemsize // WORD_BYTES, y.data_ptr(), out_dim,
        torch.get_num_threads(),
    )  # fmt: skip
    return y
