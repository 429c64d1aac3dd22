"""The inputs of a gated delta rule on a card, of a convolution's output and two products' rows.

    q, k  = x / √(Σx² + eps) in each head, q / √k_dim          [tokens, k_heads, k_dim]
    g     = -decay · softplus(a + dt_bias)                     [tokens, v_heads]
    β     = max_rate · sigmoid(b)                              [tokens, v_heads]

All of it is one launch, for prefill and decode alike. The lengths are those of `rms_norm` with
weights of 1/√k_dim, to the bit. Softplus and sigmoid are computed in float64 and rounded once, so
they are not those of a library.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, next_power_of_two, tl, wide_type

BLOCK = 1024
"""Channels of heads that a program has."""


class UnitsAndRates(NamedTuple):
    """q and k [tokens, k_heads, k_dim]; g and beta [tokens, v_heads]; in the accumulation dtype."""

    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor


@Kernel
def _delta_inputs_kernel(
    keys_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    unit_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    stride_keys_token: int,
    stride_a_token: int,
    stride_b_token: int,
    k_heads: int,
    k_dim: int,
    v_heads: int,
    EPS: tl.constexpr,
    LENGTH: tl.constexpr,
    MAX_RATE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """HEADS heads of q or k of one token; the last program has the token's rates."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.cdiv(k_heads, HEADS)
    if part < 2 * parts:
        is_key = part >= parts
        head = (part - tl.where(is_key, parts, 0)) * HEADS + tl.arange(0, HEADS)[:, None]
        offs = tl.arange(0, BLOCK_KEY)
        is_channel = offs < k_dim
        mask = (head < k_heads) & is_channel[None, :]
        at = head * k_dim + offs[None, :]
        row = keys_ptr + token * stride_keys_token + tl.where(is_key, k_heads * k_dim, 0)
        x = tl.load(row + at, mask=mask, other=0.0).to(WIDE)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / k_dim + EPS)
        unit = tl.load(unit_ptr + offs, mask=is_channel, other=0.0).to(WIDE)
        y = x * scale[:, None] * unit[None, :]
        to = token * k_heads * k_dim + at
        if is_key:
            tl.store(k_ptr + to, y, mask=mask)
        else:
            tl.store(q_ptr + to, y * LENGTH, mask=mask)
    else:
        value = tl.arange(0, BLOCK_VALUES)
        is_value = value < v_heads
        a = tl.load(a_ptr + token * stride_a_token + value, mask=is_value, other=0.0).to(WIDE)
        step = (a + tl.load(dt_bias_ptr + value, mask=is_value, other=0.0).to(WIDE)).to(tl.float64)
        # log(1 + small), without losing what the sum rounds away (Kahan). Above 20 it is the step.
        small = tl.exp(tl.where(step > 20.0, 0.0, step))
        one_more = 1.0 + small
        is_lost = one_more == 1.0
        ratio = small / tl.where(is_lost, 1.0, one_more - 1.0)
        soft = tl.where(is_lost, small, tl.log(one_more) * ratio)
        soft = tl.where(step > 20.0, step, soft).to(WIDE)
        decay = tl.load(decay_ptr + value, mask=is_value, other=0.0).to(WIDE)
        tl.store(g_ptr + token * v_heads + value, soft * -decay, mask=is_value)
        b = tl.load(b_ptr + token * stride_b_token + value, mask=is_value, other=0.0).to(tl.float64)
        beta = (1.0 / (1.0 + tl.exp(-b))).to(WIDE) * MAX_RATE
        tl.store(beta_ptr + token * v_heads + value, beta, mask=is_value)


def delta_inputs(
    keys: Tensor,
    a: Tensor,
    b: Tensor,
    unit: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    max_rate: float,
    eps: float,
) -> UnitsAndRates:
    """`keys` [tokens, 2 · k_heads · k_dim], heads of q before those of k; `a` and `b` [tokens,
    v_heads]. `unit` [k_dim], all 1/√k_dim, and `decay` and `dt_bias` [v_heads] are in the
    accumulation dtype. `eps` is added to a head's mean square. A card alone."""
    tokens, k_dim, v_heads = len(keys), len(unit), len(decay)
    k_heads = keys.shape[1] // (2 * k_dim)
    assert keys.shape[1] == 2 * k_heads * k_dim, (keys.shape, k_dim)
    assert a.shape == b.shape == (tokens, v_heads), (a.shape, b.shape, v_heads)
    assert keys.stride(1) == a.stride(1) == b.stride(1) == 1, (keys.stride(), a.stride())
    room = torch.empty(2, tokens, k_heads, k_dim, dtype=unit.dtype, device=keys.device)
    rates = torch.empty(2, tokens, v_heads, dtype=unit.dtype, device=keys.device)
    block = next_power_of_two(k_dim)
    in_program = min(max(1, BLOCK // block), next_power_of_two(k_heads))
    inputs = UnitsAndRates(*room.unbind(0), *rates.unbind(0))
    _delta_inputs_kernel[tokens, 2 * cdiv(k_heads, in_program) + 1](
        keys, a, b, unit, decay, dt_bias, *inputs,
        keys.stride(0), a.stride(0), b.stride(0), k_heads, k_dim, v_heads, EPS=float(eps),
        LENGTH=float(k_dim**-0.5), MAX_RATE=float(max_rate), HEADS=in_program, BLOCK_KEY=block,
        BLOCK_VALUES=next_power_of_two(v_heads), WIDE=wide_type(unit.dtype), num_warps=2,
    )  # fmt: skip
    return inputs
