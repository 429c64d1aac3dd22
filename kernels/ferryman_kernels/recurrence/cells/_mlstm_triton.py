"""The mLSTM cell in Triton over runs of tokens, for prefill and decode alike; see `mlstm`.

Programs of the second kernel read the norm that the first one has written, so it writes the factors
of each token for them: no program waits for another. `runs` rows: first token, tokens, read,
written and copied slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, laid_out, next_power_of_two, tl
from ferryman_kernels.recurrence.cells.mlstm_rows import CellGates, CellRows
from ferryman_kernels.recurrence.selective_scan import run_at

BLOCK_DIM = 16
"""Rows of a head's matrix that one program holds."""


@Kernel
def _mlstm_norms_kernel(
    norm_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    enter_ptr: tl.tensor,
    forget_ptr: tl.tensor,
    runs_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    stride_slot: int,
    heads: int,
    k_dim: int,
    CAP: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
) -> None:
    """keep, enter and the divisor of the tokens of one run for one head; its norm and maximum."""
    token, count, src, dst, copy = run_at(runs_ptr, tl.program_id(0))
    head = tl.program_id(1)
    wide = norm_ptr.dtype.element_ty
    offs = tl.arange(0, BLOCK_KEY)
    mask = offs < k_dim
    in_slot = head * (k_dim + 1) + offs
    norm_at = norm_ptr + src * stride_slot + in_slot
    norm = tl.load(norm_at, mask=offs < tl.where(src >= 0, k_dim, 0), other=0.0)
    peak_at = norm_ptr + head * (k_dim + 1) + k_dim
    peak = tl.load(peak_at + src * stride_slot, mask=src >= 0, other=0.0)
    end = token + count
    while token < end:
        row_at = (token * heads + head) * k_dim + offs
        key = tl.load(k_ptr + row_at, mask=mask, other=0.0).to(wide)
        query = tl.load(q_ptr + row_at, mask=mask, other=0.0).to(wide) * SCALE
        enter = tl.load(enter_ptr + token * heads + head).to(wide)
        forget = tl.load(forget_ptr + token * heads + head).to(wide)
        enter = CAP - 2 * CAP / (tl.exp(2 * enter / CAP) + 1)  # cap · tanh(raw / cap)
        forget = CAP - 2 * CAP / (tl.exp(2 * forget / CAP) + 1)
        # log(1 + small), without losing what the sum rounds away (Kahan).
        small = tl.exp(-tl.abs(forget))
        one_more = 1.0 + small
        lost = one_more == 1.0
        ratio = small / tl.where(lost, 1.0, one_more - 1.0)
        moved = peak + tl.minimum(forget, 0.0) - tl.where(lost, small, tl.log(one_more) * ratio)
        peak = tl.where(enter > moved, enter, moved)
        keep, entering = tl.exp(moved - peak), tl.exp(enter - peak)
        norm = keep * norm + entering * key
        length, least = tl.abs(tl.sum(norm * query, axis=0)), tl.exp(-peak)
        divisor = tl.where(least > length, least, length) + EPS
        factors_at = factors_ptr + (token * heads + head) * 3
        tl.store(factors_at, keep)
        tl.store(factors_at + 1, entering)
        tl.store(factors_at + 2, divisor)
        token += 1
    kept = offs < tl.where(dst >= 0, k_dim, 0)
    copied = offs < tl.where(copy >= 0, k_dim, 0)
    tl.store(norm_ptr + dst * stride_slot + in_slot, norm, mask=kept)
    tl.store(norm_ptr + copy * stride_slot + in_slot, norm, mask=copied)
    tl.store(peak_at + dst * stride_slot, peak, mask=dst >= 0)
    tl.store(peak_at + copy * stride_slot, peak, mask=copy >= 0)


@Kernel
def _mlstm_rows_kernel(
    matrix_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    runs_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_slot: int,
    heads: int,
    v_dim: int,
    k_dim: int,
    SCALE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
) -> None:
    """Some rows of one head's matrix, for the tokens of one run."""
    token, count, src, dst, copy = run_at(runs_ptr, tl.program_id(0))
    head = tl.program_id(1)
    wide = matrix_ptr.dtype.element_ty
    offs_dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    offs_key = tl.arange(0, BLOCK_KEY)
    mask_dim, mask_key = offs_dim < v_dim, offs_key < k_dim
    in_slot = (head * v_dim + offs_dim)[:, None] * k_dim + offs_key[None, :]
    held = (offs_dim < tl.where(src >= 0, v_dim, 0))[:, None] & mask_key[None, :]
    # The rows stay in registers from the run's first token to its last.
    matrix = tl.load(matrix_ptr + src * stride_slot + in_slot, mask=held, other=0.0)
    end = token + count
    while token < end:
        of_head = token * heads + head
        key = tl.load(k_ptr + of_head * k_dim + offs_key, mask=mask_key, other=0.0).to(wide)
        query = tl.load(q_ptr + of_head * k_dim + offs_key, mask=mask_key, other=0.0).to(wide)
        value = tl.load(v_ptr + of_head * v_dim + offs_dim, mask=mask_dim, other=0.0).to(wide)
        keep, enter = tl.load(factors_ptr + of_head * 3), tl.load(factors_ptr + of_head * 3 + 1)
        divisor = tl.load(factors_ptr + of_head * 3 + 2)
        matrix = keep * matrix + (enter * value)[:, None] * key[None, :]
        y = tl.sum(matrix * (query * SCALE)[None, :], axis=1) / divisor
        y_at = y_ptr + of_head * v_dim + offs_dim
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask_dim)
        token += 1
    kept = (offs_dim < tl.where(dst >= 0, v_dim, 0))[:, None] & mask_key[None, :]
    copied = (offs_dim < tl.where(copy >= 0, v_dim, 0))[:, None] & mask_key[None, :]
    tl.store(matrix_ptr + dst * stride_slot + in_slot, matrix, mask=kept)
    tl.store(matrix_ptr + copy * stride_slot + in_slot, matrix, mask=copied)


def mlstm_runs_triton(
    rows: CellRows, gates: CellGates, matrix: Tensor, norm: Tensor, runs: Tensor, y: Tensor
) -> None:
    """Writes `y` [tokens, heads, v_dim]; `matrix` and `norm` advance from slot to slot."""
    heads, v_dim, k_dim = matrix.shape[1:]
    assert matrix.stride()[1:] == (v_dim * k_dim, k_dim, 1), matrix.stride()
    assert norm.stride()[1:] == (k_dim + 1, 1), norm.stride()
    q, k, v, enter, forget = map(laid_out, (*rows, gates.enter, gates.forget))
    factors = torch.empty(len(v), heads, 3, dtype=matrix.dtype, device=v.device)
    scale, block_key = float(k_dim**-0.5), next_power_of_two(k_dim)
    _mlstm_norms_kernel[len(runs), heads](
        norm, q, k, enter, forget, runs, factors, norm.stride(0), heads, k_dim,
        CAP=float(gates.cap), EPS=float(gates.eps), SCALE=scale, BLOCK_KEY=block_key, num_warps=4,
    )  # fmt: skip
    block = min(BLOCK_DIM, next_power_of_two(v_dim))
    _mlstm_rows_kernel[len(runs), heads, cdiv(v_dim, block)](
        matrix, q, k, v, factors, runs, y, matrix.stride(0), heads, v_dim, k_dim,
        SCALE=scale, BLOCK_DIM=block, BLOCK_KEY=block_key, num_warps=4,
    )  # fmt: skip
