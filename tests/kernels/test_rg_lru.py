"""The scan of an RG-LRU against its recurrence, written out token by token in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels import oracles
from tests.kernels.oracles import assert_close, in_runs, ragged, strided_states, wide
from torch import Tensor

from ferryman_kernels.recurrence.rg_lru import (
    Inputs,
    rg_lru_decode,
    rg_lru_runs_compiled,
    rg_lru_runs_reference,
    rg_lru_runs_triton,
    rg_lru_scan,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")
DIM, NUM_SLOTS = 37, 9
SPANS = ((0, 5), (16, 50), (3, 4), (0, 2))
SLOTS = (4, 0, 7, 2)
SNAPSHOTS = ((1, 48, 3), (1, 32, 1), (0, 5, 6))
POSITIONS = torch.cat([torch.arange(*span) for span in SPANS])
RUNS = [rg_lru_runs_reference, rg_lru_runs_compiled, rg_lru_runs_triton]

every_backend = pytest.mark.parametrize("backend", RUNS)
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def _inputs(positions: Tensor, dtype: torch.dtype) -> Inputs:
    """Rates from those that forget at once to those that hardly do."""
    x, enter, recur = (2 * torch.randn(3, len(positions), DIM)).to(dtype).unbind(0)
    rates = -torch.logspace(-6, 1, DIM, dtype=torch.float64).to(wide(dtype))
    return x, enter, recur, rates, positions


def _states(dtype: torch.dtype) -> Tensor:
    states = strided_states(NUM_SLOTS, (DIM,), wide(dtype), gap=11)
    states[[4, 2]] = 0  # the spans that begin at 0 find cleared slots
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
    place = device if backend is rg_lru_runs_triton else CPU
    moved = states.to(place, copy=True)
    y = torch.full(given[0].shape, torch.nan, dtype=states.dtype, device=place)
    backend(tuple(tensor.to(place) for tensor in given), moved, runs.to(place), y)
    expected, expected_states = in_runs(oracles.rg_lru(given), states, runs, y)
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(moved.cpu(), expected_states, TOLERANCE[dtype])


@every_dtype
def test_a_ragged_prefill_leaves_snapshots_at_their_positions(dtype: torch.dtype) -> None:
    given, states = _inputs(POSITIONS, dtype), _states(dtype)
    expected, expected_states = ragged(oracles.rg_lru(given), states, SPANS, SLOTS, SNAPSHOTS)
    y = rg_lru_scan(*given, states, SPANS, torch.tensor(SLOTS), SNAPSHOTS)
    assert y.dtype is states.dtype
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(states, expected_states, TOLERANCE[dtype])


def test_a_channel_that_hardly_forgets_keeps_its_digits() -> None:
    """One minus the square of a decay near one: float32 would lose all digits of the difference."""
    given = _inputs(torch.arange(1, 41), torch.float32)
    states = torch.zeros(1, DIM)
    y = rg_lru_scan(*given, states, ((1, 41),), torch.tensor([0]))
    exact = torch.zeros(1, DIM, dtype=torch.float64)
    x, enter, recur, rates = (tensor.double() for tensor in given[:4])
    inputs = x, enter, recur, rates, given[4]
    expected = rg_lru_scan(*inputs, exact, ((1, 41),), torch.tensor([0]))
    slowest = (y[:, 0] - expected[:, 0]).abs().max() / expected[:, 0].abs().max()
    assert slowest < 1e-6


@pytest.mark.parametrize("cut", [1, 7, 16, 33])
def test_a_run_that_is_cut_anywhere_leaves_the_same_bits(cut: int) -> None:
    x, enter, recur, rates, positions = _inputs(torch.arange(40), torch.float32)
    whole, parts = torch.zeros(2, 1, DIM)
    slot = torch.tensor([0])
    y = rg_lru_scan(x, enter, recur, rates, positions, whole, ((0, 40),), slot)
    pieces = [
        rg_lru_scan(x[at], enter[at], recur[at], rates, positions[at], parts, (span,), slot)
        for span in ((0, cut), (cut, 40))
        for at in [slice(*span)]
    ]
    assert torch.equal(torch.cat(pieces), y)
    assert torch.equal(parts, whole)


def test_decoding_has_the_bits_of_a_prefill() -> None:
    given = _inputs(torch.tensor([0, 8, 5]), torch.float32)
    states, stepped = _states(torch.float32), _states(torch.float32)
    stepped.copy_(states)
    slots = torch.tensor([4, 0, 7])
    y = rg_lru_scan(*given, states, ((0, 1), (8, 9), (5, 6)), slots)
    assert torch.equal(rg_lru_decode(stepped, *given, slots, slots), y)
    assert torch.equal(stepped, states)
