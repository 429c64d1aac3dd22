"""The grouped product of every format, against float64 products of one pair at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman_kernels.products import _grouped_product_triton
from ferryman_kernels.products._grouped_product_triton import (
    grouped_codes_triton,
    grouped_floats_triton,
)
from ferryman_kernels.products.grouped_product import (
    FP4,
    FP8,
    INT4,
    INT8,
    CodeStack,
    FloatStack,
    grouped_product,
    sort_pairs,
)

TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 2e-2}


def triton_product(
    x: Tensor, stack: FloatStack | CodeStack, order: Tensor, starts: Tensor
) -> Tensor:
    if isinstance(stack, FloatStack):
        return grouped_floats_triton(x, stack.weight, stack.bias, order, starts)
    coded = stack.codes, stack.meaning
    scaled = stack.scales, stack.zeros, stack.groups, stack.group_len
    return grouped_codes_triton(x, coded, scaled, stack.bias, order, starts)


def numbers_of(stack: FloatStack | CodeStack) -> list[list[list[float]]]:
    """Every number, one at a time, from the meaning of its code."""
    if isinstance(stack, FloatStack):
        return stack.weight.double().tolist()
    experts, out_dim, in_dim = stack.shape
    return [
        [[_number(stack, e, i, j) for j in range(in_dim)] for i in range(out_dim)]
        for e in range(experts)
    ]


def _number(stack: CodeStack, expert: int, row: int, column: int) -> float:
    group = int(stack.groups[expert, column])
    scale = float(stack.scales[expert, row, group].float())
    zero = 0 if stack.zeros is None else int(stack.zeros[expert, row, group])
    if stack.meaning in (INT8, FP8):
        return (float(stack.codes[expert, row, column].float()) - zero) * scale
    byte = int(stack.codes[expert, row, column // 2])
    code = byte >> 4 if column % 2 else byte & 15
    if stack.meaning == INT4:
        return (code - 8 - zero) * scale
    size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code % 8]
    return (-size if code >= 8 else size) * scale


def pairwise(x: Tensor, stack: FloatStack | CodeStack, chosen: Tensor) -> Tensor:
    """The oracle: a float64 product for each pair."""
    numbers = torch.tensor(numbers_of(stack), dtype=torch.float64)
    per_row = chosen.numel() // len(x)
    rows = [
        numbers[expert] @ x[pair // per_row].double().cpu()
        + (0 if stack.bias is None else stack.bias[expert].double().cpu())
        for pair, expert in enumerate(chosen.flatten().tolist())
    ]
    return torch.stack(rows)


def assert_equals_pairwise(
    x: Tensor, stack: FloatStack | CodeStack, chosen: Tensor, experts: int
) -> None:
    right = pairwise(x, stack, chosen)
    order, starts = sort_pairs(chosen, experts)
    for product in (grouped_product, triton_product):
        found = product(x, stack, order, starts)
        assert found.dtype == x.dtype
        error = (found.cpu().double() - right).abs().max() / right.abs().max()
        assert float(error) < TOLERANCE[x.dtype], product


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("tokens", "per_token"), [(1, 3), (40, 2), (7, 1)])
def test_each_pair_is_multiplied_by_its_expert(
    tokens: int, per_token: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """With more pairs than a block holds, experts without a pair, and ends inside blocks."""
    experts, out_dim, in_dim = 5, 70, 150
    weight = torch.randn(experts, out_dim, in_dim, dtype=torch.float64).to(device, dtype)
    bias = torch.randn(experts, out_dim, dtype=torch.float64).to(device, dtype)
    stack = FloatStack(weight, bias if has_bias else None)
    chosen = torch.rand(tokens, experts - 1, device=device).topk(per_token).indices + 1
    shared = torch.randn(tokens, 2 * in_dim, dtype=torch.float64).to(device, dtype)[:, :in_dim]
    assert_equals_pairwise(shared, stack, chosen, experts)
    own = torch.randn(tokens * per_token, in_dim, dtype=torch.float64).to(device, dtype)
    assert_equals_pairwise(own, stack, chosen, experts)


def test_many_pairs_of_one_expert_fill_several_blocks(device: torch.device) -> None:
    stack = FloatStack(torch.randn(3, 8, 24, device=device).double(), None)
    chosen = torch.full((60, 1), 2, device=device)
    assert_equals_pairwise(torch.randn(60, 24, device=device).double(), stack, chosen, 3)


@pytest.mark.parametrize("shared_bytes", [227 << 10, 99 << 10], ids=["Hopper", "a smaller card"])
def test_most_pairs_of_few_experts_take_the_largest_blocks_that_fit(
    shared_bytes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_grouped_product_triton, "shared_bytes", lambda _: shared_bytes)
    stack = FloatStack(torch.randn(2, 70, 40, device=device).bfloat16(), None)
    chosen = (torch.arange(300, device=device) % 3 == 0).long()[:, None]
    x = torch.randn(300, 40, device=device).bfloat16()
    tiles = _grouped_product_triton._tiles_of(x, 300, 2)
    assert tiles.rows == (128 if shared_bytes > 200 << 10 else 64)
    assert_equals_pairwise(x, stack, chosen, 2)


def test_no_pairs_have_no_result(device: torch.device) -> None:
    stack = FloatStack(torch.randn(3, 8, 24, device=device).double(), None)
    order, starts = sort_pairs(torch.empty(0, 2, dtype=torch.int64, device=device), 3)
    assert triton_product(
        torch.randn(0, 24, device=device).double(), stack, order, starts
    ).shape == (0, 8)


def code_stack(name: str, in_dim: int) -> CodeStack:
    """Random codes of a format; `in_dim` may end inside a group."""
    experts, out_dim = 3, 20
    group_len = {"mxfp4": 32, "fp8 by block": 128, "int8 by row": in_dim}.get(name, 32)
    column_groups = torch.arange(in_dim) // group_len
    if name == "int4 in any order":
        column_groups = column_groups[torch.randperm(in_dim)]
        group_len = 0
    groups = column_groups.to(torch.int32).repeat(experts, 1)
    shape = experts, out_dim, int(column_groups.max()) + 1
    if name.startswith(("fp8", "int8")):
        codes = torch.randint(-127, 127, (experts, out_dim, in_dim), dtype=torch.int8)
        scales = (torch.rand(shape) + 0.5) / 64
        if name.startswith("int8"):
            return CodeStack(codes, INT8, scales, None, groups, group_len, None)
        # Every bit pattern but the two of not-a-number.
        bits = torch.where(codes == -1, 0, codes).view(torch.float8_e4m3fn)
        return CodeStack(bits, FP8, scales, None, groups, group_len, None)
    codes = torch.randint(0, 256, (experts, out_dim, in_dim // 2), dtype=torch.uint8)
    if name == "mxfp4":
        powers = torch.randint(120, 130, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return CodeStack(codes, FP4, powers, None, groups, group_len, torch.randn(experts, out_dim))
    zeros = torch.randint(-3, 4, shape, dtype=torch.int8)
    scales = (torch.rand(shape) + 0.5).bfloat16()
    return CodeStack(codes, INT4, scales, zeros, groups, group_len, None)


FORMATS = ["mxfp4", "fp8 by block", "int8 by row", "int4 with zeros", "int4 in any order"]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_multiplied_as_the_numbers_they_stand_for(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    stack = code_stack(name, in_dim=160)
    moved: dict[str, Any] = {name: getattr(stack, name) for name in stack.__slots__}
    moved |= {name: t.to(device) for name, t in moved.items() if isinstance(t, Tensor)}
    moved["bias"] = None if stack.bias is None else stack.bias.to(device, dtype)
    chosen = torch.rand(11, 3, device=device).topk(2).indices
    x = torch.randn(11, 160, dtype=torch.float64).to(device, dtype)
    assert_equals_pairwise(x, CodeStack(**moved), chosen, 3)


def test_the_least_power_of_two_is_a_scale(device: torch.device) -> None:
    """2^-127, which float32 has as a subnormal number alone."""
    codes = torch.full((1, 16, 16), 0x77, dtype=torch.uint8, device=device)
    least = torch.zeros(1, 16, 1, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    groups = torch.zeros(1, 32, dtype=torch.int32, device=device)
    stack = CodeStack(codes, FP4, least, None, groups, 32, None)
    x = torch.ones(2, 32, dtype=torch.float64, device=device)
    order, starts = sort_pairs(torch.zeros(2, 1, dtype=torch.int64, device=device), 1)
    right = torch.full((2, 16), 6.0 * 32 * 2.0**-127, dtype=torch.float64)
    assert torch.equal(triton_product(x, stack, order, starts).cpu(), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_each_code_of_four_bits_is_its_number(dtype: torch.dtype, device: torch.device) -> None:
    """E2M1, by a table: a row of 32 equal codes times a one and zeros, at a scale of 2."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers += [-number for number in numbers]
    codes = torch.arange(16, dtype=torch.uint8, device=device)[None, :, None]
    pairs = (codes << 4 | codes).expand(1, 16, 16).contiguous()
    powers = torch.full((1, 16, 1), 128, dtype=torch.uint8, device=device)
    groups = torch.zeros(1, 32, dtype=torch.int32, device=device)
    stack = CodeStack(pairs, FP4, powers.view(torch.float8_e8m0fnu), None, groups, 32, None)
    x = torch.eye(32, dtype=dtype, device=device)
    order, starts = sort_pairs(torch.zeros(32, 1, dtype=torch.int64, device=device), 1)
    product = triton_product(x, stack, order, starts).cpu().double()
    assert torch.equal(product, 2 * torch.tensor(numbers, dtype=torch.float64).expand(32, 16))
