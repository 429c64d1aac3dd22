"""The activation of a gated MLP, of one product's outputs: gate's first, then up's.

    y[t, c] = silu(x[t, c]) · x[t, inner_dim + c]                              [tokens, inner_dim]

silu is rounded to the dtype of x before it is multiplied, as torch's operations round it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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


def gated_silu_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gated_silu(like: Any, x: int, stride_x: int, y: int, tokens: int, dim: int) -> None:
    size = like.itemsize
    for token in prange(tokens):
        at = x + token * stride_x * size
        gate, up = row_at(at, like)[:dim], row_at(at + dim * size, like)[:dim]
        out = row_at(y + token * dim * size, like)[:dim]
        for c in range(dim):
            opened = wide(narrow(silu(wide(gate[c])), out))
            out[c] = narrow(opened * wide(up[c]), out)


_gated_silu_loop = Loop(_gated_silu, STRICT)


def gated_silu_compiled(x: Tensor) -> Tensor:
    assert x.stride(1) == 1, x.stride()
    tokens, dim = x.shape[0], x.shape[1] // 2
    y = torch.empty(tokens, dim, dtype=x.dtype)
    _gated_silu_loop(
        SILU_ELEMENTS * tokens * dim,
        row_like(x.dtype), x.data_ptr(), x.stride(0), y.data_ptr(), tokens, dim,
    )  # fmt: skip
    return y


@Kernel
def _gated_silu_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_x_row: int,
    dim: int,
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
    opened = (gate / (1.0 + tl.exp(-gate))).to(y_ptr.dtype.element_ty).to(WIDE)
    tl.store(y_ptr + row * dim + offs, (opened * up).to(y_ptr.dtype.element_ty), mask=mask)


def gated_silu_triton(x: Tensor) -> Tensor:
    return launch_gate(_gated_silu_kernel, x)


def gated_silu(x: Tensor) -> Tensor:
    """silu(gate) · up [tokens, inner_dim] for x [tokens, 2 · inner_dim]."""
    forms = gated_silu_triton, gated_silu_compiled, gated_silu_reference
    return run_gate(forms, x)
