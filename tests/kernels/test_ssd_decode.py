"""The state update against its formula, one element after the other, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.oracles import assert_close, ragged, state_space, wide
from torch import Tensor

from ferryman_kernels.recurrence.ssd_decode import (
    selective_state_update,
    selective_state_update_reference,
    selective_state_update_triton,
)

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}
SHAPES = [
    pytest.param(3, 4, 2, 8, 16, id="two groups"),
    pytest.param(2, 3, 1, 20, 24, id="odd sizes"),
    pytest.param(1, 2, 1, 64, 128, id="Granite's head"),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("requests", "heads", "groups", "head_dim", "state"), SHAPES)
@pytest.mark.parametrize(
    "run",
    [
        selective_state_update,
        selective_state_update_reference,
        selective_state_update_triton,
    ],
)
def test_states_advance_in_their_slots_and_strays_stay(
    run: Callable[..., Tensor],
    requests: int,
    heads: int,
    groups: int,
    head_dim: int,
    state: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    place = device if run is selective_state_update_triton else torch.device("cpu")
    precise = wide(dtype)
    slots = torch.randperm(requests + 2)[:requests]
    rows = torch.randn(requests + 2, heads * head_dim * state + 16, dtype=precise)
    states = rows[:, 16:].view(-1, heads, head_dim, state)
    x = torch.randn(requests, heads, head_dim).to(dtype)
    dt, A = torch.rand(requests, heads, dtype=precise), -torch.rand(heads, dtype=precise)
    B, C = torch.randn(2, requests, groups, state).to(dtype)
    D = torch.randn(heads, dtype=precise)

    oracle = state_space((x, dt, A, B, C, D))
    expected, expected_states = ragged(oracle, states, ((0, 1),) * requests, slots.tolist())
    moved = rows.to(place, copy=True)
    moved_states = moved[:, 16:].view(-1, heads, head_dim, state)
    y = run(moved_states, *(t.to(place) for t in (x, dt, A, B, C, D, slots, slots)))
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(moved_states, expected_states, 1e-13 if precise == torch.float64 else 1e-5)
    strays = sorted(set(range(requests + 2)) - set(slots.tolist()))
    assert torch.equal(moved.cpu()[strays], rows[strays])
    assert torch.equal(moved.cpu()[:, :16], rows[:, :16])


@pytest.mark.parametrize(
    "run",
    [
        selective_state_update,
        selective_state_update_reference,
        selective_state_update_triton,
    ],
)
def test_a_negative_slot_reads_as_cleared_and_is_written_nowhere(
    run: Callable[..., Tensor], device: torch.device
) -> None:
    place = device if run is selective_state_update_triton else torch.device("cpu")
    states = torch.randn(2, 2, 4, 8, device=place)
    before, cleared = states.clone(), torch.zeros(1, 2, 4, 8, device=place)
    x, B, C = (torch.randn(1, *shape, device=place) for shape in ((2, 4), (1, 8), (1, 8)))
    dt, A = torch.rand(1, 2, device=place), -torch.ones(2, device=place)
    D = torch.randn(2, device=place)
    nowhere, first = torch.tensor([-1], device=place), torch.tensor([0], device=place)
    y = run(states, x, dt, A, B, C, D, nowhere, nowhere)
    assert torch.equal(states, before)
    torch.testing.assert_close(y, run(cleared, x, dt, A, B, C, D, first, first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "run",
    [
        selective_state_update,
        selective_state_update_reference,
        selective_state_update_triton,
    ],
)
def test_a_state_written_elsewhere_has_the_bits_of_one_written_in_place(
    run: Callable[..., Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Plain decoding and the verification of drafts must give the same bits."""
    place = device if run is selective_state_update_triton else torch.device("cpu")
    before = torch.randn(7, 3, 20, 24, dtype=dtype, device=place)
    x, B, C = (
        torch.randn(3, *shape, dtype=dtype, device=place) for shape in ((3, 20), (1, 24), (1, 24))
    )
    dt, A, D = torch.rand(3, 3, device=place), -torch.rand(3, device=place), torch.ones(3)
    parameters = [t.to(place, dtype) for t in (A, B, C, D)]
    slots = torch.tensor([5, 0, -1], device=place)
    in_place, elsewhere = before.clone(), before.clone()
    expected = run(in_place, x, dt.to(dtype), *parameters, slots, slots)
    into = torch.tensor([1, -1, 6], device=place)
    assert torch.equal(run(elsewhere, x, dt.to(dtype), *parameters, slots, into), expected)
    assert torch.equal(elsewhere[1], in_place[5])
    assert not torch.equal(elsewhere[6], before[6]), "a cleared state was advanced into slot 6"
    kept = [0, 2, 3, 4, 5]
    assert torch.equal(elsewhere[kept], before[kept])
