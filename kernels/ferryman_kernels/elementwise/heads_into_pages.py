"""The heads of new tokens on their way to attention: norms, rotation, keys and values in pages.

    q, k  = rotated(norm(q)), rotated(norm(k))      a norm of each head, and a rotation, or one
    v     = norm(v)                                 if values are normed; zeros behind narrow ones
    k, v  → pages                                   as by `attention.pages.write_kv`

Formulas are those of `rms_norm`, `rotary` and `write_kv`: a head is rounded after its norm, before
its rotation, so the bits are those of the parts. On a card all of it is one kernel, in which a
program has some heads of one token. `turned_heads` does the same op by op, up to the pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._triton import Kernel, KernelPart, cdiv, next_power_of_two, tl, wide_type
from ferryman_kernels.elementwise.rms_norm import rms_norm
from ferryman_kernels.elementwise.rotary import apply_rotary

BLOCK = 1024
"""Channels of heads that a program has."""


class ProjectedHeads(NamedTuple):
    """`q` [tokens, q_heads, head_dim], `k` [tokens, kv_heads, head_dim] and `v` [tokens, kv_heads,
    value_dim] of one dtype. Channels of a head lie side by side; heads and tokens may lie apart."""

    q: Tensor
    k: Tensor
    v: Tensor


class HeadNorms(NamedTuple):
    """Weights [head_dim] of the norms of heads, in the accumulation dtype; `v` of values, if these
    are normed."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    eps: float


class HeadTurn(NamedTuple):
    """The norms of heads, if there are any, and their rotation by `inv_freq` [rotary_half], which
    is empty without one, times `scaling`."""

    norms: HeadNorms | None
    inv_freq: Tensor
    scaling: float


class TokenPlaces(NamedTuple):
    """A page table [requests, pages], each token's row of it [tokens], and absolute positions
    [tokens], as `write_kv` has them."""

    table: Tensor
    rows: Tensor
    positions: Tensor


def turned_heads(heads: ProjectedHeads, turn: HeadTurn, positions: Tensor) -> ProjectedHeads:
    """Heads after their norms and their rotation, by the op of each; values are as wide as keys."""
    q, k, v = side_by_side(heads.q), heads.k, heads.v
    if turn.norms is not None:
        q, k = _normed(q, turn.norms.q, turn.norms.eps), _normed(k, turn.norms.k, turn.norms.eps)
        if turn.norms.v is not None:
            v = _normed(v, turn.norms.v, turn.norms.eps)
    if len(turn.inv_freq):
        q, k = apply_rotary(q, k, positions, turn.inv_freq, turn.scaling)
    missing = k.shape[2] - v.shape[2]
    return ProjectedHeads(q, k, F.pad(v, (0, missing)) if missing else v)


def side_by_side(heads: Tensor) -> Tensor:
    """Heads of a token [tokens, heads, head_dim] without anything between them."""
    return heads if heads.stride(1) == heads.shape[2] else heads.contiguous()


