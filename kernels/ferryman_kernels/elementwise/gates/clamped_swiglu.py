"""The activation of experts whose gate and up are cut, of one product's outputs: gate's come first.

    gate, up = min(x[t, c], limit), x[t, inner_dim + c] within ±limit
    y[t, c]  = (up + added) · gate · sigmoid(alpha · gate)                     [tokens, inner_dim]

gpt-oss and MiniMax M3 add 1; HY V4 adds nothing, with an alpha of 1.

Computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, tl
from ferryman_kernels.cpu._compiled import STRICT, Loop, exp, narrow, prange, row_like, wide
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.elementwise._rms_norm_compiled import SILU_ELEMENTS
from ferryman_kernels.elementwise.gates.launches import launch_gate, run_gate


def clamped_swiglu_reference(x: Tensor, alpha: float, limit: float, added: float) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + added) * (gate * torch.sigmoid(gate * alpha))


def _clamped(
    like: Any, floats: Any, x: int, stride_x: int, alpha: float, limit: float, added: float,
    y: int, tokens: int, dim: int,
) -> None:  # fmt: skip
    # A plain 1 would widen the whole loop.
    number = floats.dtype.type
    slope, high, one, shift = number(alpha), number(limit), number(1), number(added)
    for token in prange(tokens):
        at = x + token * stride_x * like.itemsize
        gates = row_at(at, like)[:dim]
        ups = row_at(at + dim * like.itemsize, like)[:dim]
        out = row_at(y + token * dim * like.itemsize, like)[:dim]
        for c in range(dim):
            gate, up = wide(gates[c]), wide(ups[c])
            # In this form what is no number stays none.
            gate = high if gate > high else gate
            up = high if up > high else up
            up = -high if up < -high else up
            out[c] = narrow((up + shift) * (gate / (one + exp(-slope * gate))), out)


_clamped_loop = Loop(_clamped, STRICT)


def clamped_swiglu_compiled(x: Tensor, alpha: float, limit: float, added: float) -> Tensor:
    assert x.stride(1) == 1, x.stride()
    tokens, dim = x.shape[0], x.shape[1] // 2
    y = torch.empty(tokens, dim, dtype=x.dtype)
    _clamped_loop(
        SILU_ELEMENTS * tokens * dim,
        row_like(x.dtype), row_like(wide_dtype(x.dtype)), x.data_ptr(), x.stride(0), float(alpha),
        float(limit), float(added), y.data_ptr(), tokens, dim,
    )  # fmt: skip
    return y


@Kernel
def _clamped_swiglu_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_x_row: int,
    dim: int,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ADDED: tl.constexpr,
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
    # In this form what is no number stays none.
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, up)
    up = tl.where(up < -LIMIT, -LIMIT, up)
    y = (up + ADDED) * (gate / (1.0 + tl.exp(-(gate * ALPHA))))
    tl.store(y_ptr + row * dim + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def clamped_swiglu_triton(x: Tensor, alpha: float, limit: float, added: float) -> Tensor:
    return launch_gate(_clamped_swiglu_kernel, x, ALPHA=alpha, LIMIT=limit, ADDED=added)


def clamped_swiglu(x: Tensor, alpha: float, limit: float, added: float) -> Tensor:
    """y [tokens, inner_dim] for x [tokens, 2 · inner_dim]."""
    forms = clamped_swiglu_triton, clamped_swiglu_compiled, clamped_swiglu_reference
    return run_gate(forms, x, alpha, limit, added)
