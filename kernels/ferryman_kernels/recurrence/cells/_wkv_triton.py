"""RWKV-4's weighted mean in Triton over runs of tokens, for prefill and decode alike; see `wkv`."""

from __future__ import annotations

from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, laid_out, next_power_of_two, tl
from ferryman_kernels.recurrence.cells.wkv_rows import NOTHING, WeightedRows
from ferryman_kernels.recurrence.selective_scan import run_at

BLOCK_DIM = 256
"""Channels that one program computes."""


@Kernel
def _wkv_runs_kernel(
    states_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    runs_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_slot: int,
    dim: int,
    NOTHING: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Some channels of one run; `runs` rows: first token, tokens, read, written and copied slot."""
    token, count, src, dst, copy = run_at(runs_ptr, tl.program_id(0))
    wide = states_ptr.dtype.element_ty
    offs = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask = offs < dim
    held = offs < tl.where(src >= 0, dim, 0)
    at = states_ptr + src * stride_slot + offs
    num = tl.load(at, mask=held, other=0.0)
    den = tl.load(at + dim, mask=held, other=0.0)
    peak = tl.load(at + 2 * dim, mask=held, other=NOTHING)
    decay = tl.load(decay_ptr + offs, mask=mask, other=0.0)
    bonus = tl.load(bonus_ptr + offs, mask=mask, other=0.0)
    end = token + count
    while token < end:
        key = tl.load(k_ptr + token * dim + offs, mask=mask, other=0.0).to(wide)
        value = tl.load(v_ptr + token * dim + offs, mask=mask, other=0.0).to(wide)
        begins = tl.load(positions_ptr + token) == 0
        # State from before the first token weighs nothing.
        num, den = tl.where(begins, 0.0, num), tl.where(begins, 0.0, den)
        peak = tl.where(begins, NOTHING, peak)
        raised, lowered = key + bonus, peak - decay
        most = tl.where(raised > peak, raised, peak)
        old, new = tl.exp(peak - most), tl.exp(raised - most)
        y = (old * num + new * value) / (old * den + new)
        tl.store(y_ptr + token * dim + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
        later = tl.where(key > lowered, key, lowered)
        old, new = tl.exp(lowered - later), tl.exp(key - later)
        num, den, peak = old * num + new * value, old * den + new, later
        token += 1
    kept, copied = offs < tl.where(dst >= 0, dim, 0), offs < tl.where(copy >= 0, dim, 0)
    target, second = states_ptr + dst * stride_slot + offs, states_ptr + copy * stride_slot + offs
    tl.store(target, num, mask=kept)
    tl.store(target + dim, den, mask=kept)
    tl.store(target + 2 * dim, peak, mask=kept)
    tl.store(second, num, mask=copied)
    tl.store(second + dim, den, mask=copied)
    tl.store(second + 2 * dim, peak, mask=copied)


def wkv_runs_triton(rows: WeightedRows, states: Tensor, runs: Tensor, y: Tensor) -> None:
    """Scans runs as the reference does."""
    dim = states.shape[2]
    assert states.stride()[1:] == (dim, 1), states.stride()
    k, v, positions, decay, bonus = map(laid_out, rows)
    block = min(BLOCK_DIM, next_power_of_two(dim))
    _wkv_runs_kernel[len(runs), cdiv(dim, block)](
        states, k, v, positions, decay, bonus, runs, y, states.stride(0), dim,
        NOTHING=NOTHING, BLOCK_DIM=block, num_warps=4,
    )  # fmt: skip
