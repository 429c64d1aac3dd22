"""Means of blocks in Triton over runs of tokens, for prefill and decode alike; see `block_mean`."""

from __future__ import annotations

from torch import Tensor

from ferryman_kernels._triton import Kernel, KernelPart, cdiv, laid_out, next_power_of_two, tl
from ferryman_kernels.recurrence.cells.block_mean_rows import NOTHING, BlockedRows
from ferryman_kernels.recurrence.selective_scan import run_at

BLOCK_DIM = 256
"""Channels that one program computes."""


@KernelPart
def _folded_sum(z: tl.tensor, value: tl.tensor, num: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """The weighted sum with one more token; by values of one it is the sum of weights."""
    later = tl.where(z > peak, z, peak)
    return tl.exp(peak - later) * num + tl.exp(z - later) * value


@KernelPart
def _store_sums(
    at: tl.tensor, dim: int, mask: tl.tensor, num: tl.tensor, den: tl.tensor, peak: tl.tensor
) -> None:
    """Writes one series of a state."""
    tl.store(at, num, mask=mask)
    tl.store(at + dim, den, mask=mask)
    tl.store(at + 2 * dim, peak, mask=mask)


@Kernel
def _block_mean_kernel(
    states_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    runs_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_slot: int,
    dim: int,
    block_len: int,
    NOTHING: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Some channels of one run; `runs` rows: first token, tokens, read, written and copied slot."""
    token, count, src, dst, copy = run_at(runs_ptr, tl.program_id(0))
    wide = states_ptr.dtype.element_ty
    series: tl.constexpr = 2 if OVERLAPS else 1
    offs = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask = offs < dim
    held = offs < tl.where(src >= 0, dim, 0)
    at = states_ptr + src * stride_slot + offs
    last_at = at + (series - 1) * 3 * dim
    num = tl.load(last_at, mask=held, other=0.0)
    den = tl.load(last_at + dim, mask=held, other=0.0)
    peak = tl.load(last_at + 2 * dim, mask=held, other=NOTHING)
    next_num, next_den, next_peak = num, den, peak
    if OVERLAPS:
        next_num = tl.load(at, mask=held, other=0.0)
        next_den = tl.load(at + dim, mask=held, other=0.0)
        next_peak = tl.load(at + 2 * dim, mask=held, other=NOTHING)
    end = token + count
    while token < end:
        position = tl.load(positions_ptr + token)
        place = tl.maximum(position, 0) % block_len  # a token that pads a batch is at -1
        begins = place == 0
        if OVERLAPS:
            # A block begins with the sums of the first series, but for the text's first block.
            num = tl.where(begins, next_num, num)
            den = tl.where(begins, next_den, den)
            peak = tl.where(begins, next_peak, peak)
            next_num, next_den = tl.where(begins, 0.0, next_num), tl.where(begins, 0.0, next_den)
            next_peak = tl.where(begins, NOTHING, next_peak)
            begins = position == 0
        num, den = tl.where(begins, 0.0, num), tl.where(begins, 0.0, den)
        peak = tl.where(begins, NOTHING, peak)
        row_at, bias_at = token * series * dim + offs, place * series * dim + offs
        if OVERLAPS:
            value = tl.load(values_ptr + row_at, mask=mask, other=0.0).to(wide)
            z = tl.load(scores_ptr + row_at, mask=mask, other=0.0).to(wide)
            z += tl.load(bias_ptr + bias_at, mask=mask, other=0.0)
            next_num = _folded_sum(z, value, next_num, next_peak)
            next_den = _folded_sum(z, tl.full([BLOCK_DIM], 1.0, wide), next_den, next_peak)
            next_peak = tl.where(z > next_peak, z, next_peak)
            row_at, bias_at = row_at + dim, bias_at + dim
        value = tl.load(values_ptr + row_at, mask=mask, other=0.0).to(wide)
        z = tl.load(scores_ptr + row_at, mask=mask, other=0.0).to(wide)
        z += tl.load(bias_ptr + bias_at, mask=mask, other=0.0)
        num = _folded_sum(z, value, num, peak)
        den = _folded_sum(z, tl.full([BLOCK_DIM], 1.0, wide), den, peak)
        peak = tl.where(z > peak, z, peak)
        mean = num / tl.where(mask, den, 1.0)
        tl.store(y_ptr + token * dim + offs, mean.to(y_ptr.dtype.element_ty), mask=mask)
        token += 1
    kept, copied = offs < tl.where(dst >= 0, dim, 0), offs < tl.where(copy >= 0, dim, 0)
    target, second = states_ptr + dst * stride_slot + offs, states_ptr + copy * stride_slot + offs
    behind = (series - 1) * 3 * dim
    _store_sums(target + behind, dim, kept, num, den, peak)
    _store_sums(second + behind, dim, copied, num, den, peak)
    if OVERLAPS:
        _store_sums(target, dim, kept, next_num, next_den, next_peak)
        _store_sums(second, dim, copied, next_num, next_den, next_peak)


def block_mean_runs_triton(rows: BlockedRows, states: Tensor, runs: Tensor, y: Tensor) -> None:
    """Scans runs as the reference does."""
    dim = states.shape[2]
    assert states.stride()[1:] == (dim, 1), states.stride()
    values, scores, positions, bias = map(laid_out, rows)
    block = min(BLOCK_DIM, next_power_of_two(dim))
    _block_mean_kernel[len(runs), cdiv(dim, block)](
        states, values, scores, positions, bias, runs, y, states.stride(0), dim, len(bias),
        NOTHING=NOTHING, OVERLAPS=states.shape[1] == 6, BLOCK_DIM=block, num_warps=4,
    )  # fmt: skip
