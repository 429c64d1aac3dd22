"""The kernels of hyper-connections; formulas and names are those of `hyper_connection`."""

from __future__ import annotations

from ferryman_kernels._triton import Kernel, KernelPart, tl


@KernelPart
def _balanced(
    logits: tl.tensor,
    is_inside: tl.tensor,
    ROUNDS: tl.constexpr,
    EPS: tl.constexpr,
) -> tl.tensor:
    """A doubly stochastic matrix [LANES, LANES]; zeros outside."""
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    matrix = tl.where(is_inside, powers / tl.sum(powers, axis=1)[:, None] + EPS, 0.0)
    columns = tl.sum(matrix, axis=0)[None, :] + EPS
    matrix = tl.where(is_inside, matrix / columns, 0.0)
    for _ in range(ROUNDS - 1):
        rows = tl.sum(matrix, axis=1)[:, None] + EPS
        matrix = tl.where(is_inside, matrix / rows, 0.0)
        columns = tl.sum(matrix, axis=0)[None, :] + EPS
        matrix = tl.where(is_inside, matrix / columns, 0.0)
    return matrix


@Kernel
def read_kernel(
    streams_ptr: tl.tensor,
    mixes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    base_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    added_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    x_ptr: tl.tensor,
    num_logits: int,
    dim: int,
    NORM_EPS: tl.constexpr,
    STREAMS: tl.constexpr,
    GATES: tl.constexpr,
    BLOCK_GATES: tl.constexpr,
    LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    BALANCE_EPS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    offs, offs_gate = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_GATES)
    mask, mask_gate = offs < dim, offs_gate < GATES
    rows_at = streams_ptr + token * STREAMS * dim + offs
    squares = tl.zeros([BLOCK_DIM], WIDE)
    for stream in tl.static_range(STREAMS):
        row = tl.load(rows_at + stream * dim, mask=mask, other=0.0).to(WIDE)
        squares = tl.fma(row, row, squares)
    root = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / (STREAMS * dim) + NORM_EPS)
    mix = tl.load(mixes_ptr + token * num_logits + offs_gate, mask=mask_gate, other=0.0)
    scale = tl.load(scales_ptr + offs_gate, mask=mask_gate, other=0.0)
    base = tl.load(base_ptr + offs_gate, mask=mask_gate, other=0.0)
    factor = tl.load(factors_ptr + offs_gate, mask=mask_gate, other=0.0)
    added = tl.load(added_ptr + offs_gate, mask=mask_gate, other=0.0)
    gate = factor / (1.0 + tl.exp(-(mix * root * scale + base))) + added
    tl.store(gates_ptr + token * num_logits + offs_gate, gate, mask=mask_gate)
    total = tl.zeros([BLOCK_DIM], WIDE)
    for stream in tl.static_range(STREAMS):
        share = tl.sum(tl.where(offs_gate == stream, gate, 0.0), axis=0)
        row = tl.load(rows_at + stream * dim, mask=mask, other=0.0).to(WIDE)
        total = tl.fma(row, tl.zeros([BLOCK_DIM], WIDE) + share, total)
    tl.store(x_ptr + token * dim + offs, total.to(x_ptr.dtype.element_ty), mask=mask)
    if ROUNDS > 0:
        lane = tl.arange(0, LANES)
        is_column = lane[None, :] < STREAMS
        is_inside = (lane[:, None] < STREAMS) & is_column
        at = GATES + lane[:, None] * STREAMS + lane[None, :]
        mixes = tl.load(mixes_ptr + token * num_logits + at, mask=is_inside, other=0.0)
        scales = tl.load(scales_ptr + at, mask=is_inside, other=0.0)
        logits = mixes * root * scales + tl.load(base_ptr + at, mask=is_inside, other=0.0)
        logits = tl.where(is_column, logits, float("-inf"))
        matrix = _balanced(logits, is_inside, ROUNDS, BALANCE_EPS)
        tl.store(gates_ptr + token * num_logits + at, matrix, mask=is_inside)


@Kernel
def expand_kernel(
    streams_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    expanded_ptr: tl.tensor,
    stride_y_row: int,
    stride_gates_row: int,
    dim: int,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One stream of one token."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, BLOCK_DIM)
    mask = offs < dim
    at = (token * tl.num_programs(1) + stream) * dim + offs
    gate = tl.load(gates_ptr + token * stride_gates_row + stream)
    added = tl.load(y_ptr + token * stride_y_row + offs, mask=mask, other=0.0).to(WIDE)
    row = tl.load(streams_ptr + at, mask=mask, other=0.0).to(WIDE)
    total = tl.fma(added, tl.zeros([BLOCK_DIM], WIDE) + gate, row)
    tl.store(expanded_ptr + at, total.to(expanded_ptr.dtype.element_ty), mask=mask)


@Kernel
def mix_kernel(
    streams_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    stride_y_row: int,
    stride_gates_row: int,
    dim: int,
    STREAMS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """A block of channels of all streams of one token."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask = offs < dim
    gates_at, at = gates_ptr + token * stride_gates_row, token * STREAMS * dim + offs
    added = tl.load(y_ptr + token * stride_y_row + offs, mask=mask, other=0.0).to(WIDE)
    for stream in tl.static_range(STREAMS):
        total = tl.zeros([BLOCK_DIM], WIDE)
        for other in tl.static_range(STREAMS):
            share = tl.load(gates_at + STREAMS + other * STREAMS + stream)
            row = tl.load(streams_ptr + at + other * dim, mask=mask, other=0.0).to(WIDE)
            total = tl.fma(row, tl.zeros([BLOCK_DIM], WIDE) + share, total)
        gate = tl.load(gates_at + stream)
        total = tl.fma(added, tl.zeros([BLOCK_DIM], WIDE) + gate, total)
        row_at = mixed_ptr + at + stream * dim
        tl.store(row_at, total.to(mixed_ptr.dtype.element_ty), mask=mask)
