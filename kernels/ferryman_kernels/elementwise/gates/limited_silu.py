"""`gated_silu` whose factors are kept within a limit (Step 3.7), of one product's outputs: gate's
first, then up's.

    gate, up = min(silu(x[t, c]), limit), x[t, inner_dim + c] within ±limit
    y[t, c]  = gate · up                                                       [tokens, inner_dim]

silu is rounded to the dtype of x before it is multiplied, as in `gated_silu`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, tl
from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    narrow,
    prange,
    row_like,
    silu,
    wide,
)
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.elementwise._rms_norm_compiled import SILU_ELEMENTS
from ferryman_kernels.elementwise.gates.launches import launch_gate, run_gate


def limited_silu_reference(x: Tensor, limit: float) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _limited(
    like: Any, floats: Any, x: int, stride_x: int, limit: float, y: int, tokens: int, dim: int
) -> None:
    high = floats.dtype.type(limit)
    for token in prange(tokens):
        at = x + token * stride_x * like.itemsize
        gates = row_at(at, like)[:dim]
        ups = row_at(at + dim * like.itemsize, like)[:dim]
        out = row_at(y + token * dim * like.itemsize, like)[:dim]
        for c in range(dim):
            gate, up = wide(narrow(silu(wide(gates[c])), out)), wide(ups[c])
            # In this form what is no number stays none.
            gate = high if gate > high else gate
            up = high if up > high else up
            up = -high if up < -high else up
            out[c] = narrow(gate * up, out)


_limited_loop = Loop(_limited, STRICT)


def limited_silu_compiled(x: Tensor, limit: float) -> Tensor:
    assert x.stride(1) == 1, x.stride()
    tokens, dim = x.shape[0], x.shape[1] // 2
    y = torch.empty(tokens, dim, dtype=x.dtype)
    _limited_loop(
        SILU_ELEMENTS * tokens * dim,
        row_like(x.dtype), row_like(wide_dtype(x.dtype)), x.data_ptr(), x.stride(0), float(limit),
        y.data_ptr(), tokens, dim,
    )  # fmt: skip
    return y


@Kernel
def _limited_silu_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_x_row: int,
    dim: int,
    LIMIT: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Some channels of one token."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask = offs < dim
    gate_at = x_ptr + row * stride_x_row + offs
    gate = tl.load(gate_at, mask=mask, other=0.0).to(WIDE)
    up = tl.load(gate_at + dim, mask=mask, other=0.0).to(WIDE)
    gate = (gate / (1.0 + tl.exp(-gate))).to(y_ptr.dtype.element_ty).to(WIDE)
    # In this form what is no number stays none.
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, up)
    up = tl.where(up < -LIMIT, -LIMIT, up)
    tl.store(y_ptr + row * dim + offs, (gate * up).to(y_ptr.dtype.element_ty), mask=mask)


def limited_silu_triton(x: Tensor, limit: float) -> Tensor:
    return launch_gate(_limited_silu_kernel, x, LIMIT=limit)


def limited_silu(x: Tensor, limit: float) -> Tensor:
    """y [tokens, inner_dim] for x [tokens, 2 · inner_dim]; `limit` is above 0."""
    forms = limited_silu_triton, limited_silu_compiled, limited_silu_reference
    return run_gate(forms, x, limit)
