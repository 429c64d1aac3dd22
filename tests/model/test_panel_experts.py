"""Experts in panels and in codes on a CPU against float64, and their bits in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ferryman.model.layers.experts import (
    BlockProduct,
    ExpertMatrices,
    PanelProduct,
    RoutedExperts,
    SeparateExperts,
    ShareOfInput,
    ShareOfOutput,
    StackedExperts,
    Weighing,
    load_experts_for,
)
from ferryman.model.layers.mlp import GatedActivation
from ferryman.model.weights.matrix import PlainMatrix
from ferryman.model.weights.quantisation.gguf_matrix import GgufMatrix, gguf_matrix

EXPERTS, INNER, HIDDEN = 4, 224, 300
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


def drawn_parts(has_bias: bool) -> list[ExpertMatrices]:
    """Gate, up and down of each expert in float64."""
    generator = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int) -> PlainMatrix:
        drawn = torch.randn(rows, columns, generator=generator) / columns**0.5
        return PlainMatrix(drawn.bfloat16().double(), torch.float64, CPU)

    def bias(length: int) -> Tensor | None:
        return torch.randn(length, generator=generator).double() if has_bias else None

    return [
        ExpertMatrices(
            [matrix(INNER, HIDDEN), matrix(INNER, HIDDEN)],
            matrix(HIDDEN, INNER),
            bias(2 * INNER),
            bias(HIDDEN),
        )
        for _ in range(EXPERTS)
    ]


def made(parts: Sequence[ExpertMatrices], dtype: torch.dtype, weighing: Weighing) -> RoutedExperts:
    def cast(matrix: object) -> PlainMatrix:
        assert isinstance(matrix, PlainMatrix)
        return replace(matrix, dtype=dtype)

    def rounded(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(dtype)

    return load_experts_for(
        CPU,
        [
            ExpertMatrices(
                [cast(matrix) for matrix in part.first],
                cast(part.down),
                rounded(part.bias),
                rounded(part.down_bias),
            )
            for part in parts
        ],
        GatedActivation(),
        weighing,
    )


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("weighing", [ShareOfOutput(), ShareOfInput()], ids=["output", "input"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_any_tokens_have_the_sum_of_their_experts(
    dtype: torch.dtype, weighing: Weighing, has_bias: bool, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    shares = torch.rand(tokens, 2, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in hidden])
    parts = drawn_parts(has_bias)
    exact = made(parts, torch.float64, weighing)(hidden.double(), shares.double(), chosen)
    experts = made(parts, dtype, weighing)
    found = experts(hidden, shares, chosen)
    assert found.dtype is dtype
    assert (found.double() - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max()


def test_experts_that_are_not_packed_are_called_one_by_one() -> None:
    experts = made(drawn_parts(False), torch.float64, ShareOfOutput())
    assert isinstance(experts, SeparateExperts)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("weighing", [ShareOfOutput(), ShareOfInput()], ids=["output", "input"])
def test_a_token_has_the_same_bits_with_any_others(dtype: torch.dtype, weighing: Weighing) -> None:
    """However busy its experts are: 130 tokens of one are more than a slice of a product."""
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(150, HIDDEN, generator=generator).to(dtype)
    shares = torch.rand(150, 2, generator=generator).to(dtype)
    chosen = torch.tensor([[1, 3]]).repeat(150, 1)
    chosen[::7] = torch.tensor([2, 0])
    experts = made(drawn_parts(True), dtype, weighing)
    if not isinstance(experts, StackedExperts):
        pytest.skip("this processor has no AVX-512")
    whole = experts(hidden, shares, chosen)
    for first, count in ((0, 1), (7, 1), (149, 1), (3, 5), (20, 33), (1, 64), (10, 140)):
        part = slice(first, first + count)
        assert torch.equal(experts(hidden[part], shares[part], chosen[part]), whole[part])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_in_codes_are_multiplied_together(dtype: torch.dtype, tokens: int) -> None:
    """Weights in Q8_0: 32 codes behind a factor in float16."""
    generator = torch.Generator().manual_seed(tokens)

    def matrix(rows: int, columns: int) -> GgufMatrix:
        factors = (torch.rand(rows, columns // 32, 1, generator=generator) / 2000).half()
        codes = torch.randint(0, 256, (rows, columns // 32, 32), generator=generator).byte()
        blocks = torch.cat([factors.view(torch.uint8), codes], dim=2)
        return gguf_matrix("Q8_0", blocks, rows, columns, dtype=dtype, device=CPU)

    gate_up = [matrix(2 * INNER, 320) for _ in range(EXPERTS)]
    down = [matrix(320, INNER) for _ in range(EXPERTS)]
    parts = [ExpertMatrices([a], b) for a, b in zip(gate_up, down, strict=True)]
    experts = load_experts_for(CPU, parts, GatedActivation(), ShareOfOutput())
    if not isinstance(experts, StackedExperts):
        pytest.skip("this processor has no AVX-512")
    assert isinstance(experts.first, BlockProduct)
    assert isinstance(experts.down, BlockProduct)
    hidden = torch.randn(tokens, 320, generator=generator).to(dtype)
    shares = torch.rand(tokens, 2, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in hidden])
    plain = [
        ExpertMatrices(
            [PlainMatrix(a.dequantised().double(), torch.float64, CPU)],
            PlainMatrix(b.dequantised().double(), torch.float64, CPU),
        )
        for a, b in zip(gate_up, down, strict=True)
    ]
    exact = load_experts_for(CPU, plain, GatedActivation(), ShareOfOutput())
    expected = exact(hidden.double(), shares.double(), chosen)
    mixed = experts(hidden, shares, chosen)
    assert (mixed.double() - expected).abs().max() <= BOUNDS[dtype] * expected.abs().max()
    ones = [slice(token, token + 1) for token in range(tokens)]
    alone = torch.cat([experts(hidden[one], shares[one], chosen[one]) for one in ones])
    assert torch.equal(mixed, alone)


def test_a_bias_is_held_once() -> None:
    experts = made(drawn_parts(True), torch.bfloat16, ShareOfOutput())
    if not isinstance(experts, StackedExperts):
        pytest.skip("this processor has no AVX-512")
    assert isinstance(experts.first, PanelProduct)
    assert isinstance(experts.down, PanelProduct)
    assert experts.first.stack.biases.shape == (EXPERTS, 2 * INNER)
    assert experts.down.stack.biases.shape == (EXPERTS, HIDDEN)
