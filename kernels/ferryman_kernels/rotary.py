"""Rotary position embedding in the half-rotated ("neox") layout (Su et al. 2021).

    angle    = position · inv_freq                                       [tokens, rotary_half]
    (a, b)   = the first and the second `rotary_half` elements of a head
    (a', b') = (a·cos - b·sin, b·cos + a·sin)

What lies behind the first 2·rotary_half elements of a head is passed on as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype


def apply_rotary_reference(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor
) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(q.dtype)
    angle = positions.to(wide)[:, None, None] * inv_freq.to(wide)  # [tokens, 1, rotary_half]
    cos, sin = angle.cos(), angle.sin()
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a = heads[..., :half].to(cos.dtype)
    b = heads[..., half : 2 * half].to(cos.dtype)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(heads.dtype)
    if 2 * half == heads.shape[-1]:
        return turned
    return torch.cat((turned, heads[..., 2 * half :]), dim=-1)


def apply_rotary(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor
) -> tuple[Tensor, Tensor]:
    """Turned copies of `q` [tokens, q_heads, head_dim] and `k` [tokens, kv_heads, head_dim]."""
    tokens, _, head_dim = q.shape
    assert k.shape[0] == tokens, (q, k)
    assert k.shape[2] == head_dim, (q, k)
    assert k.dtype == q.dtype, (q, k)
    assert positions.shape == (tokens,), positions
    assert not positions.is_floating_point(), positions
    assert inv_freq.ndim == 1, inv_freq.shape
    assert 2 * inv_freq.shape[0] <= head_dim, inv_freq.shape
    return apply_rotary_reference(q, k, positions, inv_freq)
