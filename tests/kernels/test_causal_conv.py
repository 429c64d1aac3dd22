"""Causal convolution against a sequential run, token by token, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.kernels.oracles import assert_close, convolution, ragged, strided_states
from torch import Tensor

from ferryman_kernels.cpu._compiled import numba
from ferryman_kernels.cpu.launches import (
    RecordedLaunch,
    launches_told_to,
    loops_for_many_tokens,
)
from ferryman_kernels.recurrence.causal_conv import (
    causal_conv_decode,
    causal_conv_decode_reference,
    causal_conv_decode_triton,
    causal_conv_prefill,
    causal_conv_prefill_reference,
    causal_conv_prefill_triton,
)
from ferryman_kernels.recurrence.loops import _causal_conv_compiled

TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 1e-2}
CPU = torch.device("cpu")
CONV_DIM, WIDTH, NUM_SLOTS = 37, 4, 9
SPANS = ((0, 5), (16, 50), (3, 4), (0, 2), (8, 10))
SLOTS = (4, 0, 7, 2, 5)
SNAPSHOTS = ((1, 32, 1), (1, 48, 3), (4, 9, 6))
"""The last one is fewer tokens after its start than the convolution is wide."""


def _states(dtype: torch.dtype) -> Tensor:
    states = strided_states(NUM_SLOTS, (CONV_DIM, WIDTH - 1), dtype, gap=11)
    states[[4, 2]] = 0  # the spans that begin at 0 find cleared slots
    return states


@pytest.mark.parametrize(
    ("has_bias", "activates"),
    [(True, True), (False, True), (True, False)],
    ids=["bias", "no bias", "no activation"],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "run", [causal_conv_prefill, causal_conv_prefill_reference, causal_conv_prefill_triton]
)
def test_a_ragged_prefill_goes_on_from_each_slot_and_leaks_nothing(
    run: Callable[..., Tensor],
    dtype: torch.dtype,
    has_bias: bool,
    activates: bool,
    device: torch.device,
) -> None:
    place = device if run is causal_conv_prefill_triton else CPU
    tokens = sum(end - start for start, end in SPANS)
    x, weight = torch.randn(tokens, CONV_DIM).to(dtype), torch.randn(CONV_DIM, WIDTH).to(dtype)
    bias = torch.randn(CONV_DIM).to(dtype) if has_bias else None
    states = _states(dtype)
    oracle = convolution(x, weight, bias, activates)
    expected, expected_states = ragged(oracle, states, SPANS, SLOTS, SNAPSHOTS)
    moved = states.to(place, copy=True)
    y = run(
        x.to(place),
        moved,
        weight.to(place),
        None if bias is None else bias.to(place),
        SPANS,
        torch.tensor(SLOTS, device=place),
        SNAPSHOTS,
        activates,
    )
    assert_close(y, expected, TOLERANCE[dtype])
    assert torch.equal(moved.cpu(), expected_states.to(dtype))


@pytest.mark.parametrize("activates", [True, False], ids=["silu", "no activation"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "run", [causal_conv_decode, causal_conv_decode_reference, causal_conv_decode_triton]
)
def test_decode_shifts_the_states_of_its_slots_only(
    run: Callable[..., Tensor], dtype: torch.dtype, activates: bool, device: torch.device
) -> None:
    place = device if run is causal_conv_decode_triton else CPU
    x, weight = torch.randn(3, CONV_DIM).to(dtype), torch.randn(CONV_DIM, WIDTH).to(dtype)
    bias, states, slots = torch.randn(CONV_DIM).to(dtype), _states(dtype), [7, -1, 2]
    old = torch.stack([states[7], torch.zeros_like(states[0]), states[2]])
    windows = torch.cat((old, x[:, :, None]), dim=2)
    expected_states = states.clone()
    expected_states[7], expected_states[2] = windows[0, :, 1:], windows[2, :, 1:]
    total = (windows.double() * weight.double()).sum(2) + bias.double()
    moved = states.to(place, copy=True)
    slots_there = torch.tensor(slots, device=place)
    given = x.to(place), weight.to(place), bias.to(place)
    y = run(given[0], moved, *given[1:], slots_there, slots_there, activates)
    assert_close(y, total / (1 + (-total).exp()) if activates else total, TOLERANCE[dtype])
    assert torch.equal(moved.cpu(), expected_states)

    elsewhere = states.to(place, copy=True)
    into = torch.tensor([3, 1, -1], device=place)
    again = run(given[0], elsewhere, *given[1:], slots_there, into, activates)
    assert torch.equal(again, y)
    expected_states = states.clone()
    expected_states[3], expected_states[1] = windows[0, :, 1:], windows[1, :, 1:]
    assert torch.equal(elsewhere.cpu(), expected_states)


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("has_bias", [True, False])
def test_decode_has_any_number_of_taps(width: int, has_bias: bool) -> None:
    """Four have a loop of their own on a CPU. x is a part of something wider."""
    x = torch.randn(3, 3 * CONV_DIM).double()[:, CONV_DIM : 2 * CONV_DIM]
    states = torch.randn(5, CONV_DIM, width - 1).double()
    weight = torch.randn(CONV_DIM, width).double()
    bias = torch.randn(CONV_DIM).double() if has_bias else None
    slots, into, expected = torch.tensor([4, -1, 2]), torch.tensor([4, 1, -1]), states.clone()
    right = causal_conv_decode_reference(x, expected, weight, bias, slots, into)
    found = causal_conv_decode(x, states, weight, bias, slots, into)
    assert_close(found, right, TOLERANCE[torch.float64])
    assert torch.equal(states, expected)


@pytest.mark.parametrize("run", [causal_conv_prefill, causal_conv_prefill_triton])
def test_a_prefill_in_pieces_has_the_bits_of_one_in_whole(
    run: Callable[..., Tensor], device: torch.device
) -> None:
    place = device if run is causal_conv_prefill_triton else CPU
    x, weight, bias = (torch.randn(*shape, device=place) for shape in ((40, 32), (32, 4), (32,)))
    slot = torch.tensor([0], device=place)
    whole = torch.zeros(1, 32, 3, device=place)
    y = run(x, whole, weight, bias, ((0, 40),), slot, ())
    for cut in (1, 2, 3, 16, 39):
        states = torch.zeros(1, 32, 3, device=place)
        parts = [
            run(x[low:high], states, weight, bias, ((low, high),), slot, ())
            for low, high in ((0, cut), (cut, 40))
        ]
        assert torch.equal(torch.cat(parts), y)
        assert torch.equal(states, whole)


@pytest.mark.skipif(numba is None, reason="the loops are numba's")
def test_states_are_stored_by_one_thread_even_where_few_tokens_pass_as_many() -> None:
    """A loop with nothing to share has no version for several threads."""
    ran = list[RecordedLaunch]()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with loops_for_many_tokens(), launches_told_to(ran.append):
            causal_conv_prefill(
                torch.randn(5, CONV_DIM),
                torch.zeros(1, CONV_DIM, WIDTH - 1),
                torch.randn(CONV_DIM, WIDTH),
                None,
                ((0, 5),),
                torch.tensor([0]),
                (),
            )
    finally:
        torch.set_num_threads(threads)
    convolve, store = _causal_conv_compiled._convolve_loop, _causal_conv_compiled._store_loop
    assert [launched.loop for launched in ran] == [convolve.shared, store.alone]


def test_silu_of_a_large_negative_sum_is_zero() -> None:
    x, slot = torch.full((1, 1), -1e4), torch.tensor([0])
    y = causal_conv_decode(x, torch.zeros(1, 1, 1), torch.ones(1, 2), torch.zeros(1), slot, slot)
    assert math.isclose(float(y), 0.0, abs_tol=1e-30)
