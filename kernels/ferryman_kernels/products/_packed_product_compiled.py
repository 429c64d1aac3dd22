"""The packed product's loop for the CPU: a few tokens share each read of the weight.

Formulas and names are those of `packed_product`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import (
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
    PANEL_AHEAD_BYTES,
    RUN,
    WORD_BYTES,
    add_span,
    stride_of_asking,
)
from ferryman_kernels.cpu._vectors import row_at


@part
def panel_sums(
    stored: Any, multiplied: Any, address: Any, steps: Any, inputs: Any, sums: Any
) -> None:
    """The products of the panel at `address` with the rows of x at the addresses `inputs` [rows],
    to the rows of `sums` [rows, 64], float32. A row's bits do not depend on the others."""
    # Three or four rows use a weight while it is in registers. The others follow after a few steps:
    # after a whole panel the memory would have waited for their products. One group alone is faster
    # without asking for memory.
    count, starts, own = len(inputs), inputs.ctypes.data, sums.ctypes.data
    is_one_group = count <= 4
    run = steps if is_one_group else RUN
    ahead, stride = 0, 0
    if not is_one_group:
        ahead, stride = PANEL_AHEAD_BYTES, stride_of_asking(STEP_BYTES, count)
    sums[:] = 0
    for first in range(0, steps, run):
        span, asked = (first, min(first + run, steps)), address + first * STEP_BYTES + ahead
        add_span(stored, multiplied, address, span, count, starts, own, asked, stride)


@part
def write_panel(sums: Any, bias: Any, panel: int, y: Any) -> None:
    """Rounds the panel's sums [64] into y [out_dim]; there is no bias if it is empty."""
    out = y[panel * LANES : min((panel + 1) * LANES, y.shape[0])]
    if bias.shape[0] > 0:
        for lane in range(out.shape[0]):
            sums[lane] += wide(bias[panel * LANES + lane])
    for lane in range(out.shape[0]):
        out[lane] = narrow(sums[lane], out)


def _product(
    stored: Any, multiplied: Any, like: Any, address: int, panel_bytes: int, bias: int,
    bias_dim: int, x: int, tokens: int, in_dim: int, y: int, out_dim: int,
) -> None:  # fmt: skip
    row_bytes, added = in_dim * like.itemsize, row_at(bias, like)[:bias_dim]
    inputs = x + row_bytes * np.arange(tokens)
    out = row_at(y, like)[: tokens * out_dim].reshape(tokens, out_dim)
    for panel in prange((out_dim + LANES - 1) // LANES):
        sums = np.empty((tokens, LANES), np.float32)
        at = address + panel * panel_bytes
        panel_sums(stored, multiplied, at, row_bytes // WORD_BYTES, inputs, sums)
        for token in range(tokens):
            write_panel(sums[token], added, panel, out[token])


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
    pairs: int, y: int, out_dim: int,
) -> None:  # fmt: skip
    """Tensors are addresses; `indices` is an empty row of the dtype of `chosen` [pairs]."""
    order, starts, present = sorted_by_expert(row_at(chosen, indices)[:pairs], len(addresses))
    row_bytes, panels = in_dim * like.itemsize, (out_dim + LANES - 1) // LANES
    inputs = x + row_bytes * (order // (pairs // tokens))
    out = row_at(y, like)[: pairs * out_dim].reshape(pairs, out_dim)
    for job in prange(present.shape[0] * panels):
        # A job is a panel with all of its expert's pairs, so every weight is read once.
        expert, panel = present[job // panels], job % panels
        first, end = starts[expert], starts[expert + 1]
        sums = np.empty((end - first, LANES), np.float32)
        address = addresses[expert] + panel * panel_bytes
        panel_sums(stored, multiplied, address, row_bytes // WORD_BYTES, inputs[first:end], sums)
        added = row_at(biases + expert * stride_bias * like.itemsize, like)[:bias_dim]
        for i in range(end - first):
            write_panel(sums[i], added, panel, out[order[first + i]])


_product_loop, _grouped_loop = Loop(_product), Loop(_grouped)


@cache
def likes(dtype: torch.dtype, has_dots: bool) -> tuple[Any, Any, Any]:
    """A number by whose type the loops know how a weight is stored, one for how they multiply
    inputs of `dtype`, and an empty row of it."""
    weight = np.uint16(0) if dtype is torch.bfloat16 else np.float32(0)
    return weight, weight if has_dots else np.float32(0), row_like(dtype)


def packed_product_compiled(
    x: Tensor, address: int, panel_bytes: int, bias: Tensor, out_dim: int
) -> Tensor:
    tokens, in_dim = x.shape
    x, y = x.contiguous(), x.new_empty((tokens, out_dim))
    _product_loop(
        out_dim * in_dim // WEIGHTS_PER_ELEMENT,
        *likes(x.dtype, HAS_DOTS), address, panel_bytes, bias.data_ptr(), bias.numel(),
        x.data_ptr(), tokens, in_dim, y.data_ptr(), out_dim,
    )  # fmt: skip
    return y


def packed_grouped_product_compiled(
    x: Tensor, addresses: Any, panel_bytes: int, biases: Tensor, chosen: Tensor, out_dim: int
) -> Tensor:
    (tokens, in_dim), pairs = x.shape, chosen.numel()
    x, chosen = x.contiguous(), chosen.contiguous()
    y = x.new_empty((pairs, out_dim))
    read = min(pairs, len(addresses)) * out_dim * in_dim
    count, bias_dim = biases.shape
    _grouped_loop(
        read // WEIGHTS_PER_ELEMENT,
        *likes(x.dtype, HAS_DOTS), addresses, panel_bytes, biases.data_ptr(),
        bias_dim if count > 1 else 0, bias_dim, x.data_ptr(), tokens, in_dim, chosen.data_ptr(),
        row_like(chosen.dtype), pairs, y.data_ptr(), out_dim,
    )  # fmt: skip
    return y
