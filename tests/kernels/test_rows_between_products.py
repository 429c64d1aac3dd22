"""Operations between products give a row the same bits in every batch, at every place, by any
number of threads.

Each operation is called with rows of its own, with all at once, and with a part of them that lies
in something wider. Operations of torch that layers call as they are stand beside the loops: that
they keep a row's bits is nobody's promise, so each processor asks.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.row_bits import PLACES, Rows, check_rows, drawn, threads_of_torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.cpu import _compiled
from ferryman_kernels.elementwise.activations import gelu, gelu_tanh, sigmoid, silu, softplus
from ferryman_kernels.elementwise.gates.clamped_swiglu import clamped_swiglu
from ferryman_kernels.elementwise.gates.gated_silu import gated_silu
from ferryman_kernels.elementwise.gates.limited_silu import limited_silu
from ferryman_kernels.elementwise.rms_norm import (
    add_rms_norm,
    gated_rms_norm,
    grouped_rms_norm,
    rms_norm,
    rms_norm_then_gate,
    scaled_sum,
)
from ferryman_kernels.elementwise.rotary import apply_rotary
from ferryman_kernels.elementwise.streams.hyper_connection import (
    Balance,
    GateNumbers,
    expand_streams,
    mix_streams,
    read_streams,
)
from ferryman_kernels.elementwise.streams.keyed_value import StreamNorms, keyed_value
from ferryman_kernels.elementwise.streams.stream_mean import gated_stream_mean
from ferryman_kernels.products.weighted_sum import weighted_sum

pytest.importorskip("numba")

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _weight(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, x.shape[1], dtype=wide_dtype(x.dtype))


def _other(x: Tensor) -> Tensor:
    """Other rows of the same numbers: what is added, or a gate."""
    return x.roll(1, dims=1)


def _sum_and_norm(x: Tensor) -> Tensor:
    return torch.cat(add_rms_norm(x, _other(x), 0.37, _weight(x), 1e-6), dim=1)


def _rotated(x: Tensor) -> Tensor:
    """The position is one of the row's own numbers."""
    positions = x[:, 0].double().abs().mul(1000).nan_to_num(0.0).long()
    inv_freq = torch.logspace(0, -4, x.shape[1] // 2, dtype=wide_dtype(x.dtype))
    q, k = apply_rotary(x[:, None], _other(x)[:, None], positions, inv_freq, 1.1)
    return torch.cat((q, k), dim=2)[:, 0]


def _experts(x: Tensor) -> Tensor:
    outputs = torch.stack((x, _other(x), x * 0.7), dim=1)
    return weighted_sum(outputs, outputs[:, :, 0].contiguous())


def _gate_numbers(mixes: Tensor) -> GateNumbers:
    lows = (0.1, -1.0, 0.5)
    scales, base, factors = (torch.linspace(low, 1.5, 6, dtype=mixes.dtype) for low in lows)
    return GateNumbers(scales, base, factors, base, 1e-6)


def _streams_through(x: Tensor) -> Tensor:
    """The row that is read of three streams, and the streams after a row was written to them."""
    streams = torch.stack((x, _other(x), 3 * x), dim=1)
    mixes = x.to(wide_dtype(x.dtype)).repeat(1, 3)[:, :6].contiguous()
    read, gates = read_streams(streams, mixes, _gate_numbers(mixes))
    written = expand_streams(streams, _other(x), gates[:, 3:])
    return torch.cat((read, written.flatten(1)), dim=1)


def _keyed(x: Tensor) -> Tensor:
    """The parts of a row that three streams take, and their norms."""
    streams = torch.stack((x, _other(x), 3 * x), dim=1)
    weight = _weight(x).repeat(3, 1)
    norms = StreamNorms(weight, weight.roll(1, dims=1), weight.flip(1), 1e-6)
    taken = keyed_value(streams.roll(1, dims=1), streams, _other(x), norms)
    return torch.cat(taken, dim=1).flatten(1)


def _mean_of_streams(x: Tensor) -> Tensor:
    streams = torch.stack((x, _other(x), 3 * x), dim=1)
    return gated_stream_mean(streams, streams.roll(1, dims=1))


def _mixed_streams_through(x: Tensor) -> Tensor:
    """The same of three streams that are mixed with each other."""
    streams = torch.stack((x, _other(x), 3 * x), dim=1)
    mixes = x.to(wide_dtype(x.dtype)).repeat(1, 15)[:, :15].contiguous()
    scales, base = (torch.linspace(low, 1.5, 15, dtype=mixes.dtype) for low in (0.1, -1.0))
    factors = base[:6].contiguous()
    numbers = GateNumbers(scales, base, factors, factors, 1e-6, Balance(5, 1e-3))
    read, gates = read_streams(streams, mixes, numbers)
    return torch.cat((read, mix_streams(streams, _other(x), gates[:, 3:]).flatten(1)), dim=1)


LOOPS: dict[str, Rows] = {
    "sigmoid": sigmoid,
    "silu": silu,
    "softplus": softplus,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "rms_norm": lambda x: rms_norm(x, _weight(x), 1e-6),
    "add_rms_norm": _sum_and_norm,
    "scaled_sum": lambda x: scaled_sum(x, _other(x), 0.37),
    "gated_rms_norm": lambda x: gated_rms_norm(x, _other(x), _weight(x), 1e-6, 2),
    "grouped_rms_norm": lambda x: grouped_rms_norm(x, _weight(x), 1e-6, 2),
    "gated_stream_mean": _mean_of_streams,
    "keyed_value": _keyed,
    "rms_norm_then_gate": lambda x: rms_norm_then_gate(x, _other(x), _weight(x), 1e-6, 2),
    "gated_silu": gated_silu,
    "clamped_swiglu": lambda x: clamped_swiglu(x, 1.702, 7.0, 1.0),
    "limited_silu": lambda x: limited_silu(x, 1.5),
    "apply_rotary": _rotated,
    "read_streams, expand_streams": _streams_through,
    "read_streams, mix_streams": _mixed_streams_through,
    "weighted_sum": _experts,
}
OF_TORCH: dict[str, Rows] = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:], _weight(x).to(x.dtype), None, 1e-6),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean of streams": lambda x: torch.stack((x, _other(x), 3 * x, x - 1)).mean(0),
    "cumsum": lambda x: x.double().cumsum(-1),
    "ties of topk": lambda x: x.round().topk(max(1, x.shape[1] // 3), dim=-1).indices,
    "ties of max": lambda x: x.round().max(-1, keepdim=True).indices,
    "ties of argmax": lambda x: x.round().argmax(-1, keepdim=True),
    "exp": lambda x: x.double().exp(),
    "tanh": lambda x: x.div(30).tanh().mul(30),
    "expm1": torch.expm1,
    "log1p": lambda x: x.abs().log1p(),
    "rsqrt": lambda x: (x.to(wide_dtype(x.dtype)).abs() + 1e-6).rsqrt(),
    "four operations": lambda x: (x + _other(x)) * x - x / (_other(x).abs() + 1),
}


@pytest.mark.parametrize("name", sorted(LOOPS))
@settings(max_examples=6, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    place=PLACES,
    half=st.integers(1, 150),
    threads=st.integers(1, 3),
)
def test_a_loop_gives_a_row_the_same_bits_in_every_batch(
    name: str, dtype: torch.dtype, place: tuple[int, tuple[int, int]], half: int, threads: int
) -> None:
    tokens, part = place
    # Two groups of a gated norm have the same length.
    dim = 4 * half if name in ("gated_rms_norm", "rms_norm_then_gate") else 2 * half
    check_rows(LOOPS[name], drawn(tokens, dim, dtype), slice(*part), threads)


QUICK_TO_COMPILE = ("sigmoid", "add_rms_norm")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK_TO_COMPILE else pytest.mark.slow)
        for name in sorted(set(LOOPS) - {"gelu"})
    ],
)
def test_threads_leave_the_bits_of_a_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(37, 148, torch.float32)
    alone = LOOPS[name](x)
    monkeypatch.setattr(_compiled, "WORTH_SHARING", 0)
    with threads_of_torch(2):
        assert torch.equal(LOOPS[name](x), alone)


@pytest.mark.parametrize("name", sorted(OF_TORCH))
@settings(max_examples=6, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    place=PLACES,
    dim=st.integers(1, 300),
    threads=st.integers(1, 3),
)
def test_torch_gives_a_row_the_same_bits_in_every_batch(
    name: str, dtype: torch.dtype, place: tuple[int, tuple[int, int]], dim: int, threads: int
) -> None:
    tokens, part = place
    check_rows(OF_TORCH[name], drawn(tokens, dim, dtype), slice(*part), threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus", "gelu", "gelu_tanh"])
def test_an_activation_is_its_formula(name: str, dtype: torch.dtype) -> None:
    formulas: dict[str, Rows] = {
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "softplus": F.softplus,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    numbers = torch.cat((torch.linspace(-60, 60, 997), torch.tensor([torch.nan, 1e4, -1e4, 0.0])))
    x = numbers.double().to(dtype)
    found, expected = LOOPS[name](x), formulas[name](x.double())
    assert found.dtype is dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 4e-7, torch.bfloat16: 2.0**-8}[dtype]
    torch.testing.assert_close(
        found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )
