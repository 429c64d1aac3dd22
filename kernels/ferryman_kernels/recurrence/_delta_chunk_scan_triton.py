"""The chunked delta rule's three Triton kernels: the system of each block, the carry, the output.

Formulas and names are those of `delta_chunk_scan`. The system of a block is solved before the state
that enters it is known, for both of its right sides:

    fed = from_values - from_state·entering
    from_values = system⁻¹·β·v,   from_state = system⁻¹·β·exp(L)·k

A block is described by three integers: the token of its first row (which belongs to another request
when the block is cut), and the rows [low, high) with tokens of this request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, next_power_of_two, tl
from ferryman_kernels.ragged import SlotAt, Span, on_device
from ferryman_kernels.recurrence.chunk_grid import describe_blocks

MAX_CHUNK_LEN = 64
"""The system of a block is one tile; a larger one does not fit the registers."""

PART_DIM = 32
"""Channels of keys or values in one product: with 128, operands spill to memory. 64 saved 4 % on an
H200, and takes twice the shared memory."""

WARPS = 4
"""Of each of the three kernels."""


@Kernel
def _solve_blocks_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    from_values_ptr: tl.tensor,
    from_state_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    stride_k_token: int,
    stride_v_token: int,
    stride_g_token: int,
    stride_beta_token: int,
    heads_per_key: int,
    chunk_len: int,
    k_dim: int,
    v_dim: int,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Both right sides of one block and one head, multiplied by the inverse of its system."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wide = from_values_ptr.dtype.element_ty
    rows, offs_part = tl.arange(0, BLOCK_CHUNK), tl.arange(0, PART)
    tokens = tl.load(blocks_ptr + block * 3) + rows
    live = (rows >= tl.load(blocks_ptr + block * 3 + 1)) & (
        rows < tl.load(blocks_ptr + block * 3 + 2)
    )
    g = tl.load(g_ptr + tokens * stride_g_token + head, mask=live, other=0.0).to(tl.float64)
    log_decay = tl.cumsum(g, axis=0)
    beta_at = beta_ptr + tokens * stride_beta_token + head
    beta = tl.load(beta_at, mask=live, other=0.0).to(wide)
    k_at = k_ptr + tokens[:, None] * stride_k_token + (head // heads_per_key) * k_dim
    v_at = v_ptr + tokens[:, None] * stride_v_token + head * v_dim

    system = tl.zeros([BLOCK_CHUNK, BLOCK_CHUNK], wide)
    for low in range(0, BLOCK_KEY, PART):
        keys = (low + offs_part)[None, :]
        k = tl.load(k_at + keys, mask=live[:, None] & (keys < k_dim), other=0.0).to(wide)
        system += tl.dot(k, tl.trans(k), input_precision=PRECISION)
    behind = rows[:, None] > rows[None, :]
    between = (log_decay[:, None] - log_decay[None, :]).to(tl.float32)
    system = system * tl.exp(tl.where(behind, between, float("-inf"))) * beta[:, None]
    inverse = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0).to(wide)
    for i in range(1, chunk_len):
        own = rows[:, None] == i
        row = tl.sum(tl.where(own, system, 0.0), axis=0)
        solved = tl.sum(row[:, None] * inverse, axis=0)
        inverse -= tl.where(own, solved[None, :], 0.0)

    first = (block * tl.num_programs(1) + head) * chunk_len + rows[:, None]
    stored = (rows < chunk_len)[:, None]
    for low in range(0, BLOCK_DIM, PART):
        dims = (low + offs_part)[None, :]
        v = tl.load(v_at + dims, mask=live[:, None] & (dims < v_dim), other=0.0).to(wide)
        from_values = tl.dot(inverse, v * beta[:, None], input_precision=PRECISION)
        at = from_values_ptr + first * v_dim + dims
        tl.store(at, from_values, mask=stored & (dims < v_dim))
    reach = beta * tl.exp(log_decay.to(tl.float32))
    for low in range(0, BLOCK_KEY, PART):
        keys = (low + offs_part)[None, :]
        k = tl.load(k_at + keys, mask=live[:, None] & (keys < k_dim), other=0.0).to(wide)
        from_state = tl.dot(inverse, k * reach[:, None], input_precision=PRECISION)
        at = from_state_ptr + first * k_dim + keys
        tl.store(at, from_state, mask=stored & (keys < k_dim))


@Kernel
def _carry_states_kernel(
    k_ptr: tl.tensor,
    g_ptr: tl.tensor,
    fed_ptr: tl.tensor,
    from_state_ptr: tl.tensor,
    entering_ptr: tl.tensor,
    ssm_states_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    first_blocks_ptr: tl.tensor,
    snapshots_ptr: tl.tensor,
    stride_k_token: int,
    stride_g_token: int,
    stride_slot: int,
    heads_per_key: int,
    chunk_len: int,
    k_dim: int,
    v_dim: int,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Runs through one request's blocks with some columns of a head's state.

    `fed` holds from_values first and the final fed at the end. The state goes from block to block
    through `entering`, a part of its rows at a time. `snapshots` [blocks] is the slot for the state
    after the block, or -1.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    wide = fed_ptr.dtype.element_ty
    rows, offs_part = tl.arange(0, BLOCK_CHUNK), tl.arange(0, PART)
    dims = (tl.program_id(2) * PART + tl.arange(0, PART))[None, :]
    mask_dim, stored = dims < v_dim, (rows < chunk_len)[:, None]
    slot = tl.load(slots_ptr + request).to(tl.int64)
    slot_at = ssm_states_ptr + slot * stride_slot + head * k_dim * v_dim
    first_block = tl.load(first_blocks_ptr + request)
    last_block = tl.load(first_blocks_ptr + request + 1)
    for low in range(0, BLOCK_KEY, PART):
        keys = (low + offs_part)[:, None]
        mask, cell = (keys < k_dim) & mask_dim, keys * v_dim + dims
        first_at = entering_ptr + (first_block * heads + head) * k_dim * v_dim
        tl.store(first_at + cell, tl.load(slot_at + cell, mask=mask, other=0.0), mask=mask)
    for block in range(first_block, last_block):
        tl.debug_barrier()  # other threads of this program wrote the data read next
        tokens = tl.load(blocks_ptr + block * 3) + rows
        live = (rows >= tl.load(blocks_ptr + block * 3 + 1)) & (
            rows < tl.load(blocks_ptr + block * 3 + 2)
        )
        g = tl.load(g_ptr + tokens * stride_g_token + head, mask=live, other=0.0).to(tl.float64)
        total = tl.sum(g, axis=0)
        to_end = tl.exp((total - tl.cumsum(g, axis=0)).to(tl.float32))
        k_at = k_ptr + tokens[:, None] * stride_k_token + (head // heads_per_key) * k_dim
        entering_at = entering_ptr + (block * heads + head) * k_dim * v_dim
        next_at = entering_at + heads * k_dim * v_dim
        dst = tl.load(snapshots_ptr + block)
        dst_at = ssm_states_ptr + dst * stride_slot + head * k_dim * v_dim

        first = (block * heads + head) * chunk_len + rows[:, None]
        fed = tl.load(fed_ptr + first * v_dim + dims, mask=stored & mask_dim, other=0.0)
        for low in range(0, BLOCK_KEY, PART):
            keys = (low + offs_part)[:, None]
            cell, mask = keys * v_dim + dims, (keys < k_dim) & mask_dim
            entering = tl.load(entering_at + cell, mask=mask, other=0.0)
            columns = (low + offs_part)[None, :]
            from_at = from_state_ptr + first * k_dim + columns
            from_state = tl.load(from_at, mask=stored & (columns < k_dim), other=0.0)
            fed -= tl.dot(from_state, entering, input_precision=PRECISION)
        tl.store(fed_ptr + first * v_dim + dims, fed, mask=stored & mask_dim)
        for low in range(0, BLOCK_KEY, PART):
            keys = (low + offs_part)[:, None]
            cell, mask = keys * v_dim + dims, (keys < k_dim) & mask_dim
            entering = tl.load(entering_at + cell, mask=mask, other=0.0)
            columns = (low + offs_part)[None, :]
            mask_k = live[:, None] & (columns < k_dim)
            k = tl.load(k_at + columns, mask=mask_k, other=0.0).to(wide)
            left = tl.dot(tl.trans(k * to_end[:, None]), fed, input_precision=PRECISION)
            state = left + tl.exp(total.to(tl.float32)) * entering
            asked = mask & (keys < tl.where(dst >= 0, k_dim, 0))
            tl.store(dst_at + cell, state, mask=asked)
            is_last = block + 1 == last_block
            tl.store(next_at + cell, state, mask=mask & (keys < tl.where(is_last, 0, k_dim)))
            tl.store(slot_at + cell, state, mask=mask & (keys < tl.where(is_last, k_dim, 0)))


@Kernel
def _tokens_see_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    g_ptr: tl.tensor,
    fed_ptr: tl.tensor,
    entering_ptr: tl.tensor,
    y_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    stride_q_token: int,
    stride_k_token: int,
    stride_g_token: int,
    heads_per_key: int,
    chunk_len: int,
    k_dim: int,
    v_dim: int,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Some columns of y of one block and one head, from the state before it and from its `fed`."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wide = fed_ptr.dtype.element_ty
    rows, offs_part = tl.arange(0, BLOCK_CHUNK), tl.arange(0, PART)
    dims = (tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM))[None, :]
    tokens = tl.load(blocks_ptr + block * 3) + rows
    live = (rows >= tl.load(blocks_ptr + block * 3 + 1)) & (
        rows < tl.load(blocks_ptr + block * 3 + 2)
    )
    of_key = (head // heads_per_key) * k_dim
    q_at = q_ptr + tokens[:, None] * stride_q_token + of_key
    k_at = k_ptr + tokens[:, None] * stride_k_token + of_key
    first = block * tl.num_programs(1) + head
    y = tl.zeros([BLOCK_CHUNK, BLOCK_DIM], wide)
    scores = tl.zeros([BLOCK_CHUNK, BLOCK_CHUNK], wide)
    for low in range(0, BLOCK_KEY, PART):
        columns, keys = (low + offs_part)[None, :], (low + offs_part)[:, None]
        mask_k = live[:, None] & (columns < k_dim)
        q = tl.load(q_at + columns, mask=mask_k, other=0.0).to(wide)
        k = tl.load(k_at + columns, mask=mask_k, other=0.0).to(wide)
        scores += tl.dot(q, tl.trans(k), input_precision=PRECISION)
        entering_at = entering_ptr + (first * k_dim + keys) * v_dim + dims
        entering = tl.load(entering_at, mask=(keys < k_dim) & (dims < v_dim), other=0.0)
        y += tl.dot(q, entering, input_precision=PRECISION)

    g = tl.load(g_ptr + tokens * stride_g_token + head, mask=live, other=0.0).to(tl.float64)
    log_decay = tl.cumsum(g, axis=0)
    y = y * tl.exp(log_decay.to(tl.float32))[:, None]
    between = (log_decay[:, None] - log_decay[None, :]).to(tl.float32)
    seen = rows[:, None] >= rows[None, :]
    scores = scores * tl.exp(tl.where(seen, between, float("-inf")))
    fed_at = fed_ptr + (first * chunk_len + rows[:, None]) * v_dim + dims
    fed = tl.load(fed_at, mask=(rows < chunk_len)[:, None] & (dims < v_dim), other=0.0)
    y += tl.dot(scores, fed, input_precision=PRECISION)
    y_at = y_ptr + (tokens[:, None] * tl.num_programs(1) + head) * v_dim + dims
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=live[:, None] & (dims < v_dim))


def delta_chunk_scan_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_states: Tensor,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    chunk_len: int,
) -> Tensor:
    """Scans with float32 states; each float32 product runs as three tf32 products."""
    v_heads, k_dim, v_dim = ssm_states.shape[1:]
    _check(q, k, v, g, beta, ssm_states, slots, chunk_len)
    firsts, blocks, wanted = describe_blocks(spans, snapshots, chunk_len)
    described, place = on_device(blocks, v.device), v.device
    fed = torch.empty(len(blocks), v_heads, chunk_len, v_dim, device=place)
    from_state = torch.empty(len(blocks), v_heads, chunk_len, k_dim, device=place)
    entering = torch.empty(len(blocks), v_heads, k_dim, v_dim, device=place)
    y = torch.empty(v.shape, dtype=v.dtype, device=place)
    sizes = (v_heads // k.shape[1], chunk_len, k_dim, v_dim)
    part = min(PART_DIM, max(16, next_power_of_two(max(k_dim, v_dim))))
    tiles = {
        "BLOCK_CHUNK": max(16, next_power_of_two(chunk_len)),
        "BLOCK_KEY": max(16, next_power_of_two(k_dim)),
        "PART": part,
        "PRECISION": "tf32x3",
        "num_warps": WARPS,
    }
    whole = max(16, next_power_of_two(v_dim))
    _solve_blocks_kernel[len(blocks), v_heads](
        k, v, g, beta, fed, from_state, described,
        k.stride(0), v.stride(0), g.stride(0), beta.stride(0), *sizes, **tiles, BLOCK_DIM=whole,
    )  # fmt: skip
    _carry_states_kernel[len(spans), v_heads, cdiv(v_dim, part)](
        k, g, fed, from_state, entering, ssm_states, slots, described,
        on_device((firsts,), place), on_device((wanted,), place),
        k.stride(0), g.stride(0), ssm_states.stride(0), *sizes, **tiles, num_stages=1,
    )  # fmt: skip
    _tokens_see_kernel[len(blocks), v_heads, cdiv(v_dim, part)](
        q, k, g, fed, entering, y, described,
        q.stride(0), k.stride(0), g.stride(0), *sizes, **tiles, BLOCK_DIM=part,
    )  # fmt: skip
    return y


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    ssm_states: Tensor, slots: Tensor, chunk_len: int,
) -> None:  # fmt: skip
    k_dim, v_dim = ssm_states.shape[2:]
    assert ssm_states.dtype == torch.float32, ssm_states.dtype
    assert ssm_states.stride()[1:] == (k_dim * v_dim, v_dim, 1), ssm_states.stride()
    assert q.stride()[1:] == k.stride()[1:] == (k_dim, 1), (q.stride(), k.stride())
    assert v.stride()[1:] == (v_dim, 1), v.stride()
    assert g.stride(1) == beta.stride(1) == slots.stride(0) == 1, (g.stride(), beta.stride())
    assert chunk_len <= MAX_CHUNK_LEN, chunk_len
