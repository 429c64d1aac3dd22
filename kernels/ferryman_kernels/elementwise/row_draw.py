"""Draws of tokens by inverse CDF on a card: two launches and a sort between them.

`inverse_cdf.py` has the formula, and draws in the same way by torch's operations on a CPU. Here one
program weighs a row of logits and sums it up; torch sorts the rows; one program a row adds the
weights in their order, applies the filters and chooses. Weights are float64 and summed in blocks of
a row, one after the other, so a token depends on its own row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, KernelPart, tl, wide_type, with_whole_rows

BLOCK = 2048
"""Numbers of a row that are summed at once."""


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Rows of logits that are drawn, all [drawn]: `indices` among the logits, and the parameters
    of each draw. `top_k` 0 keeps all."""

    indices: Tensor
    uniforms: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@KernelPart
def _weight(logits: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((logit − top) / temperature); the difference is rounded to the logits' dtype."""
    return tl.exp((logits - top).to(tl.float64) / temperature)


@Kernel
def _weigh_rows_kernel(
    logits_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    stride: int,
    length: int,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One drawn row: copied in float32 at least, and the sum of its weights."""
    draw = tl.program_id(0).to(tl.int64)
    source = logits_ptr + tl.load(indices_ptr + draw) * stride
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), WIDE)
    for start in range(0, length, BLOCK):
        mask = start + lane < length
        logits = tl.load(source + start + lane, mask=mask, other=float("-inf")).to(WIDE)
        tl.store(rows_ptr + draw * length + start + lane, logits, mask=mask)
        best = tl.where(logits > best, logits, best)
    top, temperature = tl.max(best, axis=0), tl.load(temperatures_ptr + draw)
    last = (length - 1) // BLOCK * BLOCK
    before = tl.zeros([1], tl.float64)
    for start in range(0, last, BLOCK):
        logits = tl.load(source + start + lane).to(WIDE)
        before += tl.sum(_weight(logits, top, temperature), axis=0)
    mask = last + lane < length
    logits = tl.load(source + last + lane, mask=mask, other=0.0).to(WIDE)
    weights = tl.where(mask, _weight(logits, top, temperature), 0.0)
    sums = before + tl.cumsum(weights, axis=0)
    total = tl.sum(tl.where(last + lane == length - 1, sums, 0.0), axis=0)
    tl.store(totals_ptr + draw, total)


@KernelPart
def _num_below(
    sums_ptr: tl.tensor, bound: tl.tensor, length: int, OR_EQUAL: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The running sums of a row that are below a bound, or equal to it."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        mask = start + lane < length
        sums = tl.load(sums_ptr + start + lane, mask=mask, other=float("inf"))
        is_below = sums <= bound if OR_EQUAL else sums < bound
        count += (mask & is_below).to(tl.int32)
    return tl.sum(count, axis=0)


@Kernel
def _draw_rows_kernel(
    ranked_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    length: int,
    spoilt: int,
    BLOCK: tl.constexpr,
) -> None:
    """One drawn row, its logits ranked: running sums, what the filters keep, and the token."""
    draw = tl.program_id(0).to(tl.int64)
    ranked, sums_row = ranked_ptr + draw * length, sums_ptr + draw * length
    top, temperature = tl.load(ranked), tl.load(temperatures_ptr + draw)
    min_p, total = tl.load(min_p_ptr + draw), tl.load(totals_ptr + draw)
    lane = tl.arange(0, BLOCK)
    likely, possible = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    before = tl.zeros([1], tl.float64)
    for start in range(0, length, BLOCK):
        mask = start + lane < length
        logits = tl.load(ranked + start + lane, mask=mask, other=float("-inf"))
        weights = tl.where(mask, _weight(logits, top, temperature), 0.0)
        tl.store(sums_row + start + lane, before + tl.cumsum(weights, axis=0), mask=mask)
        before += tl.sum(weights, axis=0)
        likely += (mask & (weights >= min_p)).to(tl.int32)
        possible += (logits > float("-inf")).to(tl.int32)
    # From here on threads read the sums of others.
    tl.debug_barrier()
    top_k, top_p = tl.load(top_k_ptr + draw), tl.load(top_p_ptr + draw)
    kept = tl.where((top_k > 0) & (top_k < length), top_k, length).to(tl.int32)
    mass = tl.where(kept == length, total, tl.load(sums_row + kept - 1))
    if top_p < 1:
        needed = _num_below(sums_row, top_p * mass, length, False, BLOCK) + 1
        kept = tl.minimum(kept, needed)
    kept = tl.minimum(kept, tl.sum(likely, axis=0))
    at_end = tl.load(sums_row + tl.maximum(kept - 1, 0))
    target = tl.load(uniforms_ptr + draw) * tl.where(kept >= length, total, at_end)
    index = _num_below(sums_row, target, length, True, BLOCK)
    # Rounding may put the target on the very end of the kept weight, after which there are only
    # tokens that must not be drawn. A row with NaN keeps none.
    last = tl.minimum(kept, tl.sum(possible, axis=0)) - 1
    index = tl.maximum(tl.minimum(index, last), 0)
    row = tl.load(indices_ptr + draw)
    is_drawn = tl.load(tokens_ptr + row) != spoilt
    tl.store(tokens_ptr + row, tl.load(ids_ptr + draw * length + index), mask=is_drawn)


def draw_rows_triton_(tokens: Tensor, logits: Tensor, drawn: DrawnRows, spoilt: int) -> Tensor:
    """Writes a token for each drawn row of logits [rows, vocab] into `tokens` [rows], int64, which
    is returned; a row whose token is `spoilt` keeps it."""
    logits = with_whole_rows(logits)
    count, length = len(drawn.indices), logits.shape[1]
    wide = wide_dtype(logits.dtype)
    rows = torch.empty(count, length, dtype=wide, device=logits.device)
    totals = torch.empty(count, dtype=torch.float64, device=logits.device)
    _weigh_rows_kernel[count,](
        logits, drawn.indices, drawn.temperatures, rows, totals, logits.stride(0), length,
        BLOCK=BLOCK, WIDE=wide_type(logits.dtype), num_warps=16,
    )  # fmt: skip
    # Sorted before the division by temperature, which could turn different logits into ties.
    ranked, token_ids = rows.sort(dim=-1, descending=True, stable=True)
    sums = torch.empty(count, length, dtype=torch.float64, device=logits.device)
    _draw_rows_kernel[count,](
        ranked, token_ids, sums, totals, tokens, drawn.indices, drawn.uniforms,
        drawn.temperatures, drawn.top_k, drawn.top_p, drawn.min_p, length, spoilt,
        BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return tokens
