"""The loop over experts' weights in blocks for the CPU.

Formulas and names are those of `grouped_blocks`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import STRICT, Loop, prange, row_like
from ferryman_kernels.cpu._lanes import LANES, STEP_BYTES, lanes_at
from ferryman_kernels.cpu._panel_tiles import WORD_BYTES
from ferryman_kernels.cpu._tiles import aligned_words
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.products._packed_product_compiled import sorted_by_expert
from ferryman_kernels.products._panel_sums import close, opened_for, slice_length
from ferryman_kernels.products.blocks._block_codes import FACTORS_BYTES
from ferryman_kernels.products.blocks._block_product_compiled import (
    FACTOR,
    TOKENS_AS_LONG_AS_DECODING,
    decoded_steps,
    kinds_of,
    multiply_codes,
)


def _grouped(
    stored: Any, multiplied: Any, like: Any, form: Any, table: int, panels: Any, panel_bytes: int,
    factors: Any, factor: Any, biases: int, stride_bias: int, bias_dim: int, x: int, tokens: int,
    in_dim: int, chosen: int, indices: Any, pairs: int, gathered: int, steps: int, y: int,
    out_dim: int, threads: int,
) -> None:  # fmt: skip
    """Tensors are addresses, `panels` and `factors` [experts] those of each expert; `indices` is an
    empty row of the dtype of `chosen` [pairs]. Where an expert has several rows of x, all rows are
    copied to `gathered` [pairs, in_dim] in the order of their experts."""
    order, starts, present = sorted_by_expert(row_at(chosen, indices)[:pairs], len(panels))
    of_expert, per_row = (out_dim + LANES - 1) // LANES, pairs // tokens
    out = row_at(y, like)
    inputs = row_at(x, like)[: tokens * in_dim].reshape(tokens, in_dim)
    sorted_inputs = row_at(gathered, like)[: pairs * in_dim].reshape(pairs, in_dim)
    most = 0
    for expert in present:
        most = max(most, starts[expert + 1] - starts[expert])
    if most > 1:
        for pair in prange(pairs):
            sorted_inputs[pair] = inputs[order[pair] // per_row]
    # numba drops a loop whose array nobody reads after it. An address without a sign would make
    # floats of those that are counted from it.
    rows = np.intp(sorted_inputs.ctypes.data)
    stride = in_dim * like.itemsize
    jobs, length = present.shape[0] * of_expert, slice_length(stride)
    workers = min(jobs, threads)
    for worker in prange(workers):
        opened = opened_for(multiplied, min(most, length))
        room = aligned_words(2 * FACTORS_BYTES // WORD_BYTES)
        near = aligned_words(decoded_steps(steps, most) * STEP_BYTES // WORD_BYTES)
        weight = (form, table, room.ctypes.data)
        for job in range(jobs * worker // workers, jobs * (worker + 1) // workers):
            # A job is a panel with all of its expert's pairs, so every code is read once.
            expert, panel = present[job // of_expert], job % of_expert
            first, end = starts[expert], starts[expert + 1]
            at = rows + first * stride if most > 1 else x + order[first] // per_row * stride
            added = row_at(biases + expert * stride_bias * like.itemsize, like)[:bias_dim]
            of_panel = lanes_at(row_at(factors[expert], factor), panel * LANES)
            multiply_codes(
                stored, multiplied, weight, panels[expert] + panel * panel_bytes, of_panel, steps,
                at, stride, order[first:end], added, panel * LANES, out,
                out_dim, length, opened, near.ctypes.data,
            )  # fmt: skip
        close(multiplied, opened)
        near[0], room[0] = 0, 0  # numba ends an array's life after its last use


_grouped_loop = Loop(_grouped, STRICT)


def grouped_blocks_compiled(
    x: Tensor, form: tuple[int, ...], table: Tensor, addresses: tuple[Any, Any], panel_bytes: int,
    biases: Tensor, chosen: Tensor, out_dim: int,
) -> Tensor:  # fmt: skip
    """`addresses` of each expert's panels and factors; x [tokens, in_dim]; all else as in
    `BlockStack`."""
    x, chosen = x.contiguous(), chosen.contiguous()
    (tokens, in_dim), pairs = x.shape, chosen.numel()
    gathered, y = torch.empty(pairs, in_dim, dtype=x.dtype), x.new_empty((pairs, out_dim))
    if not pairs:  # tiles of no rows are not configured, and end the process
        return y
    panels, factors = addresses
    work = min(pairs, len(panels)) + pairs // TOKENS_AS_LONG_AS_DECODING
    count, bias_dim = biases.shape
    _grouped_loop(
        work * out_dim * in_dim,
        *kinds_of(x.dtype), form, table.data_ptr(), panels, panel_bytes, factors, FACTOR,
        biases.data_ptr(), bias_dim if count > 1 else 0, bias_dim, x.data_ptr(), tokens, in_dim,
        chosen.data_ptr(), row_like(chosen.dtype), pairs, gathered.data_ptr(),
        in_dim * x.itemsize // WORD_BYTES, y.data_ptr(), out_dim, torch.get_num_threads(),
    )  # fmt: skip
    return y
