"""Mamba-2's state update in Triton over runs of tokens, one after the other.

One compiled kernel serves prefill and decode, whose run is one token: so a token has the same bits
in both, wherever its chunk begins. `runs` rows: first token, tokens, read, written and copied slot.
"""

from __future__ import annotations

from torch import Tensor

from ferryman_kernels._triton import Kernel, KernelPart, cdiv, laid_out, next_power_of_two, tl
from ferryman_kernels.recurrence.selective_scan import run_at
from ferryman_kernels.recurrence.ssd_decode import BLOCK_DIM

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""x, dt, A, B, C, D, as `chunk_scan` takes them."""


@KernelPart
def _of_token(
    at: tl.tuple,
    sizes: tl.tuple,
    token: tl.tensor,
    head: tl.tensor,
    offs_dim: tl.tensor,
    offs_state: tl.tensor,
) -> tl.tuple:
    """A token's x [dim], dt, B and C [state] of a head; `at` are their addresses."""
    x_ptr, dt_ptr, b_ptr, c_ptr = at
    heads, heads_per_group, head_dim, state_dim = sizes
    group_at = (token * (heads // heads_per_group) + head // heads_per_group) * state_dim
    x_at = x_ptr + (token * heads + head) * head_dim + offs_dim
    x = tl.load(x_at, mask=offs_dim < head_dim, other=0.0)
    dt = tl.load(dt_ptr + token * heads + head)
    b = tl.load(b_ptr + group_at + offs_state, mask=offs_state < state_dim, other=0.0)
    c = tl.load(c_ptr + group_at + offs_state, mask=offs_state < state_dim, other=0.0)
    return x, dt, b, c


@Kernel
def _ssd_runs_kernel(
    states_ptr: tl.tensor,
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    runs_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_slot: int,
    heads: int,
    heads_per_group: int,
    head_dim: int,
    state_dim: int,
    BLOCK_DIM: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
) -> None:
    """Some rows of one head's state, for the tokens of one run."""
    token, count, src, dst, copy = run_at(runs_ptr, tl.program_id(0))
    head = tl.program_id(1)
    wide = states_ptr.dtype.element_ty
    offs_dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    offs_state = tl.arange(0, BLOCK_STATE)
    mask_dim, mask_state = offs_dim < head_dim, offs_state < state_dim
    in_slot = (head * head_dim + offs_dim)[:, None] * state_dim + offs_state[None, :]
    held = (offs_dim < tl.where(src >= 0, head_dim, 0))[:, None] & mask_state[None, :]
    state = tl.load(states_ptr + src * stride_slot + in_slot, mask=held, other=0.0)
    a, d = tl.load(a_ptr + head).to(wide), tl.load(d_ptr + head).to(wide)
    # The state stays in registers from the run's first token to its last. A token's numbers are
    # asked for two tokens ahead, because they come later than a token takes.
    end = token + count
    at = x_ptr, dt_ptr, b_ptr, c_ptr
    sizes = heads, heads_per_group, head_dim, state_dim
    x, dt, b, c = _of_token(at, sizes, token, head, offs_dim, offs_state)
    second = tl.minimum(token + 1, end - 1)
    x_next, dt_next, b_next, c_next = _of_token(at, sizes, second, head, offs_dim, offs_state)
    while token < end:
        third = tl.minimum(token + 2, end - 1)
        x_last, dt_last, b_last, c_last = _of_token(at, sizes, third, head, offs_dim, offs_state)
        wide_x, wide_dt = x.to(wide), dt.to(wide)
        state = tl.exp(wide_dt * a) * state + (wide_dt * wide_x)[:, None] * b.to(wide)[None, :]
        y = tl.sum(state * c.to(wide)[None, :], axis=1) + d * wide_x
        y_at = y_ptr + (token * heads + head) * head_dim + offs_dim
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask_dim)
        x, dt, b, c = x_next, dt_next, b_next, c_next
        x_next, dt_next, b_next, c_next = x_last, dt_last, b_last, c_last
        token += 1
    kept = (offs_dim < tl.where(dst >= 0, head_dim, 0))[:, None] & mask_state[None, :]
    copied = (offs_dim < tl.where(copy >= 0, head_dim, 0))[:, None] & mask_state[None, :]
    tl.store(states_ptr + dst * stride_slot + in_slot, state, mask=kept)
    tl.store(states_ptr + copy * stride_slot + in_slot, state, mask=copied)


def ssd_runs_triton(given: Rows, states: Tensor, runs: Tensor, y: Tensor) -> None:
    heads, head_dim, state_dim = states.shape[1:]
    assert states.stride()[1:] == (head_dim * state_dim, state_dim, 1), states.stride()
    x, dt, A, B, C, D = map(laid_out, given)
    block = min(BLOCK_DIM, next_power_of_two(head_dim))
    _ssd_runs_kernel[len(runs), heads, cdiv(head_dim, block)](
        states, x, dt, A, B, C, D, runs, y,
        states.stride(0), heads, heads // B.shape[1], head_dim, state_dim,
        BLOCK_DIM=block, BLOCK_STATE=next_power_of_two(state_dim), num_warps=4,
    )  # fmt: skip
