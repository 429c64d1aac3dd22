"""The launches of activations of gated MLPs, and the choice among the forms of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, next_power_of_two, wide_type
from ferryman_kernels.cpu._compiled import serves

BLOCK_DIM = 1024
"""Channels of a token that one program computes."""


def launch_gate(kernel: Kernel, x: Tensor, **constants: Any) -> Tensor:
    """y [tokens, inner_dim] of a kernel over some channels of one token, for x [tokens, 2 ·
    inner_dim]."""
    assert x.stride(1) == 1, x.stride()
    tokens, dim = x.shape[0], x.shape[1] // 2
    y = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
    block = min(BLOCK_DIM, next_power_of_two(dim))
    kernel[tokens, cdiv(dim, block)](
        x, y, x.stride(0), dim,
        **constants, BLOCK_DIM=block, WIDE=wide_type(x.dtype), num_warps=4,
    )  # fmt: skip
    return y


Forms = tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]
"""An activation for a card, as a loop of the CPU, and in torch."""


def run_gate(forms: Forms, x: Tensor, *numbers: float) -> Tensor:
    """The activation of x, with its `numbers`, by the form that serves x."""
    triton, compiled, reference = forms
    assert x.shape[-1] % 2 == 0, x.shape
    has_rows = x.ndim == 2 and x.stride(1) == 1
    if has_rows and x.is_cuda:
        return triton(x, *numbers)
    if has_rows and serves(x):
        return compiled(x, *numbers)
    return reference(x, *numbers)
