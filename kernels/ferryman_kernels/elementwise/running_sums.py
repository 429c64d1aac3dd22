"""Running sums along rows, in their place: x[r, i] ← Σ_{j ≤ i} x[r, j]           [rows, length]

In the order of the row, some numbers at a time on a card. There torch's sum has an order for each
number of rows, and for a single row one that may change from call to call.
"""

from __future__ import annotations

from torch import Tensor

from ferryman_kernels._triton import Kernel, tl

BLOCK = 2048
"""Numbers of a row that are summed at once."""


@Kernel
def _running_sums_kernel(x_ptr: tl.tensor, length: int, BLOCK: tl.constexpr) -> None:
    """One row, block after block."""
    row = x_ptr + tl.program_id(0).to(tl.int64) * length
    offs = tl.arange(0, BLOCK)
    before = tl.zeros([1], x_ptr.dtype.element_ty)
    for start in range(0, length, BLOCK):
        mask = start + offs < length
        x = tl.load(row + start + offs, mask=mask, other=0.0)
        tl.store(row + start + offs, before + tl.cumsum(x, axis=0), mask=mask)
        before += tl.sum(x, axis=0)


def running_sums_triton(x: Tensor) -> Tensor:
    assert x.is_contiguous(), x.stride()
    _running_sums_kernel[len(x),](x, x.shape[1], BLOCK=BLOCK, num_warps=8)
    return x


def running_sums_(x: Tensor) -> Tensor:
    """The sums of each row of x [rows, length], which is overwritten and returned."""
    assert x.ndim == 2, x.shape
    return running_sums_triton(x) if x.is_cuda else x.cumsum_(dim=-1)
