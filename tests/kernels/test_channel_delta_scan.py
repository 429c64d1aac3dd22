"""The delta rule with a decay for each channel, against its recurrence in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.oracles import assert_close, delta_rule, in_runs, ragged, strided_states, wide
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.recurrence.channel_delta_scan import (
    DeltaInputs,
    channel_delta_decode,
    channel_delta_runs_reference,
    channel_delta_scan,
    delta_runs_triton,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}
HEADS, KEY_DIM, VALUE_DIM, NUM_SLOTS = 3, 5, 7, 9
SPANS = ((0, 5), (16, 50), (3, 4), (0, 2))
SLOTS = (4, 0, 7, 2)
SNAPSHOTS = ((1, 48, 3), (1, 32, 1), (0, 5, 6))

every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def _inputs(tokens: int, dtype: torch.dtype) -> DeltaInputs:
    q, k = F.normalize(torch.randn(2, tokens, HEADS, KEY_DIM), dim=-1).to(wide(dtype))
    g = -torch.rand(tokens, HEADS, KEY_DIM).to(wide(dtype)) * 2
    v = torch.randn(tokens, HEADS, VALUE_DIM).to(dtype)
    return q, k, v, g, torch.rand(tokens, HEADS).to(wide(dtype))


def _states(dtype: torch.dtype) -> Tensor:
    states = strided_states(NUM_SLOTS, (HEADS, KEY_DIM, VALUE_DIM), wide(dtype), gap=11)
    states[[4, 2]] = 0  # the spans that begin at 0 find cleared slots
    return states


@pytest.mark.parametrize(
    "backend",
    [channel_delta_runs_reference, delta_runs_triton],
)
@every_dtype
def test_runs_of_the_delta_rule_write_no_other_slot(
    backend: Callable[..., None], dtype: torch.dtype
) -> None:
    """One run begins cleared, one ends in another slot, one keeps only the copy."""
    given, states = _inputs(12, dtype), _states(dtype)
    runs = torch.tensor([[0, 4, -1, 1, 3], [4, 6, 0, 5, -1], [10, 2, 7, -1, 7]])
    y = torch.full((12, HEADS, VALUE_DIM), torch.nan, dtype=states.dtype)
    expected, expected_states = in_runs(delta_rule(given), states, runs, y)
    backend(given, states, runs, y)
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(states, expected_states, TOLERANCE[dtype])


@every_dtype
def test_a_ragged_scan_leaves_snapshots_at_their_positions(dtype: torch.dtype) -> None:
    tokens = sum(end - start for start, end in SPANS)
    given, states = _inputs(tokens, dtype), _states(dtype)
    expected, expected_states = ragged(delta_rule(given), states, SPANS, SLOTS, SNAPSHOTS)
    y = channel_delta_scan(*given, states, SPANS, torch.tensor(SLOTS), SNAPSHOTS)
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(states, expected_states, TOLERANCE[dtype])


@pytest.mark.parametrize("cut", [1, 7, 16, 33])
def test_a_scan_that_is_cut_anywhere_leaves_the_same_bits(cut: int) -> None:
    given, slot = _inputs(40, torch.float32), torch.tensor([0])
    whole, parts = torch.zeros(2, 1, HEADS, KEY_DIM, VALUE_DIM)
    y = channel_delta_scan(*given, whole, ((0, 40),), slot)
    found = []
    for span in ((0, cut), (cut, 40)):
        q, k, v, g, beta = (tensor[slice(*span)] for tensor in given)
        found.append(channel_delta_scan(q, k, v, g, beta, parts, (span,), slot))
    assert torch.equal(torch.cat(found), y)
    assert torch.equal(parts, whole)


def test_decoding_the_delta_rule_has_the_bits_of_a_scan() -> None:
    given, states = _inputs(3, torch.float32), _states(torch.float32)
    stepped, slots = states.clone(), torch.tensor([4, 0, 7])
    y = channel_delta_scan(*given, states, ((0, 1), (8, 9), (5, 6)), slots)
    assert torch.equal(channel_delta_decode(stepped, *given, slots, slots), y)
    assert torch.equal(stepped, states)
