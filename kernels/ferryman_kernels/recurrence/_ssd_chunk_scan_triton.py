"""The chunked scan's three Triton kernels: the summand of each block, the carry, the output.

Formulas and names are those of `ssd_chunk_scan`. A block is described by three integers: the token
of its first column (which belongs to another request when the block is cut), and the columns [low,
high) with tokens of this request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ferryman_kernels._triton import (
    Kernel,
    KernelPart,
    cdiv,
    dot_type,
    next_power_of_two,
    tl,
)
from ferryman_kernels.ragged import SlotAt, Span, on_device
from ferryman_kernels.recurrence.chunk_grid import describe_blocks

MAX_CHUNK_LEN = 128
"""The scores of a block are one tile; a larger one does not fit the registers."""

CARRY_ELEMENTS = 1024
"""Elements of a head's state that one program carries from block to block."""


ADD_PART = 64
SEE_PART = 32
SEE_DIM = 64
"""Columns of a state, and rows of a head, that a program holds at once: as compiled for sm_90a."""

ADD_WARPS, SEE_WARPS = 4, 4
"""Timed on an H200 with tools/tune_kernels.py: with 8 a scan took 1.19 times as long."""


@Kernel
def _blocks_add_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    left_ptr: tl.tensor,
    total_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    stride_x_token: int,
    stride_dt_token: int,
    stride_b_token: int,
    heads_per_group: int,
    head_dim: int,
    state_dim: int,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """left[block, head] = Σ_s exp(L[end] - L[s])·dt[s]·x[s] ⊗ B[s]; total[block, head] = L[end].

    PART columns of the state, all rows.
    """
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wide = left_ptr.dtype.element_ty
    offs_chunk, offs_dim = tl.arange(0, BLOCK_CHUNK), tl.arange(0, BLOCK_DIM)
    offs_state = tl.program_id(2) * PART + tl.arange(0, PART)
    tokens = tl.load(blocks_ptr + block * 3) + offs_chunk
    live = (offs_chunk >= tl.load(blocks_ptr + block * 3 + 1)) & (
        offs_chunk < tl.load(blocks_ptr + block * 3 + 2)
    )
    dt = tl.load(dt_ptr + tokens * stride_dt_token + head, mask=live, other=0.0).to(tl.float64)
    steps = dt * tl.load(a_ptr + head).to(tl.float64)
    total = tl.sum(steps, axis=0)
    to_end = tl.exp((total - tl.cumsum(steps, axis=0)).to(tl.float32))
    x_at = tokens[:, None] * stride_x_token + head * head_dim + offs_dim[None, :]
    x = tl.load(x_ptr + x_at, mask=live[:, None] & (offs_dim < head_dim)[None, :], other=0.0)
    b_at = tokens[:, None] * stride_b_token + (head // heads_per_group) * state_dim
    mask_b = live[:, None] & (offs_state < state_dim)[None, :]
    b = tl.load(b_ptr + b_at + offs_state[None, :], mask=mask_b, other=0.0).to(wide)
    fed = x.to(wide) * (dt.to(tl.float32) * to_end)[:, None]
    left = tl.dot(tl.trans(fed), b, input_precision=PRECISION)
    first = (block * tl.num_programs(1) + head) * head_dim
    left_at = (first + offs_dim[:, None]) * state_dim + offs_state[None, :]
    mask = (offs_dim < head_dim)[:, None] & (offs_state < state_dim)[None, :]
    tl.store(left_ptr + left_at, left, mask=mask)
    tl.store(total_ptr + block * tl.num_programs(1) + head, total.to(tl.float32))


@KernelPart
def _block_to_carry(
    at: tl.tuple, heads: tl.tensor, offs: tl.tensor, block: tl.tensor, last: tl.tensor
) -> tl.tuple:
    """A block's summand, decay and snapshot's slot or -1; from `last` on those of the last one."""
    left_ptr, total_ptr, snapshots_ptr, head_elements = at
    block = tl.minimum(block, last - 1)
    in_total = block * heads + tl.program_id(1)
    mask = offs < head_elements
    left = tl.load(left_ptr + in_total * head_elements + offs, mask=mask, other=0.0)
    decay = tl.exp(tl.load(total_ptr + in_total))
    return left, decay, tl.load(snapshots_ptr + block)


@KernelPart
def _carried(
    state: tl.tensor,
    read: tl.tuple,
    at: tl.tuple,
    written: tl.tuple,
    offs: tl.tensor,
    of: tl.tuple,
) -> tl.tensor:
    """The state after a block, which is written where it is wanted; `state` enters the block, and
    is all that there is from `last` on."""
    left, decay, dst = read
    left_ptr, _, _, head_elements = at
    states_ptr, stride_slot = written
    block, last = of
    in_total = block * tl.num_programs(1) + tl.program_id(1)
    live = offs < tl.where(block < last, head_elements, 0)
    tl.store(left_ptr + in_total * head_elements + offs, state, mask=live)
    state = tl.where(block < last, left + decay * state, state)
    asked = live & (offs < tl.where(dst >= 0, head_elements, 0))
    in_slot = tl.program_id(1) * head_elements + offs
    tl.store(states_ptr + dst * stride_slot + in_slot, state, mask=asked)
    return state


@Kernel
def _carry_states_kernel(
    left_ptr: tl.tensor,
    total_ptr: tl.tensor,
    ssm_states_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    first_blocks_ptr: tl.tensor,
    snapshots_ptr: tl.tensor,
    stride_slot: int,
    head_elements: int,
    BLOCK: tl.constexpr,
) -> None:
    """Runs through one request's blocks: `left` becomes the state that enters each block.

    `snapshots` [blocks] is the slot for the state after the block, or -1. Four blocks are read
    before the first of them is written. A compiler keeps loads behind a store to the same tensor,
    so a block at a time waits for memory three times in a row: for the summand, decay and slot.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    offs = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < head_elements
    in_slot = ssm_states_ptr + slot * stride_slot + head * head_elements + offs
    state = tl.load(in_slot, mask=mask, other=0.0)
    heads, at = tl.num_programs(1), (left_ptr, total_ptr, snapshots_ptr, head_elements)
    written = ssm_states_ptr, stride_slot
    last = tl.load(first_blocks_ptr + request + 1)
    for block in range(tl.load(first_blocks_ptr + request), last, 4):
        read0 = _block_to_carry(at, heads, offs, block, last)
        read1 = _block_to_carry(at, heads, offs, block + 1, last)
        read2 = _block_to_carry(at, heads, offs, block + 2, last)
        read3 = _block_to_carry(at, heads, offs, block + 3, last)
        state = _carried(state, read0, at, written, offs, (block, last))
        state = _carried(state, read1, at, written, offs, (block + 1, last))
        state = _carried(state, read2, at, written, offs, (block + 2, last))
        state = _carried(state, read3, at, written, offs, (block + 3, last))
    tl.store(in_slot, state, mask=mask)


@Kernel
def _tokens_see_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    entering_ptr: tl.tensor,
    y_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    stride_x_token: int,
    stride_dt_token: int,
    stride_b_token: int,
    stride_c_token: int,
    heads_per_group: int,
    head_dim: int,
    state_dim: int,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
    NARROW: tl.constexpr,
) -> None:
    """y of one block, some rows of one head, from the block's own tokens and the state before it.

    The state goes by in parts of PART columns.
    """
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wide = entering_ptr.dtype.element_ty
    offs_chunk, offs_part = tl.arange(0, BLOCK_CHUNK), tl.arange(0, PART)
    offs_dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    tokens = tl.load(blocks_ptr + block * 3) + offs_chunk
    live = (offs_chunk >= tl.load(blocks_ptr + block * 3 + 1)) & (
        offs_chunk < tl.load(blocks_ptr + block * 3 + 2)
    )
    mask_dim = offs_dim < head_dim
    dt = tl.load(dt_ptr + tokens * stride_dt_token + head, mask=live, other=0.0).to(tl.float64)
    log_decay = tl.cumsum(dt * tl.load(a_ptr + head).to(tl.float64), axis=0)
    group = (head // heads_per_group) * state_dim
    first = (block * tl.num_programs(1) + head) * head_dim
    before = tl.zeros([BLOCK_CHUNK, BLOCK_DIM], wide)
    scores = tl.zeros([BLOCK_CHUNK, BLOCK_CHUNK], tl.float32)
    for low in range(0, BLOCK_STATE, PART):
        offs_state = low + offs_part
        mask_state = offs_state < state_dim
        mask_rows = live[:, None] & mask_state[None, :]
        b_at = tokens[:, None] * stride_b_token + group + offs_state[None, :]
        c_at = tokens[:, None] * stride_c_token + group + offs_state[None, :]
        b = tl.load(b_ptr + b_at, mask=mask_rows, other=0.0).to(NARROW)
        c = tl.load(c_ptr + c_at, mask=mask_rows, other=0.0).to(NARROW)
        entering_at = (first + offs_dim[:, None]) * state_dim + offs_state[None, :]
        mask = mask_dim[:, None] & mask_state[None, :]
        entering = tl.load(entering_ptr + entering_at, mask=mask, other=0.0)
        before += tl.dot(c.to(wide), tl.trans(entering), input_precision=PRECISION)
        scores += tl.dot(c, tl.trans(b), input_precision=PRECISION)
    y = before * tl.exp(log_decay.to(tl.float32))[:, None]

    between = (log_decay[:, None] - log_decay[None, :]).to(tl.float32)
    seen = offs_chunk[:, None] >= offs_chunk[None, :]
    decay = tl.exp(tl.where(seen, between, float("-inf")))
    scores = scores * decay
    x_at = tokens[:, None] * stride_x_token + head * head_dim + offs_dim[None, :]
    mask_x = live[:, None] & mask_dim[None, :]
    x = tl.load(x_ptr + x_at, mask=mask_x, other=0.0).to(wide)
    y += tl.dot(scores, x * dt.to(tl.float32)[:, None], input_precision=PRECISION)
    y += tl.load(d_ptr + head).to(wide) * x
    y_at = (tokens[:, None] * tl.num_programs(1) + head) * head_dim + offs_dim[None, :]
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask_x)


def chunk_scan_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    chunk_len: int,
) -> Tensor:
    """Scans with float32 states; each float32 product runs as three tf32 products."""
    ssm_heads, ssm_head_dim, ssm_state = ssm_states.shape[1:]
    _check(x, dt, A, B, C, D, ssm_states, slots, chunk_len)
    firsts, blocks, wanted = describe_blocks(spans, snapshots, chunk_len)
    described = on_device(blocks, x.device)
    left = torch.empty(len(blocks), ssm_heads, ssm_head_dim, ssm_state, device=x.device)
    total = torch.empty(len(blocks), ssm_heads, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = (ssm_heads // B.shape[1], ssm_head_dim, ssm_state)
    block_dim = max(16, next_power_of_two(ssm_head_dim))
    block_state = max(16, next_power_of_two(ssm_state))
    shared = {"BLOCK_CHUNK": max(16, next_power_of_two(chunk_len)), "PRECISION": "tf32x3"}
    part = min(block_state, ADD_PART)
    _blocks_add_kernel[len(blocks), ssm_heads, block_state // part](
        x, dt, A, B, left, total, described,
        x.stride(0), dt.stride(0), B.stride(0), *sizes,
        BLOCK_DIM=block_dim, PART=part, **shared, num_warps=ADD_WARPS,
    )  # fmt: skip
    elements = ssm_head_dim * ssm_state
    _carry_states_kernel[len(spans), ssm_heads, cdiv(elements, CARRY_ELEMENTS)](
        left, total, ssm_states, slots, on_device((firsts,), x.device),
        on_device((wanted,), x.device), ssm_states.stride(0), elements, BLOCK=CARRY_ELEMENTS,
    )  # fmt: skip
    block_dim = min(block_dim, SEE_DIM)
    _tokens_see_kernel[len(blocks), ssm_heads, cdiv(ssm_head_dim, block_dim)](
        x, dt, A, B, C, D, left, y, described,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), *sizes,
        BLOCK_DIM=block_dim, BLOCK_STATE=block_state, PART=min(block_state, SEE_PART), **shared,
        NARROW=dot_type(B), num_warps=SEE_WARPS,
    )  # fmt: skip
    return y


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    ssm_states: Tensor, slots: Tensor, chunk_len: int,
) -> None:  # fmt: skip
    head_dim, state = ssm_states.shape[2:]
    assert ssm_states.dtype == torch.float32, ssm_states.dtype
    assert ssm_states.stride()[1:] == (head_dim * state, state, 1), ssm_states.stride()
    assert x.stride()[1:] == (head_dim, 1), x.stride()
    assert B.stride()[1:] == C.stride()[1:] == (state, 1), (B.stride(), C.stride())
    assert B.dtype == C.dtype, (B.dtype, C.dtype)
    assert dt.stride(1) == A.stride(0) == D.stride(0) == slots.stride(0) == 1, dt.stride()
    assert chunk_len <= MAX_CHUNK_LEN, chunk_len
