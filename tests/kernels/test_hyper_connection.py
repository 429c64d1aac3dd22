"""Reading and writing streams against the formulas, written out for each token in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.oracles import assert_close, wide
from torch import Tensor

from ferryman_kernels.elementwise.hyper_connection import (
    GateNumbers,
    expand_streams,
    expand_streams_reference,
    expand_streams_triton,
    read_streams,
    read_streams_reference,
    read_streams_triton,
)

TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 4e-2}
SIZES = [(1, 1, 5), (4, 3, 77), (3, 4, 600)]
NORM_EPS, EPS = 1e-2, 1e-3


def drawn(tokens: int, count: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, GateNumbers]:
    """Mixes [tokens, gates], with a gate of each kind for each stream, and the gates' numbers."""
    mixes = 3 * torch.randn(tokens, 2 * count, dtype=wide(dtype))
    scales, base, factors = torch.randn(3, 2 * count, dtype=wide(dtype)).unbind()
    return mixes, GateNumbers(scales, base, factors, NORM_EPS, EPS)


def moved(numbers: GateNumbers, place: torch.device) -> GateNumbers:
    scales, base, factors = (tensor.to(place) for tensor in numbers[:3])
    return GateNumbers(scales, base, factors, NORM_EPS, EPS)


def opened(streams: Tensor, mixes: Tensor, numbers: GateNumbers) -> Tensor:
    """The gates of one token's streams [streams, dim]."""
    root = (streams.double().square().mean() + NORM_EPS).rsqrt()
    scales, base, factors = (tensor.double() for tensor in numbers[:3])
    return factors / (1 + (-(mixes.double() * root * scales + base)).exp()) + EPS


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tokens", "count", "dim"), SIZES)
@pytest.mark.parametrize("run", [read_streams, read_streams_reference, read_streams_triton])
def test_a_row_is_the_sum_of_streams_by_gates_of_all_of_them(
    run: Callable[..., tuple[Tensor, Tensor]],
    tokens: int,
    count: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    place = device if run is read_streams_triton else torch.device("cpu")
    streams = torch.randn(tokens, count, dim).to(dtype)
    mixes, numbers = drawn(tokens, count, dim, dtype)
    x, gates = run(streams.to(place), mixes.to(place), moved(numbers, place))
    right = torch.stack([opened(*token, numbers) for token in zip(streams, mixes, strict=True)])
    rows = (right[:, :count, None] * streams.double()).sum(1)
    assert (x.dtype, gates.dtype) == (dtype, wide(dtype))
    assert_close(gates, right, min(TOLERANCE[dtype], 1e-5))
    assert_close(x, rows, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tokens", "count", "dim"), SIZES)
@pytest.mark.parametrize("run", [expand_streams, expand_streams_reference, expand_streams_triton])
def test_a_row_is_added_to_each_stream_by_its_gate(
    run: Callable[..., Tensor],
    tokens: int,
    count: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    place = device if run is expand_streams_triton else torch.device("cpu")
    streams, y = torch.randn(tokens, count, dim).to(dtype), torch.randn(tokens, dim).to(dtype)
    all_gates = torch.randn(tokens, 2 * count, dtype=wide(dtype))
    gates = all_gates.to(place)[:, count:]  # columns of something wider
    before = streams.clone()
    expanded = run(streams.to(place), y.to(place), gates)
    right = streams.double() + all_gates[:, count:, None].double() * y[:, None].double()
    assert expanded.dtype == dtype
    assert_close(expanded, right, TOLERANCE[dtype])
    assert torch.equal(streams, before)


def test_gates_that_read_alone_are_as_many_as_streams() -> None:
    """Those of a final norm."""
    streams, (mixes, numbers) = torch.randn(2, 3, 8), drawn(2, 3, 8, torch.float32)
    scales, base, factors = (tensor[:3].contiguous() for tensor in numbers[:3])
    alone = GateNumbers(scales, base, factors, NORM_EPS, EPS)
    x, gates = read_streams(streams, mixes[:, :3].contiguous(), alone)
    whole, all_gates = read_streams(streams, mixes, numbers)
    assert torch.equal(x, whole)
    assert torch.equal(gates, all_gates[:, :3])
