"""Reading and writing streams against the formulas, written out for each token in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.oracles import assert_close, wide
from torch import Tensor

from ferryman_kernels.elementwise.streams.hyper_connection import (
    NO_MATRIX,
    Balance,
    GateNumbers,
    expand_streams,
    expand_streams_reference,
    expand_streams_triton,
    mix_streams,
    mix_streams_reference,
    mix_streams_triton,
    read_streams,
    read_streams_reference,
    read_streams_triton,
)

TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 4e-2}
SIZES = [(1, 1, 5), (4, 3, 77), (3, 4, 600)]
NORM_EPS, BALANCE = 1e-2, Balance(20, 1e-3)

Read = Callable[[Tensor, Tensor, GateNumbers], tuple[Tensor, Tensor]]
Write = Callable[[Tensor, Tensor, Tensor], Tensor]


def drawn(
    tokens: int, count: int, dtype: torch.dtype, balance: Balance = NO_MATRIX
) -> tuple[Tensor, GateNumbers]:
    """Mixes [tokens, logits], with a gate of each kind for each stream, and the gates' numbers."""
    num_logits = 2 * count + (count * count if balance.rounds else 0)
    mixes = 3 * torch.randn(tokens, num_logits, dtype=wide(dtype))
    scales, base = torch.randn(2, num_logits, dtype=wide(dtype)).unbind()
    factors, added = torch.randn(2, 2 * count, dtype=wide(dtype)).unbind()
    return mixes, GateNumbers(scales, base, factors, added, NORM_EPS, balance)


def moved(numbers: GateNumbers, place: torch.device) -> GateNumbers:
    scales, base, factors, added = (tensor.to(place) for tensor in numbers[:4])
    return GateNumbers(scales, base, factors, added, NORM_EPS, numbers.balance)


def first_gates(numbers: GateNumbers, count: int) -> GateNumbers:
    """The numbers of the first `count` gates, without a matrix."""
    scales, base, factors, added = (tensor[:count].contiguous() for tensor in numbers[:4])
    return GateNumbers(scales, base, factors, added, NORM_EPS)


def logits_of(streams: Tensor, mixes: Tensor, numbers: GateNumbers) -> Tensor:
    """The logits of one token's streams [streams, dim]."""
    root = (streams.double().square().mean() + NORM_EPS).rsqrt()
    return mixes.double() * root * numbers.scales.double() + numbers.base.double()


def opened(streams: Tensor, mixes: Tensor, numbers: GateNumbers) -> Tensor:
    """The gates of one token's streams [streams, dim]."""
    logits = logits_of(streams, mixes, numbers)[: 2 * len(streams)]
    return numbers.factors.double() / (1 + (-logits).exp()) + numbers.added.double()


def balanced(streams: Tensor, mixes: Tensor, numbers: GateNumbers) -> list[list[float]]:
    """The matrix of one token's streams [streams, dim], number by number."""
    count, eps = len(streams), BALANCE.eps
    powers = logits_of(streams, mixes, numbers)[2 * count :].exp().view(count, count).tolist()
    matrix = [[power / sum(row) + eps for power in row] for row in powers]
    every = range(count)
    for index in range(BALANCE.rounds):
        if index:
            matrix = [[entry / (sum(row) + eps) for entry in row] for row in matrix]
        sums = [sum(matrix[row][column] for row in every) + eps for column in every]
        matrix = [[row[column] / sums[column] for column in every] for row in matrix]
    return matrix


