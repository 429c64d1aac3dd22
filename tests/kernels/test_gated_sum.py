"""A gated output added to a sum in one launch: the bits of three operations, and float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ferryman_kernels.elementwise.gated_sum import add_gated_, add_gated_triton_

BOUNDS = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def rows(dtype: torch.dtype, device: torch.device, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, outputs and gates of five tokens; one gate is shut, and one is open."""
    total, y = (3 * torch.randn(2, 5, dim, dtype=torch.float64)).to(device, dtype)
    gate = torch.tensor([0.3, -50.0, 40.0, -1.7, 2.2], device=device, dtype=dtype)[:, None]
    return total, y, gate


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`. For bfloat16 the interpreter cuts off what a card rounds."""
    if dtype != torch.bfloat16 or x.is_cuda:
        return x.to(dtype)
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype)


def by_operations(total: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Sigmoid, product and sum one by one, each rounded; the sigmoid from float64."""
    dtype = total.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    share = narrowed(gate.double().sigmoid().to(wide), dtype)
    product = narrowed(y.to(wide) * share.to(wide), dtype)
    return narrowed(total.to(wide) + product.to(wide), dtype)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("dim", [20, 1024, 1300])
def test_one_launch_has_the_bits_of_three_operations(
    dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """In float64 a sigmoid has no wider one to be rounded from."""
    total, y, gate = rows(dtype, device, dim)
    expected, summed = by_operations(total, y, gate), total.clone()
    assert add_gated_triton_(summed, y, gate) is summed
    if dtype == torch.float64:
        torch.testing.assert_close(summed, expected, rtol=1e-15, atol=1e-15)
    else:
        assert torch.equal(summed, expected)


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_a_row_has_its_bits_alone(dtype: torch.dtype, device: torch.device) -> None:
    total, y, gate = rows(dtype, device, 1300)
    whole = add_gated_triton_(total.clone(), y, gate)
    for row in range(len(total)):
        part = slice(row, row + 1)
        assert torch.equal(
            add_gated_triton_(total[part].clone(), y[part], gate[part])[0], whole[row]
        )


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("run", [add_gated_, add_gated_triton_])
def test_a_sum_is_that_of_python_s_numbers(
    run: object, dtype: torch.dtype, device: torch.device
) -> None:
    total, y, gate = rows(dtype, device if run is add_gated_triton_ else torch.device("cpu"), 24)
    expected = [
        [t + v / (1 + math.exp(-g)) for t, v in zip(*both, strict=True)]
        for *both, (g,) in zip(total.tolist(), y.tolist(), gate.tolist(), strict=True)
    ]
    assert callable(run)
    summed = run(total, y, gate).double().cpu()
    bound = BOUNDS[dtype]
    wide = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(summed, wide, rtol=bound, atol=4 * bound)
