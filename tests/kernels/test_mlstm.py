"""The mLSTM cell against its recurrence, written out token by token in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.kernels import oracles
from tests.kernels.oracles import assert_close, in_runs, ragged, strided_states, wide
from torch import Tensor

from ferryman_kernels.recurrence.cells._mlstm_triton import mlstm_runs_triton
from ferryman_kernels.recurrence.cells.mlstm import (
    CellStates,
    mlstm_decode,
    mlstm_runs_reference,
    mlstm_scan,
)
from ferryman_kernels.recurrence.cells.mlstm_rows import CellGates, CellRows

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
CAP, EPS = 5.0, 1e-6
NUM_SLOTS = 9
SPANS = ((0, 5), (16, 50), (3, 4), (0, 2))
SLOTS = (4, 0, 7, 2)
SNAPSHOTS = ((1, 48, 3), (1, 32, 1), (0, 5, 6))
TOKENS = sum(end - start for start, end in SPANS)
SIZES = [(3, 5, 7), (2, 71, 33), (1, 64, 16)]
"""Heads, rows and columns: less than a vector, more than a job's rows, and whole vectors."""

every_size = pytest.mark.parametrize("sizes", SIZES)
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def _inputs(sizes: tuple[int, int, int], tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and gates of which some are far beyond the cap; a head of long memory."""
    heads, v_dim, k_dim = sizes
    keys = torch.randn(2, tokens, heads, k_dim)
    gates = 4 * torch.randn(2, tokens, heads) + torch.tensor([[[0.0]], [[3.0]]])
    values = torch.randn(tokens, heads, v_dim)
    return [each.to(dtype) for each in (*keys, values, *gates)]


def _states(sizes: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Rows of all that a slot holds; the maximum of a state is never below the cap."""
    heads, v_dim, k_dim = sizes
    packed = heads * (v_dim * k_dim + k_dim + 1)
    states = strided_states(NUM_SLOTS, (packed,), wide(dtype), gap=16)
    states[[4, 2]] = 0  # the spans that begin at 0 find cleared slots
    return states


def _views(states: Tensor, sizes: tuple[int, int, int]) -> CellStates:
    heads, v_dim, k_dim = sizes
    matrix, norm = states.split_with_sizes([heads * v_dim * k_dim, heads * (k_dim + 1)], dim=1)
    return CellStates(matrix.view(-1, *sizes), norm.view(-1, heads, k_dim + 1))


def _taken(given: Sequence[Tensor]) -> tuple[CellRows, CellGates]:
    return CellRows(*given[:3]), CellGates(given[3], given[4], CAP, EPS)


def _on_card(rows: CellRows, gates: CellGates, states: CellStates, runs: Tensor, y: Tensor) -> None:
    mlstm_runs_triton(rows, gates, *states, runs, y)


@pytest.mark.parametrize("backend", [mlstm_runs_reference, _on_card])
@every_size
@every_dtype
def test_runs_go_from_slot_to_slot_and_write_no_other(
    backend: Callable[..., None],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """One run begins cleared, one ends in another slot, one keeps only the copy."""
    given, states = _inputs(sizes, 12, dtype), _states(sizes, dtype)
    runs = torch.tensor([[0, 4, -1, 1, 3], [4, 6, 0, 5, -1], [10, 2, 7, -1, 8]])
    place = device if backend is _on_card else torch.device("cpu")
    moved = states.to(place, copy=True)
    y = torch.full(given[2].shape, torch.nan, dtype=dtype, device=place)
    taken = _taken([each.to(place) for each in given])
    backend(*taken, _views(moved, sizes), runs.to(place), y)
    expected, expected_states = in_runs(oracles.mlstm(given, CAP, EPS), states, runs, y)
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(moved, expected_states, TOLERANCE[dtype])


@every_size
@every_dtype
def test_a_ragged_prefill_leaves_snapshots_at_their_positions(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    given, states = _inputs(sizes, TOKENS, dtype), _states(sizes, dtype)
    oracle = oracles.mlstm(given, CAP, EPS)
    expected, expected_states = ragged(oracle, states, SPANS, SLOTS, SNAPSHOTS)
    views = _views(states, sizes)
    y = mlstm_scan(*_taken(given), views, SPANS, torch.tensor(SLOTS), SNAPSHOTS)
    assert y.dtype is dtype
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(states, expected_states, TOLERANCE[dtype])


@every_size
def test_decoding_reads_one_slot_and_writes_another(sizes: tuple[int, int, int]) -> None:
    """A negative slot reads as cleared, and a negative target is not written."""
    given, states = _inputs(sizes, 4, torch.float64), _states(sizes, torch.float64)
    slots, into = [0, 7, -1, 5], [1, -1, 3, 5]
    runs = torch.tensor([[row, 1, slots[row], into[row], -1] for row in range(4)])
    expected, expected_states = in_runs(oracles.mlstm(given, CAP, EPS), states, runs, given[2])
    places = torch.tensor(slots), torch.tensor(into)
    y = mlstm_decode(*_taken(given), _views(states, sizes), *places)
    assert_close(y, expected, 1e-12)
    assert_close(states, expected_states, 1e-12)


def test_rows_of_a_wider_product_are_read_where_they_lie() -> None:
    """Projections come as parts of one product's outputs, and gates as halves of another's."""
    sizes = heads, v_dim, k_dim = (2, 16, 32)
    given, states = _inputs(sizes, 20, torch.float32), _states(sizes, torch.float32)
    parts = torch.cat([each.flatten(1) for each in given[:3]], dim=1)
    gates = torch.cat(given[3:], dim=1)
    cut = parts.split_with_sizes([heads * k_dim, heads * k_dim, heads * v_dim], dim=1)
    strided = [part.view(len(part), heads, -1) for part in cut]
    other = states.clone()
    span, slot = ((3, 23),), torch.tensor([6])
    y = mlstm_scan(*_taken(given), _views(states, sizes), span, slot)
    found = mlstm_scan(
        *_taken([*strided, *gates.chunk(2, dim=1)]), _views(other, sizes), span, slot
    )
    assert torch.equal(found, y)
    assert torch.equal(other, states)