def place_of(run: object, on_a_card: object, device: torch.device) -> torch.device:
    return device if run is on_a_card else torch.device("cpu")


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tokens", "count", "dim"), SIZES)
@pytest.mark.parametrize("run", [read_streams, read_streams_reference, read_streams_triton])
def test_a_row_is_the_sum_of_streams_by_gates_of_all_of_them(
    run: Read, tokens: int, count: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    place = place_of(run, read_streams_triton, device)
    streams = torch.randn(tokens, count, dim).to(dtype)
    mixes, numbers = drawn(tokens, count, dtype)
    x, gates = run(streams.to(place), mixes.to(place), moved(numbers, place))
    right = torch.stack([opened(*token, numbers) for token in zip(streams, mixes, strict=True)])
    rows = (right[:, :count, None] * streams.double()).sum(1)
    assert (x.dtype, gates.dtype) == (dtype, wide(dtype))
    assert_close(gates, right, min(TOLERANCE[dtype], 1e-5))
    assert_close(x, rows, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tokens", "count", "dim"), SIZES)
@pytest.mark.parametrize("run", [read_streams, read_streams_reference, read_streams_triton])
def test_a_matrix_behind_the_gates_is_balanced_and_changes_no_gate(
    run: Read, tokens: int, count: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    place = place_of(run, read_streams_triton, device)
    streams = torch.randn(tokens, count, dim).to(dtype)
    mixes, numbers = drawn(tokens, count, dtype, BALANCE)
    pairs = list(zip(streams, mixes, strict=True))
    right = torch.tensor([balanced(*token, numbers) for token in pairs], dtype=torch.float64)
    x, gates = run(streams.to(place), mixes.to(place), moved(numbers, place))
    alone = first_gates(numbers, 2 * count)
    same_x, same_gates = run(
        streams.to(place), mixes[:, : 2 * count].to(place).contiguous(), moved(alone, place)
    )
    assert_close(gates[:, 2 * count :], right.flatten(1), min(TOLERANCE[dtype], 1e-5))
    assert torch.equal(x, same_x)
    assert torch.equal(gates[:, : 2 * count], same_gates)


@pytest.mark.parametrize("run", [read_streams, read_streams_reference, read_streams_triton])
def test_a_balanced_matrix_is_doubly_stochastic(run: Read, device: torch.device) -> None:
    place = place_of(run, read_streams_triton, device)
    mixes, numbers = drawn(3, 4, torch.float64, Balance(200, 1e-9))
    _, gates = run(torch.randn(3, 4, 8).double().to(place), mixes.to(place), moved(numbers, place))
    matrix = gates[:, 8:].view(3, 4, 4)
    assert_close(matrix.sum(1), torch.ones(3, 4).double(), 1e-5)
    assert_close(matrix.sum(2), torch.ones(3, 4).double(), 1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tokens", "count", "dim"), SIZES)
@pytest.mark.parametrize("run", [expand_streams, expand_streams_reference, expand_streams_triton])
def test_a_row_is_added_to_each_stream_by_its_gate(
    run: Write, tokens: int, count: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    place = place_of(run, expand_streams_triton, device)
    streams, y = torch.randn(tokens, count, dim).to(dtype), torch.randn(tokens, dim).to(dtype)
    all_gates = torch.randn(tokens, 2 * count, dtype=wide(dtype))
    gates = all_gates.to(place)[:, count:]  # columns of something wider
    before = streams.clone()
    expanded = run(streams.to(place), y.to(place), gates)
    right = streams.double() + all_gates[:, count:, None].double() * y[:, None].double()
    assert expanded.dtype == dtype
    assert_close(expanded, right, TOLERANCE[dtype])
    assert torch.equal(streams, before)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tokens", "count", "dim"), [*SIZES, (2, 2, 1100)])
@pytest.mark.parametrize("run", [mix_streams, mix_streams_reference, mix_streams_triton])
def test_streams_are_mixed_by_the_columns_of_their_matrix(
    run: Write, tokens: int, count: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A stream is the sum of all by its column, not its row, and of a row by its gate."""
    place = place_of(run, mix_streams_triton, device)
    streams, y = torch.randn(tokens, count, dim).to(dtype), torch.randn(tokens, dim).to(dtype)
    all_gates = torch.randn(tokens, (2 + count) * count, dtype=wide(dtype))
    gates, matrix = all_gates[:, count : 2 * count].double(), all_gates[:, 2 * count :].double()
    before = streams.clone()
    mixed = run(streams.to(place), y.to(place), all_gates.to(place)[:, count:])
    right = gates[:, :, None] * y[:, None].double()
    for stream in range(count):
        for other in range(count):
            share = matrix[:, other * count + stream, None]
            right[:, stream] += share * streams[:, other].double()
    assert mixed.dtype == dtype
    assert_close(mixed, right, TOLERANCE[dtype])
    assert torch.equal(streams, before)


def test_gates_that_read_alone_are_as_many_as_streams() -> None:
    """Those of a final norm."""
    streams, (mixes, numbers) = torch.randn(2, 3, 8), drawn(2, 3, torch.float32)
    alone = first_gates(numbers, 3)
    x, gates = read_streams(streams, mixes[:, :3].contiguous(), alone)
    whole, all_gates = read_streams(streams, mixes, numbers)
    assert torch.equal(x, whole)
    assert torch.equal(gates, all_gates[:, :3])
