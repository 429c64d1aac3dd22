"""Root mean square norm, plain and gated (Zhang & Sennrich 2019; the gated one is Mamba-2's).

    rms_norm(x)          = x / sqrt(mean(x²) + eps) · weight                       [tokens, dim]
    gated_rms_norm(x, g) = rms_norm over each of `groups` groups of x · silu(g)    [tokens, dim]

Computed in float32 (float64 for float64) and rounded once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._precision import wide_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = wide_dtype(x.dtype)
    h = x.to(wide)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * scale * weight.to(wide)).to(x.dtype)


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    wide = wide_dtype(x.dtype)
    h = (x.to(wide) * F.silu(gate.to(wide))).view(len(x), groups, -1)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return ((h * scale).flatten(1) * weight.to(wide)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of each row of `x` [tokens, dim]; `weight` [dim]."""
    assert x.ndim == 2, (x.shape, weight.shape)
    assert weight.shape == x.shape[1:], (x.shape, weight.shape)
    return rms_norm_reference(x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Norm of `x · silu(gate)`, both [tokens, dim], over each of `groups` equal parts of a row."""
    assert x.ndim == 2, (x.shape, gate.shape)
    assert gate.shape == x.shape, (x.shape, gate.shape)
    assert weight.shape == x.shape[1:], (weight.shape, groups)
    assert x.shape[1] % groups == 0, (weight.shape, groups)
    return gated_rms_norm_reference(x, gate, weight, eps, groups)
