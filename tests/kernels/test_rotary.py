"""Rotary embedding against complex rotation in float64."""

from __future__ import annotations

import cmath
from collections.abc import Callable

import pytest
import torch
from tests.kernels.like_a_card import on_a_card
from tests.kernels.oracles import assert_close
from torch import Tensor

from ferryman_kernels.elementwise.rotary import (
    apply_rotary,
    apply_rotary_reference,
    apply_rotary_triton,
    rotate_heads,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-2}


def _naive(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    out, half = x.double().clone(), len(inv_freq)
    for token, position in enumerate(positions.tolist()):
        for i, freq in enumerate(inv_freq.double().tolist()):
            turn = cmath.rect(scaling, position * freq)
            pair = torch.complex(x[token, :, i].double(), x[token, :, half + i].double()) * turn
            out[token, :, i], out[token, :, half + i] = pair.real, pair.imag
    return out


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("half", [16, 8, 5], ids=["whole", "half of the head", "odd part"])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize("run", [apply_rotary, apply_rotary_reference, apply_rotary_triton])
def test_pairs_turn_by_position_and_the_rest_stays(
    run: Callable[..., tuple[Tensor, Tensor]],
    scaling: float,
    half: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    place = device if run is apply_rotary_triton else torch.device("cpu")
    inv_freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    inv_freq = inv_freq if dtype == torch.float64 else inv_freq.float()
    positions = torch.tensor([0, 1, 7, 2, 900])
    heads = torch.randn(5, 8, 32).to(dtype)
    q, k = heads.to(place).split_with_sizes((6, 2), dim=1)
    turned = run(q, k, positions.to(place), inv_freq.to(place), scaling)
    for got, part in zip(turned, heads.split_with_sizes((6, 2), dim=1), strict=True):
        assert got.dtype == dtype
        expected = _naive(part, positions, inv_freq, scaling)
        torch.testing.assert_close(
            got.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        assert torch.equal(got.cpu()[..., 2 * half :], part[..., 2 * half :])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_heads_alone_turn_alike_and_back(dtype: torch.dtype) -> None:
    """On a card and elsewhere; frequencies of the other sign turn back."""
    inv_freq = 10000.0 ** (-torch.arange(5, dtype=torch.float64) / 5)
    inv_freq = inv_freq if dtype == torch.float64 else inv_freq.float()
    heads, positions = torch.randn(5, 3, 32).to(dtype), torch.tensor([0, 1, 7, 2, 900])
    expected = _naive(heads, positions, inv_freq, 1.3)
    turned = rotate_heads(heads, positions, inv_freq, 1.3)
    with on_a_card():
        on_card = rotate_heads(heads, positions, inv_freq, 1.3)
    back = rotate_heads(rotate_heads(heads, positions, inv_freq), positions, -inv_freq)
    for made, right in ((turned, expected), (on_card, expected), (back, heads)):
        assert made.dtype == dtype
        assert_close(made, right.double(), TOLERANCE[dtype])
