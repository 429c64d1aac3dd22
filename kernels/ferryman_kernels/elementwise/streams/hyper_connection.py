"""Hyper-connections: a part of a layer reads one row from several streams, and writes to each.

    root         = 1 / sqrt(mean of all numbers of a token's streams, squared, + norm_eps)
    logits       = root · mixes · scales + base                                  [tokens, gates]
    gates        = factors · sigmoid(logits) + added                            [tokens, opened]
    x            = Σ_s gates[s] · streams[s]                                     [tokens, dim]
    expanded[s]  = streams[s] + gates[s] · y                            [tokens, streams, dim]

The first gates, one for each stream, read; those that write come after them. `mixes` is a product
of the token's streams, and of the accumulation dtype, as gates are.
Zhu et al. 2024; without the mixing of streams, as in HY V4.

Streams may be mixed with each other (Xie et al. 2026; DeepSeek-V4). Then the last logits are those
of a matrix [streams, streams], which rounds of division make doubly stochastic:

    matrix       = softmax(logits) over each row, + eps
    matrix       = matrix / (Σ of its column + eps)
    matrix       = the same by rows and then by columns, rounds - 1 times
    mixed[s]     = Σ_r matrix[r, s] · streams[r] + gates[s] · y

Sums are in float32 (float64 for float64), in the order of the streams, and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import cdiv, laid_out, next_power_of_two, warps_of_row, wide_type
from ferryman_kernels.cpu._compiled import Loop, row_like, serves
from ferryman_kernels.elementwise.streams._hyper_connection_compiled import (
    expand_loop,
    mix_loop,
    read_loop,
)
from ferryman_kernels.elementwise.streams._hyper_connection_triton import (
    expand_kernel,
    mix_kernel,
    read_kernel,
)

MIX_BLOCK = 1024


class Balance(NamedTuple):
    """The rounds that make a matrix doubly stochastic; 0: there is no matrix."""

    rounds: int
    eps: float


NO_MATRIX = Balance(0, 0.0)


class GateNumbers(NamedTuple):
    """Numbers in the accumulation dtype: `scales` and `base` of each logit, `factors` and `added`
    of each gate. The logits behind those of gates are a matrix's, row by row, if `balance` has
    rounds."""

    scales: Tensor
    base: Tensor
    factors: Tensor
    added: Tensor
    norm_eps: float
    balance: Balance = NO_MATRIX


def read_streams_reference(
    streams: Tensor, mixes: Tensor, numbers: GateNumbers
) -> tuple[Tensor, Tensor]:
    whole, num_gates = streams.to(mixes.dtype), len(numbers.factors)
    root = torch.rsqrt(whole.flatten(1).square().mean(-1, keepdim=True) + numbers.norm_eps)
    logits = mixes * root * numbers.scales + numbers.base
    gates = torch.sigmoid(logits[:, :num_gates]) * numbers.factors + numbers.added
    x = (gates[:, : streams.shape[1], None] * whole).sum(1).to(streams.dtype)
    if not numbers.balance.rounds:
        return x, gates
    matrix = logits[:, num_gates:].view(len(streams), streams.shape[1], -1)
    return x, torch.cat((gates, _balanced(matrix, numbers.balance).flatten(1)), 1)


def _balanced(logits: Tensor, balance: Balance) -> Tensor:
    matrix = logits.softmax(-1) + balance.eps
    for index in range(balance.rounds):
        if index:
            matrix = matrix / (matrix.sum(-1, keepdim=True) + balance.eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + balance.eps)
    return matrix


def expand_streams_reference(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    added = gates[:, :, None] * y[:, None].to(gates.dtype)
    return (streams.to(gates.dtype) + added).to(streams.dtype)


def mix_streams_reference(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    count = streams.shape[1]
    written, matrix = gates[:, :count], gates[:, count:].reshape(-1, count, count)
    mixed = matrix.transpose(1, 2) @ streams.to(gates.dtype)
    return (mixed + written[:, :, None] * y[:, None].to(gates.dtype)).to(streams.dtype)


def read_streams_compiled(
    streams: Tensor, mixes: Tensor, numbers: GateNumbers
) -> tuple[Tensor, Tensor]:
    (tokens, count, dim), streams, mixes = streams.shape, streams.contiguous(), mixes.contiguous()
    x, gates = torch.empty(tokens, dim, dtype=streams.dtype), torch.empty_like(mixes)
    read_loop(
        2 * streams.numel(),
        row_like(streams.dtype), row_like(mixes.dtype), streams.data_ptr(), mixes.data_ptr(),
        *(of_gate.data_ptr() for of_gate in numbers[:4]), numbers.norm_eps, *numbers.balance,
        gates.data_ptr(), x.data_ptr(), tokens, count, mixes.shape[1], len(numbers.factors), dim,
    )  # fmt: skip
    return x, gates


def expand_streams_compiled(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    return _written(expand_loop, streams.numel(), streams, y, gates)


def mix_streams_compiled(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    return _written(mix_loop, streams.shape[1] * streams.numel(), streams, y, gates)


def _written(loop: Loop, elements: int, streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    """The streams that a loop over so many elements writes."""
    (tokens, count, dim), streams = streams.shape, streams.contiguous()
    y = y if y.stride(1) == 1 else y.contiguous()
    written = torch.empty_like(streams)
    loop(
        elements,
        row_like(streams.dtype), row_like(gates.dtype), streams.data_ptr(), y.data_ptr(),
        y.stride(0), gates.data_ptr(), gates.stride(0), written.data_ptr(), tokens * count, count,
        dim,
    )  # fmt: skip
    return written


def read_streams_triton(
    streams: Tensor, mixes: Tensor, numbers: GateNumbers
) -> tuple[Tensor, Tensor]:
    (tokens, count, dim), streams, mixes = streams.shape, laid_out(streams), laid_out(mixes)
    x = torch.empty(tokens, dim, dtype=streams.dtype, device=streams.device)
    gates, block = torch.empty_like(mixes), next_power_of_two(dim)
    num_gates = len(numbers.factors)
    read_kernel[tokens,](
        streams, mixes, *numbers[:4], gates, x, mixes.shape[1], dim,
        NORM_EPS=float(numbers.norm_eps), STREAMS=count, GATES=num_gates,
        BLOCK_GATES=next_power_of_two(num_gates), LANES=next_power_of_two(count),
        ROUNDS=numbers.balance.rounds, BALANCE_EPS=float(numbers.balance.eps), BLOCK_DIM=block,
        WIDE=wide_type(streams.dtype), num_warps=warps_of_row(block),
    )  # fmt: skip
    return x, gates


def expand_streams_triton(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    (tokens, count, dim), streams = streams.shape, laid_out(streams)
    assert y.stride(1) == gates.stride(1) == 1, (y.stride(), gates.stride())
    expanded, block = torch.empty_like(streams), next_power_of_two(dim)
    expand_kernel[tokens, count](
        streams, y, gates, expanded, y.stride(0), gates.stride(0), dim,
        BLOCK_DIM=block, WIDE=wide_type(streams.dtype), num_warps=warps_of_row(block),
    )  # fmt: skip
    return expanded


def mix_streams_triton(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    (tokens, count, dim), streams = streams.shape, laid_out(streams)
    assert y.stride(1) == gates.stride(1) == 1, (y.stride(), gates.stride())
    mixed, block = torch.empty_like(streams), min(MIX_BLOCK, next_power_of_two(dim))
    mix_kernel[tokens, cdiv(dim, block)](
        streams, y, gates, mixed, y.stride(0), gates.stride(0), dim,
        STREAMS=count, BLOCK_DIM=block, WIDE=wide_type(streams.dtype),
        num_warps=max(1, block // 256),
    )  # fmt: skip
    return mixed


def read_streams(streams: Tensor, mixes: Tensor, numbers: GateNumbers) -> tuple[Tensor, Tensor]:
    """x [tokens, dim] of the dtype of `streams` [tokens, streams, dim], and all gates, with the
    matrix behind them, as `mixes` [tokens, logits]; gates are at least as many as streams."""
    count, num_gates = streams.shape[1], len(numbers.factors)
    num_logits = num_gates + count * count * bool(numbers.balance.rounds)
    assert mixes.shape == (len(streams), num_logits), (streams.shape, mixes.shape)
    assert num_gates >= count, (streams.shape, num_gates)
    assert mixes.dtype is wide_dtype(streams.dtype), (streams.dtype, mixes.dtype)
    for of_gate, length in zip(
        numbers[:4], (num_logits, num_logits, num_gates, num_gates), strict=True
    ):
        assert of_gate.shape == (length,), (of_gate.shape, mixes.shape)
        assert of_gate.dtype is mixes.dtype, (of_gate.dtype, mixes.dtype)
    if streams.is_cuda:
        return read_streams_triton(streams, mixes, numbers)
    run = read_streams_compiled if serves(streams, mixes) else read_streams_reference
    return run(streams, mixes, numbers)


def expand_streams(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    """New streams [tokens, streams, dim], from `y` [tokens, dim] of their dtype and `gates`
    [tokens, streams], which may be columns of something wider."""
    assert gates.shape == streams.shape[:2], (streams.shape, gates.shape)
    _check_written(streams, y, gates)
    if streams.is_cuda:
        return expand_streams_triton(streams, y, gates)
    run = expand_streams_compiled if serves(streams, y, gates) else expand_streams_reference
    return run(streams, y, gates)


def mix_streams(streams: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    """The same by `gates` [tokens, streams + streams²], those that write and the matrix."""
    count = streams.shape[1]
    assert gates.shape == (len(streams), count + count * count), (streams.shape, gates.shape)
    _check_written(streams, y, gates)
    if streams.is_cuda:
        return mix_streams_triton(streams, y, gates)
    run = mix_streams_compiled if serves(streams, y, gates) else mix_streams_reference
    return run(streams, y, gates)


def _check_written(streams: Tensor, y: Tensor, gates: Tensor) -> None:
    assert y.shape == (len(streams), streams.shape[2]), (streams.shape, y.shape)
    assert y.dtype is streams.dtype, (streams.dtype, y.dtype)
    assert gates.dtype is wide_dtype(streams.dtype), (streams.dtype, gates.dtype)
