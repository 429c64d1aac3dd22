"""The place of the greatest number of each row, if all numbers of the row are finite.

    y[r] = min{i : x[r, i] = max_j x[r, j]}  if all x[r, j] are finite,  else `otherwise`   [rows]

On a card it is one launch, one program a row. It compares and adds nothing, so no order of sums can
change it, and what it gives a row depends on nothing but that row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, tl, wide_type, with_whole_rows

BLOCK = 4096
"""Numbers of a row that are compared at once."""


def finite_argmax_reference(x: Tensor, otherwise: int) -> Tensor:
    # A sum of numbers is finite exactly when all of them are, but for sums beyond 1e38.
    return torch.where(x.sum(dim=-1).isfinite(), x.argmax(dim=-1), otherwise)


@Kernel
def _finite_argmax_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride: int,
    length: int,
    otherwise: int,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One row: each lane keeps its greatest number and the first place of it."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), WIDE)
    place = tl.full([BLOCK], length, tl.int32)
    spoilt = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        mask = start + lane < length
        x = tl.load(x_ptr + row * stride + start + lane, mask=mask, other=0.0).to(WIDE)
        # NaN is below no number.
        spoilt |= (tl.abs(x) < float("inf")).to(tl.int32) ^ 1
        is_better = mask & (x > best)
        best = tl.where(is_better, x, best)
        place = tl.where(is_better, start + lane, place)
    first = tl.min(tl.where(best == tl.max(best, axis=0), place, length), axis=0)
    is_whole = tl.max(spoilt, axis=0) == 0
    tl.store(y_ptr + row, tl.where(is_whole, first, otherwise).to(tl.int64))


def finite_argmax_triton(x: Tensor, otherwise: int) -> Tensor:
    x = with_whole_rows(x)
    y = torch.empty(len(x), dtype=torch.int64, device=x.device)
    if len(x):
        _finite_argmax_kernel[len(x),](
            x, y, x.stride(0), x.shape[1], otherwise,
            BLOCK=BLOCK, WIDE=wide_type(x.dtype), num_warps=8,
        )  # fmt: skip
    return y


def finite_argmax(x: Tensor, otherwise: int) -> Tensor:
    """Places [rows], int64, in x [rows, length]: the lowest in a tie; `otherwise` for a row that
    holds NaN or an infinity."""
    assert x.ndim == 2, x.shape
    return (finite_argmax_triton if x.is_cuda else finite_argmax_reference)(x, otherwise)
