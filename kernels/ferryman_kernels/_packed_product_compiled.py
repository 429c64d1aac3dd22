"""The packed product's loop for the CPU: a few tokens share each read of the weight.

Formulas and names are those of `packed_product`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._compiled import Loop, as_array, narrow, part, prange, row_like, wide
from ferryman_kernels._lanes import LANES, STEP_BYTES, add_step, no_sums, steps_of
from ferryman_kernels._vectors import row_at, store


@part
def panel_sums(like: Any, address: Any, x: Any, rows: Any, sums: Any) -> None:
    """The products of the panel at `address` with the `rows` of x, float32, to the rows of `sums`
    [rows, 64]. A row's bits do not depend on the others."""
    # Four rows use a weight while it is in registers; for the rest the panel is in the cache.
    whole = rows.shape[0] // 4 * 4
    for i in range(0, whole, 4):
        x0, x1, x2, x3 = x[rows[i]], x[rows[i + 1]], x[rows[i + 2]], x[rows[i + 3]]
        sums0 = sums1 = sums2 = sums3 = no_sums()
        at = address
        for step in range(steps_of(like, x0)):
            sums0 = add_step(like, sums0, at, x0, step)
            sums1 = add_step(like, sums1, at, x1, step)
            sums2 = add_step(like, sums2, at, x2, step)
            sums3 = add_step(like, sums3, at, x3, step)
            at += STEP_BYTES
        store(sums[i], 0, sums0)
        store(sums[i + 1], 0, sums1)
        store(sums[i + 2], 0, sums2)
        store(sums[i + 3], 0, sums3)
    for i in range(whole, rows.shape[0]):
        row, at, own = x[rows[i]], address, no_sums()
        for step in range(steps_of(like, row)):
            own = add_step(like, own, at, row, step)
            at += STEP_BYTES
        store(sums[i], 0, own)


@part
def widened(x: Any) -> Any:
    """x in float32."""
    out = np.empty(x.shape, np.float32)
    for token in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[token, i] = wide(x[token, i])
    return out


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
    weight: Any, like: Any, address: int, panel_bytes: int, bias: int, bias_dim: int, x: int,
    tokens: int, in_dim: int, y: int, out_dim: int,
) -> None:  # fmt: skip
    rows, added = np.arange(tokens), row_at(bias, like)[:bias_dim]
    inputs = widened(row_at(x, like)[: tokens * in_dim].reshape(tokens, in_dim))
    out = row_at(y, like)[: tokens * out_dim].reshape(tokens, out_dim)
    for panel in prange((out_dim + LANES - 1) // LANES):
        sums = np.empty((tokens, LANES), np.float32)
        panel_sums(weight, address + panel * panel_bytes, inputs, rows, sums)
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
    like: Any,
    addresses: Any,
    panel_bytes: int,
    biases: Any,
    x: Any,
    chosen: Any,
    y: Any,
) -> None:
    order, starts, present = sorted_by_expert(chosen, addresses.shape[0])
    inputs, rows = widened(x), order // (chosen.shape[0] // x.shape[0])
    panels = (y.shape[1] + LANES - 1) // LANES
    for job in prange(present.shape[0] * panels):
        # A job is a panel with all of its expert's pairs, so every weight is read once.
        expert, panel = present[job // panels], job % panels
        first, end = starts[expert], starts[expert + 1]
        sums = np.empty((end - first, LANES), np.float32)
        address = addresses[expert] + panel * panel_bytes
        panel_sums(like, address, inputs, rows[first:end], sums)
        bias = biases[expert if biases.shape[0] > 1 else 0]
        for i in range(end - first):
            write_panel(sums[i], bias, panel, y[order[first + i]])


_product_loop, _grouped_loop = Loop(_product), Loop(_grouped)

# A weight takes 0.1 ns: a product is shared from 33 M of them on.
_WEIGHTS_PER_ELEMENT = 4


def element_like(dtype: torch.dtype) -> Any:
    """The number by whose type the loops know how a weight is stored."""
    return np.uint16(0) if dtype is torch.bfloat16 else np.float32(0)


def packed_product_compiled(
    x: Tensor, address: int, panel_bytes: int, bias: Tensor, out_dim: int
) -> Tensor:
    (tokens, in_dim), x = x.shape, x.contiguous()
    y = torch.empty(tokens, out_dim, dtype=x.dtype)
    _product_loop(
        out_dim * in_dim // _WEIGHTS_PER_ELEMENT,
        element_like(x.dtype), row_like(x.dtype), address, panel_bytes, bias.data_ptr(), len(bias),
        x.data_ptr(), tokens, in_dim, y.data_ptr(), out_dim,
    )  # fmt: skip
    return y


def packed_grouped_product_compiled(
    x: Tensor, addresses: Any, panel_bytes: int, biases: Tensor, chosen: Tensor, out_dim: int
) -> Tensor:
    pairs = chosen.numel()
    y = torch.empty(pairs, out_dim, dtype=x.dtype)
    read = min(pairs, len(addresses)) * out_dim * x.shape[1]
    _grouped_loop(
        read // _WEIGHTS_PER_ELEMENT,
        element_like(x.dtype), addresses, panel_bytes, as_array(biases), as_array(x.contiguous()),
        chosen.flatten().numpy(), as_array(y),
    )  # fmt: skip
    return y
