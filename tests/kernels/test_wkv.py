"""The weighted mean of RWKV-4 against its definition: sums over all earlier tokens in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels import oracles
from tests.kernels.oracles import assert_close, in_runs, ragged, strided_states, wide
from torch import Tensor

from ferryman_kernels.recurrence.cells._wkv_triton import wkv_runs_triton
from ferryman_kernels.recurrence.cells.wkv import (
    wkv_decode,
    wkv_runs_compiled,
    wkv_runs_reference,
    wkv_scan,
)
from ferryman_kernels.recurrence.cells.wkv_rows import WeightedRows

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")
DIM, NUM_SLOTS = 37, 9
SPANS = ((0, 5), (16, 50), (3, 4), (0, 2))
SLOTS = (4, 0, 7, 2)
SNAPSHOTS = ((1, 48, 3), (1, 32, 1), (0, 5, 6))
POSITIONS = torch.cat([torch.arange(*span) for span in SPANS])
RUNS = [wkv_runs_reference, wkv_runs_compiled, wkv_runs_triton]

every_backend = pytest.mark.parametrize("backend", RUNS)
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def _inputs(positions: Tensor, dtype: torch.dtype) -> WeightedRows:
    """Decays from those that forget at once to those that hardly do; a few keys are large."""
    k, v = torch.randn(2, len(positions), DIM).to(dtype).unbind(0)
    k[torch.rand(k.shape) < 0.1] *= 20
    decay = torch.logspace(-5, 1.5, DIM, dtype=torch.float64).to(wide(dtype))
    return WeightedRows(k, v, positions, decay, torch.randn(DIM, dtype=torch.float64).to(decay))


def _states(dtype: torch.dtype) -> Tensor:
    """Divisors of a state are 1 or more; what spans that begin at 0 find in a slot is nothing."""
    states = strided_states(NUM_SLOTS, (3, DIM), wide(dtype), gap=11)
    states[:, 1] = 1 + states[:, 1].abs()
    states[[4, 2]] = 0
    return states


@every_backend
@every_dtype
def test_runs_go_from_slot_to_slot_and_write_no_other(
    backend: Callable[..., None], dtype: torch.dtype, device: torch.device
) -> None:
    """One run begins cleared, one ends in another slot, one keeps only the copy."""
    positions = torch.cat([torch.arange(4), torch.arange(9, 15), torch.arange(3, 5)])
    given, states = _inputs(positions, dtype), _states(dtype)
    runs = torch.tensor([[0, 4, -1, 1, 3], [4, 6, 0, 5, -1], [10, 2, 7, -1, 7]])
    place = device if backend is wkv_runs_triton else CPU
    moved = states.to(place, copy=True)
    y = torch.full(given.k.shape, torch.nan, dtype=states.dtype, device=place)
    backend(WeightedRows(*(each.to(place) for each in given)), moved, runs.to(place), y)
    expected, expected_states = in_runs(oracles.weighted_mean(given), states, runs, y)
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(moved, expected_states, TOLERANCE[dtype])


@every_dtype
def test_a_ragged_prefill_leaves_snapshots_at_their_positions(dtype: torch.dtype) -> None:
    given, states = _inputs(POSITIONS, dtype), _states(dtype)
    oracle = oracles.weighted_mean(given)
    expected, expected_states = ragged(oracle, states, SPANS, SLOTS, SNAPSHOTS)
    y = wkv_scan(given, states, SPANS, torch.tensor(SLOTS), SNAPSHOTS)
    assert y.dtype is states.dtype
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(states, expected_states, TOLERANCE[dtype])


def test_a_sequence_is_the_mean_of_its_values_by_their_weights() -> None:
    """Value i of token t weighs e^(k_i − (t − 1 − i)·decay), its own e^(k_t + first)."""
    given = _inputs(torch.arange(12), torch.float64)
    y = wkv_scan(given, torch.zeros(1, 3, DIM).double(), ((0, 12),), torch.tensor([0]))
    for token in range(12):
        ages = (token - 1 - torch.arange(token, dtype=torch.float64))[:, None]
        logs = torch.cat(
            (given.k[:token] - ages * given.decay, (given.k[token] + given.first)[None])
        )
        weights = logs.softmax(0)
        assert_close(y[token], (weights * given.v[: token + 1]).sum(0), 1e-12)


def test_decoding_has_the_bits_of_a_prefill() -> None:
    given = _inputs(torch.tensor([0, 8, 5]), torch.float32)
    states = _states(torch.float32)
    stepped = states.clone()
    slots = torch.tensor([4, 0, 7])
    y = wkv_scan(given, states, ((0, 1), (8, 9), (5, 6)), slots)
    assert torch.equal(wkv_decode(given, stepped, slots, slots), y)
    assert torch.equal(stepped, states)
