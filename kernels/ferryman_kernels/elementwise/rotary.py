"""Rotary position embedding in the half-rotated ("neox") layout (Su et al. 2021).

    angle    = position · inv_freq                                       [tokens, rotary_half]
    (a, b)   = the first and the second `rotary_half` elements of a head
    (a', b') = scaling · (a·cos - b·sin, b·cos + a·sin)

Elements of a head beyond the first 2·rotary_half stay unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, next_power_of_two, tl, wide_type
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.elementwise._rotary_compiled import apply_rotary_compiled


def apply_rotary_reference(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(q.dtype)
    angle = positions.to(wide)[:, None, None] * inv_freq.to(wide)  # [tokens, 1, rotary_half]
    cos, sin = angle.cos() * scaling, angle.sin() * scaling
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a = heads[..., :half].to(cos.dtype)
    b = heads[..., half : 2 * half].to(cos.dtype)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(heads.dtype)
    if 2 * half == heads.shape[-1]:
        return turned
    return torch.cat((turned, heads[..., 2 * half :]), dim=-1)


@Kernel
def _rotary_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    stride_x_token: int,
    stride_x_head: int,
    heads: int,
    head_dim: int,
    half: int,
    SCALING: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """All heads of one token: each element is combined with its partner `half` elements away."""
    token = tl.program_id(0).to(tl.int64)
    offs_head = tl.arange(0, BLOCK_HEADS)[:, None]
    offs_dim = tl.arange(0, BLOCK_DIM)
    turned = offs_dim < 2 * half
    first = offs_dim < half
    partner = tl.where(first, offs_dim + half, tl.where(turned, offs_dim - half, offs_dim))
    freq_at = tl.where(first, offs_dim, offs_dim - half)
    inv_freq = tl.load(inv_freq_ptr + freq_at, mask=turned, other=0.0).to(WIDE)
    angle = tl.load(positions_ptr + token).to(WIDE) * inv_freq
    # For elements that are not rotated the angle is 0, and x must stay unchanged.
    cos = tl.where(turned, tl.cos(angle) * SCALING, 1.0)
    sin = tl.where(first, -tl.sin(angle), tl.sin(angle)) * SCALING
    mask = (offs_head < heads) & (offs_dim < head_dim)[None, :]
    row = x_ptr + token * stride_x_token + offs_head * stride_x_head
    x = tl.load(row + offs_dim[None, :], mask=mask, other=0.0).to(WIDE)
    other = tl.load(row + partner[None, :], mask=mask, other=0.0).to(WIDE)
    y = x * cos[None, :] + other * sin[None, :]
    at = y_ptr + (token * heads + offs_head) * head_dim + offs_dim[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


def apply_rotary_triton(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    return _launch(q, positions, inv_freq, scaling), _launch(k, positions, inv_freq, scaling)


def _launch(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    assert x.stride(2) == positions.stride(0) == inv_freq.stride(0) == 1, x.stride()
    tokens, heads, head_dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotary_kernel[tokens,](
        x, y, positions, inv_freq,
        x.stride(0), x.stride(1), heads, head_dim, len(inv_freq),
        SCALING=float(scaling), BLOCK_HEADS=next_power_of_two(heads),
        BLOCK_DIM=next_power_of_two(head_dim), WIDE=wide_type(x.dtype),
    )  # fmt: skip
    return y


def apply_rotary(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Rotated copies of `q` [tokens, q_heads, head_dim] and `k` [tokens, kv_heads, head_dim].

    `scaling` multiplies the rotated elements (YaRN's attention factor; Peng et al. 2023).
    """
    tokens, _, head_dim = q.shape
    assert k.shape[0] == tokens, (q.shape, k.shape)
    assert k.shape[2] == head_dim, (q.shape, k.shape)
    assert k.dtype == q.dtype, (q.dtype, k.dtype)
    assert positions.shape == (tokens,), (positions.shape, tokens)
    assert not positions.is_floating_point(), positions.dtype
    assert inv_freq.ndim == 1, inv_freq.shape
    assert 2 * len(inv_freq) <= head_dim, (inv_freq.shape, head_dim)
    if q.is_cuda:
        return apply_rotary_triton(q, k, positions, inv_freq, scaling)
    if serves(q) and inv_freq.dtype == wide_dtype(q.dtype):
        return apply_rotary_compiled(q, k, positions, inv_freq, scaling)
    return apply_rotary_reference(q, k, positions, inv_freq, scaling)


def rotate_heads(
    heads: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float = 1.0
) -> Tensor:
    """A rotated copy of `heads` [tokens, heads, head_dim] alone; as `apply_rotary`."""
    if heads.is_cuda:
        return _launch(heads, positions, inv_freq, scaling)
    return apply_rotary(heads, heads[:, :0], positions, inv_freq, scaling)[0]
