"""The fused step of a gated delta net against its parts, one operation after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ferryman_kernels._triton import Kernel
from ferryman_kernels.recurrence.causal_conv import _causal_conv_decode_kernel
from ferryman_kernels.recurrence.delta_decode import _delta_decode_kernel
from ferryman_kernels.recurrence.delta_inputs import _delta_inputs_kernel
from ferryman_kernels.recurrence.delta_step import (
    DeltaWeights,
    delta_step,
    delta_step_compiled,
    delta_step_reference,
)

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
SLOTS = 7


@dataclass(frozen=True)
class NetSizes:
    k_heads: int
    per_key: int
    k_dim: int
    v_dim: int
    width: int

    @property
    def v_heads(self) -> int:
        return self.k_heads * self.per_key

    @property
    def conv_dim(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


TWO_HEADS_A_KEY = NetSizes(2, 2, 8, 12, 4)
ANY_SIZES = st.builds(
    NetSizes, st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20),
    st.integers(2, 5),
)  # fmt: skip
QWENS_HEAD = NetSizes(1, 2, 128, 128, 4)


@dataclass
class NetCase:
    """The inputs of a step; what it writes is copied for each run."""

    projected: Tensor
    weights: DeltaWeights
    conv_states: Tensor
    ssm_states: Tensor
    sizes: NetSizes

    def in_float64(self) -> NetCase:
        """The same values."""
        own = self.weights
        taps, unit = own.conv_weight.double(), own.unit.double()
        weights = DeltaWeights(taps, unit, own.decay.double(), own.dt_bias.double(), own.max_rate)
        states = self.conv_states.double(), self.ssm_states.double()
        return NetCase(self.projected.double(), weights, *states, self.sizes)

    def run(
        self, step: Callable[..., Tensor], slots: Tensor, into: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        states, heads = (self.conv_states.clone(), self.ssm_states.clone()), self.sizes.v_heads
        # Parts of one product's rows, as the mixer has them.
        parts = self.projected.split_with_sizes((self.sizes.conv_dim, heads, heads), dim=1)
        return step(*parts, self.weights, *states, slots, into), *states


def drawn(sizes: NetSizes, dtype: torch.dtype, requests: int, max_rate: float = 2.0) -> NetCase:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(requests + sizes.conv_dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(wide)

    weights = DeltaWeights(
        conv_weight=normal(sizes.conv_dim, sizes.width),
        unit=torch.full((sizes.k_dim,), sizes.k_dim**-0.5, dtype=wide),
        decay=normal(sizes.v_heads).exp(),
        dt_bias=normal(sizes.v_heads),
        max_rate=max_rate,
    )
    return NetCase(
        normal(requests, sizes.conv_dim + 2 * sizes.v_heads).to(dtype),
        weights,
        normal(SLOTS, sizes.conv_dim, sizes.width - 1).to(dtype),
        normal(SLOTS, sizes.v_heads, sizes.k_dim, sizes.v_dim),
        sizes,
    )


def assert_alike(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    (y, conv, ssm), (exact_y, exact_conv, exact_ssm) = found, expected
    assert y.dtype is exact_y.dtype
    assert torch.equal(conv, exact_conv)
    for one, exact in ((y, exact_y), (ssm, exact_ssm)):
        scale = max(1.0, exact.double().abs().max().item())
        assert (one.double() - exact.double()).abs().max() <= BOUNDS[y.dtype] * scale


@given(ANY_SIZES, st.sampled_from(list(BOUNDS)), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_it_is_its_parts(sizes: NetSizes, dtype: torch.dtype, requests: int) -> None:
    case, slots = drawn(sizes, dtype, requests), torch.tensor([5, 0, 3, 6])[:requests]
    found = case.run(delta_step_compiled, slots, slots)
    assert_alike(found, case.run(delta_step_reference, slots, slots))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("sizes", [TWO_HEADS_A_KEY, QWENS_HEAD], ids=str)
def test_states_go_elsewhere_are_cleared_or_not_kept(sizes: NetSizes, dtype: torch.dtype) -> None:
    case = drawn(sizes, dtype, 4, max_rate=1.0)
    slots, into = torch.tensor([5, -1, 3, -1]), torch.tensor([1, 2, -1, -1])
    found = case.run(delta_step, slots, into)
    assert_alike(found, case.run(delta_step_reference, slots, into))
    for state, before in zip(found[1:], (case.conv_states, case.ssm_states), strict=True):
        assert torch.equal(state[[0, 3, 4, 5, 6]], before[[0, 3, 4, 5, 6]])
        assert not torch.equal(state[[1, 2]], before[[1, 2]])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_request_has_the_same_bits_in_every_batch_and_into_any_slot(dtype: torch.dtype) -> None:
    case, slots = drawn(TWO_HEADS_A_KEY, dtype, 3), torch.tensor([5, 0, 3])
    y, _, ssm = case.run(delta_step, slots, slots)
    for i in range(3):
        own = NetCase(
            case.projected[i : i + 1], case.weights, case.conv_states, case.ssm_states, case.sizes
        )
        one, _, kept = own.run(delta_step, slots[i : i + 1], torch.tensor([6]))
        assert torch.equal(one[0], y[i])
        assert torch.equal(kept[6], ssm[slots[i]])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_large_and_small_rates_and_not_a_number_stay_in_their_head(dtype: torch.dtype) -> None:
    case, slots = drawn(TWO_HEADS_A_KEY, dtype, 1), torch.tensor([1])
    conv_dim = case.sizes.conv_dim
    case.projected[0, conv_dim:] = torch.tensor([-90.0, 19.5, 45.0, 0.0, -80.0, 80.0, 0.0, 1.0])
    found = case.run(delta_step, slots, slots)
    assert_alike(found, case.run(delta_step_reference, slots, slots))
    case.projected[0, conv_dim + 2] = torch.nan
    y, _, ssm = case.run(delta_step, slots, slots)
    assert y.isnan().all(-1).tolist() == [[False, False, True, False]]
    assert ssm[1].isnan().flatten(1).all(-1).tolist() == [False, False, True, False]


def test_over_many_steps_it_is_as_near_to_float64_as_its_parts() -> None:
    """In bfloat16 the two differ by single roundings; neither may drift away."""
    slots, steps = torch.tensor([5]), (delta_step_compiled, delta_step_reference)
    narrow = [drawn(QWENS_HEAD, torch.bfloat16, 1, max_rate=1.0) for _ in steps]
    exact, errors = narrow[0].in_float64(), torch.empty(len(steps), 400, dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    for i in range(errors.shape[1]):
        given = torch.randn(exact.projected.shape, generator=generator).to(torch.bfloat16)
        exact.projected = given.double()
        right, exact.conv_states, exact.ssm_states = exact.run(delta_step_reference, slots, slots)
        for row, (case, step) in enumerate(zip(narrow, steps, strict=True)):
            case.projected = given
            y, case.conv_states, case.ssm_states = case.run(step, slots, slots)
            errors[row, i] = (
                y.double() - right
            ).square().mean().sqrt() / right.square().mean().sqrt()
    fused, parts = errors
    assert 0 < fused.median() < 2.0**-7
    assert fused.mean() <= 1.01 * parts.mean()
    assert fused[-100:].mean() <= 1.1 * fused[:100].mean(), "it does not grow with the steps"


def test_on_a_card_its_parts_are_launched() -> None:
    launched = []

    def noted(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: launched.append(kernel)

    case, slots = drawn(TWO_HEADS_A_KEY, torch.float32, 2), torch.tensor([5, 0])
    with (
        patch.object(Tensor, "is_cuda", True, create=True),
        patch.object(Kernel, "__getitem__", noted),
    ):
        case.run(delta_step, slots, slots)
    assert launched == [_causal_conv_decode_kernel, _delta_inputs_kernel, _delta_decode_kernel]
