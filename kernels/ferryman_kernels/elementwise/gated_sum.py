"""An expert's output added to a sum, times a gate of one number a token (Qwen's shared expert).

    total ← total + y · sigmoid(gate)        [tokens, dim], gate [tokens, 1]

The gate and the product are rounded to the model's dtype before the sum, as by an operation each.
On a card all of it is one launch, and the sigmoid is computed in float64 and rounded once.
"""

from __future__ import annotations

from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, tl, wide_type
from ferryman_kernels.elementwise.activations import sigmoid

BLOCK = 1024
"""Channels that a program has."""


def add_gated_reference_(total: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """One operation after the other, which change `y` too."""
    return total.add_(y.mul_(sigmoid(gate)))


@Kernel
def _add_gated_kernel(
    total_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    stride_total_row: int,
    stride_y_row: int,
    stride_gate_row: int,
    dim: int,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Some channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < dim
    gate = tl.load(gate_ptr + row * stride_gate_row).to(tl.float64)
    narrow = total_ptr.dtype.element_ty
    share = (1.0 / (1.0 + tl.exp(-gate))).to(WIDE).to(narrow).to(WIDE)
    y = tl.load(y_ptr + row * stride_y_row + offs, mask=mask, other=0.0).to(WIDE)
    at = total_ptr + row * stride_total_row + offs
    total = tl.load(at, mask=mask, other=0.0).to(WIDE)
    # In float64 the product of two float32 is exact: no compiler joins it with the sum.
    product = (y.to(tl.float64) * share.to(tl.float64)).to(WIDE)
    tl.store(at, (total + product.to(narrow).to(WIDE)).to(narrow), mask=mask)


def add_gated_triton_(total: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    tokens, dim = total.shape
    assert total.stride(1) == y.stride(1) == 1, (total.stride(), y.stride())
    _add_gated_kernel[tokens, cdiv(dim, BLOCK)](
        total, y, gate, total.stride(0), y.stride(0), gate.stride(0), dim, BLOCK=BLOCK,
        WIDE=wide_type(total.dtype), num_warps=4,
    )  # fmt: skip
    return total


def add_gated_(total: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """`total` [tokens, dim], to which `y` [tokens, dim] is added by `gate` [tokens, 1], all of one
    dtype. `y` may be changed."""
    assert total.shape == y.shape, (total.shape, y.shape)
    assert gate.shape == (len(total), 1), (gate.shape, total.shape)
    assert total.dtype == y.dtype == gate.dtype, (total.dtype, y.dtype, gate.dtype)
    run = add_gated_triton_ if total.is_cuda else add_gated_reference_
    return run(total, y, gate)
