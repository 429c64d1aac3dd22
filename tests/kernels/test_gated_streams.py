"""Means of gated streams, and values that streams take by their keys, written out in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.oracles import assert_close, wide
from torch import Tensor

from ferryman_kernels.elementwise.streams.keyed_value import (
    StreamNorms,
    keyed_value,
    keyed_value_reference,
    keyed_value_triton,
)
from ferryman_kernels.elementwise.streams.stream_mean import (
    gated_stream_mean,
    gated_stream_mean_reference,
    gated_stream_mean_triton,
)

TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 4e-2}
SIZES = [(1, 1, 5), (4, 3, 77), (3, 4, 600)]
EPS = 1e-2
CPU = torch.device("cpu")
every_size = pytest.mark.parametrize(("tokens", "count", "dim"), SIZES)
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def opened(number: Tensor) -> Tensor:
    return 1 / (1 + (-number.double()).exp())


@every_dtype
@every_size
@pytest.mark.parametrize(
    "run", [gated_stream_mean, gated_stream_mean_reference, gated_stream_mean_triton]
)
def test_a_channel_is_the_mean_of_what_gates_let_through(
    run: Callable[..., Tensor],
    tokens: int,
    count: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    place = device if run is gated_stream_mean_triton else CPU
    x, gates = (3 * torch.randn(tokens, count, dim).to(dtype) for _ in range(2))
    mean = run(x.to(place), gates.to(place))
    right = sum(opened(gates[:, s]) * x[:, s].double() for s in range(count)) / count
    assert mean.dtype == dtype
    assert isinstance(right, Tensor)
    assert_close(mean, right, TOLERANCE[dtype])


def normed(row: Tensor, weight: Tensor) -> Tensor:
    return row.double() / (row.double().square().mean() + EPS).sqrt() * weight.double()


def taken(key: Tensor, stream: Tensor, value: Tensor, norms: StreamNorms, at: int) -> Tensor:
    """The part of the value that stream number `at` takes, in float64."""
    score = float(normed(key, norms.key[at]) @ normed(stream, norms.stream[at]))
    score /= len(key) ** 0.5
    root = max(abs(score), 1e-6) ** 0.5
    signed = root if score > 0 else -root if score < 0 else 0.0
    gate = opened(torch.tensor(signed, dtype=torch.float64))
    return gate * value.double()


@every_dtype
@every_size
@pytest.mark.parametrize("run", [keyed_value, keyed_value_reference, keyed_value_triton])
def test_a_stream_takes_the_value_as_far_as_its_key_fits(
    run: Callable[..., tuple[Tensor, Tensor]],
    tokens: int,
    count: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    place = device if run is keyed_value_triton else CPU
    keys, streams = (torch.randn(tokens, count, dim).to(dtype) for _ in range(2))
    keys[0, 0] = 0  # a score of zero opens a gate half
    values = torch.randn(tokens, dim + 3).to(dtype)[:, :dim]
    weights = torch.randn(3, count, dim, dtype=wide(dtype))
    norms = StreamNorms(weights[0], weights[1], weights[2], EPS)
    key, stream, last = (weight.to(place) for weight in norms[:3])
    moved = StreamNorms(key, stream, last, EPS)
    found, after = run(keys.to(place), streams.to(place), values.to(place), moved)
    assert found.dtype == after.dtype == dtype
    for token in range(tokens):
        for at in range(count):
            row = keys[token, at], streams[token, at], values[token]
            assert_close(found[token, at], taken(*row, norms, at), TOLERANCE[dtype])
            # The norm is of what was rounded.
            rounded = normed(found[token, at].cpu(), norms.taken[at])
            assert_close(after[token, at], rounded, TOLERANCE[dtype])
