"""Launchers refuse arguments that a loop would misread; NaN stays in its own request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ferryman_kernels.elementwise.gates.clamped_swiglu import clamped_swiglu
from ferryman_kernels.elementwise.gates.gated_silu import gated_silu
from ferryman_kernels.elementwise.rms_norm import add_rms_norm
from ferryman_kernels.products.int8_product import int8_product, int8_quad_product, quads_of_codes
from ferryman_kernels.products.packed_product import pack_panels, packed_product
from ferryman_kernels.recurrence.causal_conv import (
    causal_conv_decode_reference,
    causal_conv_decode_triton,
)
from ferryman_kernels.recurrence.delta_decode import (
    delta_decode,
    delta_decode_reference,
    delta_decode_triton,
)
from ferryman_kernels.recurrence.delta_step import DeltaWeights, delta_step
from ferryman_kernels.recurrence.loops._causal_conv_compiled import causal_conv_decode_compiled
from ferryman_kernels.recurrence.mamba_step import StepWeights, mamba_step
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan, chunk_scan_reference
from ferryman_kernels.recurrence.ssd_decode import (
    selective_state_update,
    selective_state_update_reference,
    selective_state_update_triton,
)

NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize(
    ("of_x", "of_scales"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64,) * 2],
    ids=["wide scales", "wide x", "float64"],
)
def test_scales_of_int8_codes_have_the_dtype_of_x(
    of_x: torch.dtype, of_scales: torch.dtype, tokens: int
) -> None:
    x, scales = torch.ones(tokens, 32, dtype=of_x), torch.ones(8, dtype=of_scales)
    with pytest.raises(AssertionError):
        int8_product(x, torch.ones(8, 32, dtype=torch.int8), scales, widened_from=32)


@pytest.mark.parametrize(
    ("of_x", "in_dim", "outputs"),
    [(torch.float32, 32, 64), (torch.bfloat16, 28, 64), (torch.bfloat16, 32, 65)],
    ids=["float32", "short x", "scales of another panel"],
)
def test_quads_of_codes_have_the_size_of_x_and_of_scales(
    of_x: torch.dtype, in_dim: int, outputs: int
) -> None:
    quads = quads_of_codes(torch.ones(64, 32, dtype=torch.int8), torch.device("cpu"))
    x, scales = torch.ones(1, in_dim, dtype=of_x), torch.ones(outputs, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        int8_quad_product(x, quads, scales)


def test_rows_of_codes_for_torch_s_kernel_have_a_multiple_of_16_inputs() -> None:
    x, codes = torch.ones(2, 24, dtype=torch.bfloat16), torch.ones(8, 24, dtype=torch.int8)
    with pytest.raises(AssertionError, match="beyond a row"):
        int8_product(x, codes, torch.ones(8, dtype=torch.bfloat16), widened_from=32)


def test_a_sum_s_norm_needs_a_weight_for_each_channel() -> None:
    with pytest.raises(AssertionError):
        add_rms_norm(torch.ones(2, 8), torch.ones(2, 8), 1.0, torch.ones(4), 1e-6)


def test_a_bias_of_a_packed_product_has_no_gaps() -> None:
    panels = pack_panels(torch.randn(64, 32))
    with pytest.raises(AssertionError):
        packed_product(torch.ones(1, 32), panels, torch.ones(64, 2)[:, 0])


@pytest.mark.parametrize("narrow", [(), (0,), (1, 2), (0, 1, 2)], ids=str)
def test_a_chunk_s_scan_takes_parts_of_several_dtypes(narrow: tuple[int, ...]) -> None:
    parts = [torch.randn(20, 4, 8), torch.randn(20, 2, 16), torch.randn(20, 2, 16)]
    x, B, C = (part.bfloat16() if i in narrow else part for i, part in enumerate(parts))
    given = torch.rand(20, 4), -torch.rand(4), B, C, torch.rand(4)
    states = torch.randn(3, 4, 8, 16)
    where = [(0, 20)], torch.tensor([1]), (), 16
    expected_states = states.clone()
    expected = chunk_scan_reference(x, *given, expected_states, *where)
    found = chunk_scan(x, *given, states, *where)
    share = 2.0**-7 if narrow else 1e-5
    torch.testing.assert_close(found, expected, rtol=share, atol=share)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)


def _mamba(conv_dim: int, bias_dim: int) -> None:
    weights = StepWeights(
        torch.ones(conv_dim, 4), torch.ones(bias_dim), *(torch.ones(4),) * 3, (0.0, 1.0)
    )
    slots = torch.zeros(1, dtype=torch.int64)
    states = torch.zeros(2, conv_dim, 3), torch.zeros(2, 4, 8, 16)
    mamba_step(torch.ones(1, conv_dim), torch.ones(1, 4), weights, *states, slots, slots)


@pytest.mark.parametrize(
    ("conv_dim", "bias_dim"),
    [(96, 90), (95, 95), (80, 80), (32, 32), (32 + 6 * 16, 32 + 6 * 16)],
    ids=["a short bias", "a short C", "no C", "neither B nor C", "three groups of four heads"],
)
def test_a_mamba_step_reads_what_it_has(conv_dim: int, bias_dim: int) -> None:
    with pytest.raises(AssertionError):
        _mamba(conv_dim, bias_dim)


def test_a_mamba_step_of_whole_parts_runs() -> None:
    _mamba(96, 96)


def test_a_delta_step_has_the_same_number_of_value_heads_for_each_key() -> None:
    conv_dim = 2 * 2 * 8 + 3 * 16
    ones = torch.ones(3)
    weights = DeltaWeights(torch.ones(conv_dim, 4), torch.ones(8), ones, ones, 1.0)
    slots = torch.zeros(1, dtype=torch.int64)
    states = torch.zeros(2, conv_dim, 3), torch.zeros(2, 3, 8, 16)
    rates = torch.ones(1, 3), torch.ones(1, 3)
    with pytest.raises(AssertionError):
        delta_step(torch.ones(1, conv_dim), *rates, weights, *states, slots, slots)


CLEARED = torch.tensor([-1])


@pytest.mark.parametrize(
    "step",
    [causal_conv_decode_reference, causal_conv_decode_compiled, causal_conv_decode_triton],
)
def test_a_cleared_window_has_nothing_of_the_first_slot(
    step: Callable[..., Tensor], device: torch.device
) -> None:
    if step is not causal_conv_decode_triton:
        device = torch.device("cpu")
    states = torch.full((2, 8, 3), NAN, device=device)
    x, weight, none = torch.ones(1, 8, device=device), torch.ones(8, 4, device=device), CLEARED
    y = step(x, states, weight, None, none.to(device), torch.tensor([1], device=device))
    assert y.isfinite().all()
    assert states[1].tolist() == [[0.0, 0.0, 1.0]] * 8
    assert states[0].isnan().all()


@pytest.mark.parametrize(
    "update",
    [
        selective_state_update_reference,
        selective_state_update,
        selective_state_update_triton,
    ],
)
def test_a_cleared_state_has_nothing_of_the_first_slot(
    update: Callable[..., Tensor], device: torch.device
) -> None:
    if update is not selective_state_update_triton:
        device = torch.device("cpu")
    states = torch.full((2, 2, 4, 8), NAN, device=device)
    head, group = torch.ones(2, device=device), torch.ones(1, 1, 8, device=device)
    x, dt = torch.ones(1, 2, 4, device=device), torch.ones(1, 2, device=device)
    slots = CLEARED.to(device), torch.tensor([1], device=device)
    y = update(states, x, dt, -head, group, group, head, *slots)
    assert y.isfinite().all()
    assert (states[1] == 1).all()
    assert states[0].isnan().all()


@pytest.mark.parametrize("step", [delta_decode, delta_decode_reference, delta_decode_triton])
def test_a_cleared_memory_has_nothing_of_the_first_slot(
    step: Callable[..., Tensor], device: torch.device
) -> None:
    if step is not delta_decode_triton:
        device = torch.device("cpu")
    states = torch.full((2, 2, 4, 8), NAN, device=device)
    key, value = torch.ones(1, 1, 4, device=device), torch.ones(1, 2, 8, device=device)
    rates = torch.zeros(1, 2, device=device), torch.ones(1, 2, device=device)
    slots = CLEARED.to(device), torch.tensor([1], device=device)
    y = step(states, key, key, value, *rates, *slots)
    assert (y == 4).all()
    assert (states[1] == 1).all()
    assert states[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_activations_of_the_lowest_numbers_are_zero_and_of_minus_infinity_none(
    dtype: torch.dtype,
) -> None:
    gates = torch.tensor([-1e2, -1e20, -1e38, -INF, INF, NAN]).to(dtype)
    x = torch.stack((gates, torch.ones_like(gates)), 1)
    for y in (gated_silu(x)[:, 0], clamped_swiglu(x, 1.0, INF, 1.0)[:, 0]):
        assert y[:3].abs().max() < 1e-36
        assert y[3].isnan()
        assert y[4] == INF
        assert y[5].isnan()