def _normed(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(heads.flatten(0, 1), weight, eps).view_as(heads)


@KernelPart
def _turned(
    row: tl.tensor,
    weight_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    position: tl.tensor,
    is_head: tl.tensor,
    head_dim: int,
    half: int,
    EPS: tl.constexpr,
    SCALING: tl.constexpr,
    NORMS: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Heads [heads, BLOCK_DIM] whose first channels are at `row` [heads, 1], before they are
    rounded."""
    offs = tl.arange(0, BLOCK_DIM)
    is_channel = offs < head_dim
    mask = is_head & is_channel[None, :]
    numbers = tl.load(row + offs[None, :], mask=mask, other=0.0)
    x = numbers.to(WIDE)
    if NORMS:
        scale = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / head_dim + EPS))[:, None]
        weight = tl.load(weight_ptr + offs, mask=is_channel, other=0.0).to(WIDE)
        x = (x * scale * weight[None, :]).to(numbers.dtype).to(WIDE)
    if TURNS:
        turned = offs < 2 * half
        first = offs < half
        partner = tl.where(first, offs + half, tl.where(turned, offs - half, offs))
        # A partner is read and normed again: it may be in another thread's registers.
        other = tl.load(row + partner[None, :], mask=mask, other=0.0).to(WIDE)
        if NORMS:
            weight = tl.load(weight_ptr + partner, mask=is_channel, other=0.0).to(WIDE)
            other = (other * scale * weight[None, :]).to(numbers.dtype).to(WIDE)
        freq_at = tl.where(first, offs, offs - half)
        inv_freq = tl.load(inv_freq_ptr + freq_at, mask=turned, other=0.0).to(WIDE)
        angle = position.to(WIDE) * inv_freq
        cos = tl.where(turned, tl.cos(angle) * SCALING, 1.0)
        sin = tl.where(first, -tl.sin(angle), tl.sin(angle)) * SCALING
        x = x * cos[None, :] + other * sin[None, :]
    return x


@Kernel.for_any("stride_table_row")
def _heads_into_pages_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    key_pages_ptr: tl.tensor,
    value_pages_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    v_weight_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    stride_q_token: int,
    stride_q_head: int,
    stride_k_token: int,
    stride_k_head: int,
    stride_v_token: int,
    stride_v_head: int,
    stride_page: int,
    stride_table_row: int,
    page_size: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    half: int,
    EPS: tl.constexpr,
    SCALING: tl.constexpr,
    NORMS: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """HEADS heads of one token: of queries in the first programs, then of keys, then of values."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    q_parts, kv_parts = tl.cdiv(q_heads, HEADS), tl.cdiv(kv_heads, HEADS)
    part = tl.program_id(1)
    offs = tl.arange(0, BLOCK_DIM)[None, :]
    lane = tl.arange(0, HEADS)[:, None]
    if part < q_parts:
        head = part * HEADS + lane
        row = q_ptr + token * stride_q_token + head * stride_q_head
        y = _turned(
            row, q_weight_ptr, inv_freq_ptr, position, head < q_heads, head_dim, half,
            EPS, SCALING, NORMS, TURNS, BLOCK_DIM, WIDE,
        )  # fmt: skip
        at = (token * q_heads + head) * head_dim + offs
        mask = (head < q_heads) & (offs < head_dim)
        tl.store(turned_ptr + at, y.to(turned_ptr.dtype.element_ty), mask=mask)
    else:
        of_request = tl.load(rows_ptr + token).to(tl.int64)
        column = tl.maximum(position, 0) // page_size
        page_at = page_table_ptr + of_request * stride_table_row + column
        page = tl.load(page_at).to(tl.int64)
        page = tl.where(position >= 0, page, -1)
        heads_here = tl.where(page >= 0, kv_heads, 0)  # a token without a page writes no head
        if part < q_parts + kv_parts:
            head = (part - q_parts) * HEADS + lane
            row = k_ptr + token * stride_k_token + head * stride_k_head
            y = _turned(
                row, k_weight_ptr, inv_freq_ptr, position, head < heads_here, head_dim, half,
                EPS, SCALING, NORMS, TURNS, BLOCK_DIM, WIDE,
            )  # fmt: skip
            at = page * stride_page + (head * page_size + position % page_size) * head_dim + offs
            mask = (head < heads_here) & (offs < head_dim)
            tl.store(key_pages_ptr + at, y.to(key_pages_ptr.dtype.element_ty), mask=mask)
        else:
            head = (part - q_parts - kv_parts) * HEADS + lane
            row = v_ptr + token * stride_v_token + head * stride_v_head
            y = _turned(
                row, v_weight_ptr, inv_freq_ptr, position, head < heads_here, value_dim, half,
                EPS, SCALING, NORMS_VALUES, False, BLOCK_DIM, WIDE,
            )  # fmt: skip
            at = page * stride_page + (head * page_size + position % page_size) * head_dim + offs
            mask = (head < heads_here) & (offs < head_dim)
            tl.store(value_pages_ptr + at, y.to(value_pages_ptr.dtype.element_ty), mask=mask)


def heads_into_pages(
    heads: ProjectedHeads,
    turn: HeadTurn,
    key_pages: Tensor,
    value_pages: Tensor,
    places: TokenPlaces,
) -> Tensor:
    """Writes keys and values to the page of each token; returns q after norm and rotation.

    The pages are strided views [slots, kv_heads, page_size, head_dim] of a slab, of the heads'
    dtype. Narrower values get zeros behind. A card alone.
    """
    _check(heads, turn, key_pages, value_pages, places)
    q, k, v = heads
    table, rows, positions = places
    tokens, q_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = key_pages.shape
    norms = turn.norms or HeadNorms(turn.inv_freq, turn.inv_freq, None, 0.0)
    block = next_power_of_two(head_dim)
    in_program = min(max(1, BLOCK // block), next_power_of_two(q_heads))
    turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _heads_into_pages_kernel[tokens, cdiv(q_heads, in_program) + 2 * cdiv(kv_heads, in_program)](
        q, k, v, turned, key_pages, value_pages,
        norms.q, norms.k, norms.q if norms.v is None else norms.v, turn.inv_freq,
        table, rows, positions,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        key_pages.stride(0), table.stride(0), page_size, q_heads, kv_heads, head_dim, v.shape[2],
        len(turn.inv_freq), EPS=float(norms.eps), SCALING=float(turn.scaling),
        NORMS=turn.norms is not None, NORMS_VALUES=norms.v is not None,
        TURNS=len(turn.inv_freq) > 0, HEADS=in_program, BLOCK_DIM=block, WIDE=wide_type(q.dtype),
        num_warps=2,
    )  # fmt: skip
    return turned


def _check(
    heads: ProjectedHeads,
    turn: HeadTurn,
    key_pages: Tensor,
    value_pages: Tensor,
    places: TokenPlaces,
) -> None:
    q, k, v = heads
    table, rows, positions = places
    _, kv_heads, page_size, head_dim = key_pages.shape
    assert value_pages.shape == key_pages.shape, (key_pages.shape, value_pages.shape)
    assert value_pages.stride() == key_pages.stride(), (key_pages.stride(), value_pages.stride())
    assert key_pages.stride()[1:] == (page_size * head_dim, head_dim, 1), key_pages.stride()
    assert q.shape[::2] == (len(rows), head_dim), (q.shape, key_pages.shape)
    assert k.shape == (len(q), kv_heads, head_dim), (k.shape, key_pages.shape)
    assert v.shape[:2] == k.shape[:2], (v.shape, k.shape)
    assert v.shape[2] <= head_dim, (v.shape, head_dim)
    assert q.dtype == k.dtype == v.dtype == key_pages.dtype == value_pages.dtype, q.dtype
    assert rows.shape == positions.shape, (rows.shape, positions.shape)
    assert 2 * len(turn.inv_freq) <= head_dim, (turn.inv_freq.shape, head_dim)
    assert q.stride(2) == k.stride(2) == v.stride(2) == table.stride(1) == 1, q.stride()
    assert rows.stride(0) == positions.stride(0) == 1, (rows.stride(), positions.stride())
