"""The selective scan of Mamba-1 against its recurrence, written out token by token in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels import oracles
from tests.kernels.oracles import assert_close, in_runs, ragged, strided_states, wide
from torch import Tensor

from ferryman_kernels.recurrence.selective_scan import (
    Inputs,
    rounds_of,
    selective_runs_compiled,
    selective_runs_reference,
    selective_runs_triton,
    selective_scan,
    selective_scan_decode,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")
INNER_DIM, STATE, NUM_SLOTS = 37, 5, 9
SPANS = ((0, 5), (16, 50), (3, 4), (0, 2))
SLOTS = (4, 0, 7, 2)
SNAPSHOTS = ((1, 48, 3), (1, 32, 1), (0, 5, 6))
RUNS = [selective_runs_reference, selective_runs_compiled, selective_runs_triton]

every_backend = pytest.mark.parametrize("backend", RUNS)
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def _inputs(tokens: int, dtype: torch.dtype) -> Inputs:
    x, dt = torch.randn(tokens, INNER_DIM).to(dtype), torch.rand(tokens, INNER_DIM).to(wide(dtype))
    A, D = -torch.rand(INNER_DIM, STATE).to(wide(dtype)) * 4, torch.randn(INNER_DIM).to(wide(dtype))
    B, C = torch.randn(2, tokens, STATE).to(dtype)
    return x, dt, A, B, C, D


def _states(dtype: torch.dtype) -> Tensor:
    states = strided_states(NUM_SLOTS, (INNER_DIM, STATE), wide(dtype), gap=11)
    states[[4, 2]] = 0  # the spans that begin at 0 find cleared slots
    return states


def _on(
    backend: Callable[..., None], given: Inputs, states: Tensor, runs: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """y and the states after the backend, which only Triton runs elsewhere than on the CPU."""
    place = device if backend is selective_runs_triton else CPU
    moved = states.to(place, copy=True)
    y = torch.full(given[0].shape, torch.nan, dtype=states.dtype, device=place)
    backend(tuple(tensor.to(place) for tensor in given), moved, runs.to(place), y)
    return y, moved.cpu()


@every_backend
@every_dtype
def test_runs_go_from_slot_to_slot_and_write_no_other(
    backend: Callable[..., None], dtype: torch.dtype, device: torch.device
) -> None:
    """One run begins cleared, one ends in another slot, one keeps only the copy."""
    given, states = _inputs(12, dtype), _states(dtype)
    runs = torch.tensor([[0, 4, -1, 1, 3], [4, 6, 0, 5, -1], [10, 2, 7, -1, 7]])
    y, found = _on(backend, given, states, runs, device)
    expected, expected_states = in_runs(oracles.selective_scan(given), states, runs, y)
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(found, expected_states, TOLERANCE[dtype])


@every_dtype
def test_a_ragged_prefill_leaves_snapshots_at_their_positions(dtype: torch.dtype) -> None:
    tokens = sum(end - start for start, end in SPANS)
    given, states = _inputs(tokens, dtype), _states(dtype)
    oracle = oracles.selective_scan(given)
    expected, expected_states = ragged(oracle, states, SPANS, SLOTS, SNAPSHOTS)
    y = selective_scan(*given, states, SPANS, torch.tensor(SLOTS), SNAPSHOTS)
    assert y.dtype is states.dtype
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(states, expected_states, TOLERANCE[dtype])


@pytest.mark.parametrize("cut", [1, 7, 16, 33])
def test_a_run_that_is_cut_anywhere_leaves_the_same_bits(cut: int) -> None:
    x, dt, A, B, C, D = _inputs(40, torch.float32)
    whole, parts = torch.zeros(2, 1, INNER_DIM, STATE)
    slot = torch.tensor([0])
    y = selective_scan(x, dt, A, B, C, D, whole, ((0, 40),), slot)
    found = [
        selective_scan(x[part], dt[part], A, B[part], C[part], D, parts, (span,), slot)
        for span in ((0, cut), (cut, 40))
        for part in [slice(*span)]
    ]
    assert torch.equal(torch.cat(found), y)
    assert torch.equal(parts, whole)


def test_decoding_has_the_bits_of_a_prefill() -> None:
    x, dt, A, B, C, D = _inputs(3, torch.float32)
    states, stepped = _states(torch.float32), _states(torch.float32)
    stepped.copy_(states)
    slots = torch.tensor([4, 0, 7])
    y = selective_scan(x, dt, A, B, C, D, states, ((0, 1), (8, 9), (5, 6)), slots)
    found = selective_scan_decode(stepped, x, dt, A, B, C, D, slots, slots)
    assert torch.equal(found, y)
    assert torch.equal(stepped, states)


def test_a_round_has_one_run_of_a_request() -> None:
    """Cuts at the snapshots, the last of which may be the end of the span."""
    assert list(rounds_of(SPANS, SNAPSHOTS)) == [
        ((0, 5, 0, 6), (5, 16, 1, 1), (39, 1, 2, -1), (40, 2, 3, -1)),
        ((21, 16, 1, 3),),
        ((37, 2, 1, -1),),
    ]
