"""The fused step of a Mamba-2 mixer against its parts, one operation after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel
from ferryman_kernels.recurrence.causal_conv import (
    _causal_conv_decode_kernel,
    causal_conv_decode_triton,
)
from ferryman_kernels.recurrence.mamba_step import (
    StepWeights,
    mamba_step,
    mamba_step_compiled,
    mamba_step_reference,
    mamba_step_triton,
    state_inputs,
)
from ferryman_kernels.recurrence.ssd_decode import (
    _selective_state_update_kernel,
    selective_state_update_triton,
)

BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
SLOTS = 7
CPU = torch.device("cpu")


@dataclass(frozen=True)
class MixerSizes:
    heads: int
    head_dim: int
    groups: int
    state: int
    width: int

    @property
    def conv_dim(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state


SIZES = [
    pytest.param(MixerSizes(4, 8, 2, 16, 4), id="two groups"),
    pytest.param(MixerSizes(3, 20, 1, 24, 3), id="odd sizes"),
    pytest.param(MixerSizes(2, 32, 1, 128, 4), id="Granite's head"),
]


@dataclass
class StepCase:
    """The inputs of a step; what it writes is copied for each run."""

    projected: Tensor
    weights: StepWeights
    conv_states: Tensor
    ssm_states: Tensor
    sizes: MixerSizes

    def run(
        self, step: object, slots: Tensor, into: Tensor, place: torch.device = CPU
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert callable(step)
        states = [each.to(place, copy=True) for each in (self.conv_states, self.ssm_states)]
        bias = self.weights.conv_bias
        weights = StepWeights(
            conv_weight=self.weights.conv_weight.to(place),
            conv_bias=None if bias is None else bias.to(place),
            A=self.weights.A.to(place),
            D=self.weights.D.to(place),
            dt_bias=self.weights.dt_bias.to(place),
            dt_limit=self.weights.dt_limit,
        )
        # Parts of one product's rows, as the mixer has them.
        parts = self.projected.to(place).split_with_sizes(
            (self.sizes.conv_dim, self.sizes.heads), dim=1
        )
        y = step(*parts, weights, *states, slots.to(place), into.to(place))
        return y.cpu(), states[0].cpu(), states[1].cpu()


def drawn(
    sizes: MixerSizes,
    dtype: torch.dtype,
    requests: int,
    *,
    has_bias: bool = True,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> StepCase:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(requests + sizes.conv_dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(wide)

    weights = StepWeights(
        conv_weight=normal(sizes.conv_dim, sizes.width),
        conv_bias=normal(sizes.conv_dim) if has_bias else None,
        A=-normal(sizes.heads).exp(),
        D=normal(sizes.heads),
        dt_bias=normal(sizes.heads),
        dt_limit=limits,
    )
    conv_states = normal(SLOTS, sizes.conv_dim, sizes.width - 1).to(dtype)
    ssm_states = normal(SLOTS, sizes.heads, sizes.head_dim, sizes.state)
    projected = normal(requests, sizes.conv_dim + sizes.heads).to(dtype)
    return StepCase(projected, weights, conv_states, ssm_states, sizes)


def assert_alike(
    found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    (y, conv, ssm), (exact_y, exact_conv, exact_ssm) = found, expected
    assert y.dtype is dtype
    assert torch.equal(conv, exact_conv)
    scale = exact_y.double().abs().max()
    assert (y.double() - exact_y.double()).abs().max() <= BOUNDS[dtype] * scale
    # A sum that another order rounds to the other side changes x, B or C by a bfloat16's last bit.
    close = 1e-12 if ssm.dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(ssm, exact_ssm, rtol=close, atol=close)


def parts_of_a_card(
    mixed: Tensor,
    dt: Tensor,
    weights: StepWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """Kernels with dt computed by torch between them. Like the fused ones, the interpreter cuts
    their results where the compiler rounds to bfloat16."""
    taps = weights.conv_weight, weights.conv_bias
    convolved = causal_conv_decode_triton(mixed, conv_states, *taps, slots, into)
    given = state_inputs(convolved, weights.time_steps(dt), weights, ssm_states)
    return selective_state_update_triton(*given, slots, into)


PARTS = [
    pytest.param(mamba_step_compiled, mamba_step_reference, id="processor"),
    pytest.param(mamba_step_triton, parts_of_a_card, id="card"),
]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("run", "parts"), PARTS)
def test_it_is_its_parts(
    run: Callable[..., Tensor],
    parts: Callable[..., Tensor],
    sizes: MixerSizes,
    dtype: torch.dtype,
    requests: int,
    has_bias: bool,
    device: torch.device,
) -> None:
    case = drawn(sizes, dtype, requests, has_bias=has_bias)
    slots = torch.tensor([5, 0, 3, 6])[:requests]
    place = device if run is mamba_step_triton else CPU
    assert_alike(case.run(run, slots, slots, place), case.run(parts, slots, slots, place), dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_states_go_elsewhere_are_cleared_or_not_kept(dtype: torch.dtype) -> None:
    case = drawn(MixerSizes(4, 8, 2, 16, 4), dtype, 4)
    slots, into = torch.tensor([5, -1, 3, -1]), torch.tensor([1, 2, -1, -1])
    found = case.run(mamba_step, slots, into)
    assert_alike(found, case.run(mamba_step_reference, slots, into), dtype)
    for state, before in zip(found[1:], (case.conv_states, case.ssm_states), strict=True):
        assert torch.equal(state[[0, 3, 4, 5, 6]], before[[0, 3, 4, 5, 6]])
        assert not torch.equal(state[[1, 2]], before[[1, 2]])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_request_has_the_same_bits_in_every_batch_and_into_any_slot(dtype: torch.dtype) -> None:
    case = drawn(MixerSizes(4, 8, 2, 16, 4), dtype, 3)
    slots = torch.tensor([5, 0, 3])
    y, _, ssm = case.run(mamba_step, slots, slots)
    for i in range(3):
        own = StepCase(
            case.projected[i : i + 1], case.weights, case.conv_states, case.ssm_states, case.sizes
        )
        one, _, kept = own.run(mamba_step, slots[i : i + 1], torch.tensor([6]))
        assert torch.equal(one[0], y[i])
        assert torch.equal(kept[6], ssm[slots[i]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("run", [mamba_step, mamba_step_triton])
def test_time_steps_are_bounded_and_large_ones_are_themselves(
    run: Callable[..., Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    place = device if run is mamba_step_triton else CPU
    sizes, slots = MixerSizes(4, 8, 2, 16, 4), torch.tensor([1])
    for limits in ((0.0, float("inf")), (0.001, 0.1), (0.5, 0.6), (1.0, 30.0)):
        case = drawn(sizes, dtype, 1, limits=limits)
        case.projected[0, sizes.conv_dim :] = torch.tensor([-90.0, 0.0, 19.5, 45.0])
        found = case.run(run, slots, slots, place)
        assert_alike(found, case.run(mamba_step_reference, slots, slots), dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("run", [mamba_step, mamba_step_triton])
def test_not_a_number_stays_in_its_head(
    run: Callable[..., Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    place = device if run is mamba_step_triton else CPU
    sizes, slots = MixerSizes(4, 8, 2, 16, 4), torch.tensor([1])
    case = drawn(sizes, dtype, 1, limits=(0.0, 1.0))
    case.projected[0, sizes.conv_dim + 2] = torch.nan
    y, _, ssm = case.run(run, slots, slots, place)
    assert y.isnan().all(-1).tolist() == [[False, False, True, False]]
    assert ssm[1].isnan().flatten(1).all(-1).tolist() == [False, False, True, False]
    assert not y[0, [0, 1, 3]].isnan().any()


def test_on_a_card_dt_is_computed_where_the_state_is_updated() -> None:
    """A launcher asks for the card first: whatever the processor's loop could take as well."""
    launched = []

    def noted(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: launched.append(kernel)

    case, slots = drawn(MixerSizes(4, 8, 2, 16, 4), torch.float32, 2), torch.tensor([5, 0])
    with (
        patch.object(Tensor, "is_cuda", True, create=True),
        patch.object(Kernel, "__getitem__", noted),
    ):
        case.run(mamba_step, slots, slots)
    assert launched == [_causal_conv_decode_kernel, _selective_state_update_kernel]
