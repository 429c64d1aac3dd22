"""The product of a card in one order of sums: the order is the weight's, whoever takes it."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.one_kernel import noted_kernels
from tests.kernels.row_bits import drawn
from torch import Tensor

from ferryman_kernels.products import _dense_product_triton
from ferryman_kernels.products._dense_product_triton import (
    dense_product_triton,
    dense_tiles,
    large_dense_product,
    parts_of,
    small_dense_product,
    takes_large_tiles,
    tiles_agree,
)
from ferryman_kernels.products._grouped_product_triton import (
    ANY_CODES,
    ANY_ROWS,
    MANY,
    grouped_codes_triton,
    grouped_floats_triton,
    tiles_of_any,
)
from ferryman_kernels.products.dense_product import dense_product
from ferryman_kernels.products.grouped_product import INT8, sort_pairs
from ferryman_kernels.products.weighted_sum import weighted_sum, weighted_sum_triton

DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}
ROWS = 70
"""More than a tile has in any dtype."""


def weight_of(out_dim: int, in_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return drawn(out_dim, in_dim, dtype).to(device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("rows", "in_dim", "out_dim"), [(1, 150, 70), (67, 40, 130), (3, 64, 64)])
def test_it_is_the_product(
    rows: int, in_dim: int, out_dim: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = drawn(rows, in_dim, dtype).to(device), weight_of(out_dim, in_dim, dtype, device)
    bias = weight[:, 0].contiguous() if has_bias else None
    right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for product in (dense_product, dense_product_triton):
        found = product(x, weight, bias)
        assert found.dtype is dtype
        assert float((found.double() - right).abs().max() / right.abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_bits_of_itself_alone_in_any_company(
    dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = drawn(ROWS, 136, dtype).to(device), weight_of(72, 136, dtype, device)
    alone = torch.cat([dense_product_triton(row[None], weight, None) for row in x])
    assert torch.equal(dense_product_triton(x, weight, None), alone)
    for part in (slice(1, 4), slice(13, 30), slice(ROWS - 17, ROWS)):
        assert torch.equal(dense_product_triton(x[part], weight, None), alone[part])
    wider = torch.cat((x, x), dim=1)[:, 136:]
    assert torch.equal(dense_product_triton(wider, weight, None), alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_dim", [64, 136, 33])
def test_every_number_of_rows_takes_one_compiled_kernel(
    in_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = drawn(ROWS, in_dim, dtype).to(device), weight_of(48, in_dim, dtype, device)
    with noted_kernels() as compiled:
        for rows in (1, 2, 15, 16, 17, 32, ROWS):
            dense_product_triton(x[:rows], weight, None)
            dense_product_triton(x[ROWS - rows :], weight, None)
        dense_product_triton(torch.cat((x, x), dim=1)[:, :in_dim], weight, None)
    assert len(compiled) == 1, compiled


@pytest.mark.parametrize(
    ("dtype", "out_dim", "in_dim", "parts"),
    [
        (torch.bfloat16, 2048, 8192, 8),  # 32 tiles of 64 outputs
        (torch.bfloat16, 2048, 4096, 8),
        (torch.bfloat16, 3072, 2048, 4),  # parts of 512
        (torch.bfloat16, 3072, 2048 + 64, 1),  # parts of equal length only
        (torch.bfloat16, 8512, 2048, 1),  # 133 tiles fill the card
        (torch.bfloat16, 100_352, 2048, 1),
        (torch.float32, 2048, 8192, 1),
    ],
)
def test_a_weight_s_parts_follow_its_shape(
    dtype: torch.dtype, out_dim: int, in_dim: int, parts: int
) -> None:
    assert parts_of(dtype, out_dim, in_dim) == parts


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_parts_have_the_same_sum_whether_one_program_has_them_or_each_its_own(
    has_bias: bool, device: torch.device
) -> None:
    x, weight = (drawn(num, 1024, torch.bfloat16).to(device) for num in (64 * 70, 130))
    bias = weight[:, 0].contiguous() if has_bias else None
    assert parts_of(x.dtype, 130, 1024) == 2
    with noted_kernels() as kernels:
        few = small_dense_product(x[:3], weight, bias)
        assert {kernel[0] for kernel in kernels} == {"_dense_kernel", "_fold_parts_kernel"}
    with noted_kernels() as kernels:
        many = small_dense_product(x, weight, bias)
        assert {kernel[0] for kernel in kernels} == {"_dense_kernel"}
    assert torch.equal(many[:3], few)
    one_sum = small_dense_product(x[:3, :512], weight[:, :512].contiguous(), bias)
    assert not torch.equal(one_sum, few)


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("rows", "in_dim", "out_dim"), [(130, 1024, 192), (3, 40, 130)])
def test_large_tiles_give_the_product(
    rows: int, in_dim: int, out_dim: int, has_bias: bool, device: torch.device
) -> None:
    x, weight = (drawn(num, in_dim, torch.bfloat16).to(device) for num in (rows, out_dim))
    bias = weight[:, 0].contiguous() if has_bias else None
    right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = large_dense_product(x, weight, bias)
    assert float((found.double() - right).abs().max() / right.abs().max()) < 2e-2


def test_large_tiles_are_taken_of_many_rows_where_they_agree_with_small_ones(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = (torch.zeros(num, 64, dtype=torch.bfloat16, device=device) for num in (1537, 1024))
    answers = [False, True]
    monkeypatch.setattr(_dense_product_triton, "tiles_agree", lambda _: answers.pop(0))
    assert not takes_large_tiles(x[:128], weight)  # 8 tiles of 128 by 128
    assert not takes_large_tiles(x.float(), weight.float())
    assert not takes_large_tiles(x[:, :60], weight[:, :60].contiguous())  # 120 bytes a row
    assert len(answers) == 2, "nothing of these has to be asked"
    assert not takes_large_tiles(x, weight)
    assert takes_large_tiles(x, weight)


def test_tiles_that_add_in_another_order_do_not_agree(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sum of all parts, as a library's product has it, is seen by the question of a load."""
    tiles_agree.cache_clear()
    large = large_dense_product

    def in_one_sum(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        monkeypatch.setattr(_dense_product_triton, "_PART_LEN", 1 << 20)
        return large(x, weight, bias)

    monkeypatch.setattr(_dense_product_triton, "large_dense_product", in_one_sum)
    try:
        assert not tiles_agree(device)
    finally:
        tiles_agree.cache_clear()


@pytest.mark.parametrize(
    ("out_dim", "parts"), [(640, 4), (16_384, 1), (0, 0)], ids=["narrow", "wide", "none"]
)
def test_a_narrow_and_a_wide_weight_are_asked(
    out_dim: int, parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has small tiles of its own: one that differs is enough."""
    asked = {0: 0}

    def right(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked[len(weight)] = parts_of(x.dtype, *weight.shape)
        return x.float() @ weight.float().T

    def unlike_one(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = right(x, weight, bias)
        y[-1, -1] += len(weight) == out_dim
        return y

    monkeypatch.setattr(_dense_product_triton, "_descriptor", lambda: object)
    monkeypatch.setattr(_dense_product_triton, "small_dense_product", right)
    monkeypatch.setattr(_dense_product_triton, "large_dense_product", unlike_one)
    tiles_agree.cache_clear()
    try:
        assert tiles_agree(device) is (out_dim == 0)
    finally:
        tiles_agree.cache_clear()
    assert asked[out_dim] == parts


def test_tiles_that_follow_the_rows_are_caught(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: with other columns at once the sum has another order."""
    x, weight = (
        drawn(ROWS, 136, torch.float32).to(device),
        weight_of(72, 136, torch.float32, device),
    )
    alone = dense_product_triton(x[:1], weight, None)
    other = dense_tiles(torch.float32, 72)._replace(columns=16)
    monkeypatch.setattr(_dense_product_triton, "dense_tiles", lambda *_: other)
    with noted_kernels() as compiled:
        assert not torch.equal(dense_product_triton(x, weight, None)[:1], alone)
        monkeypatch.undo()
        dense_product_triton(x, weight, None)
    assert len(compiled) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pair_has_the_bits_of_itself_alone_however_busy_the_experts_are(
    dtype: torch.dtype, device: torch.device
) -> None:
    experts, tokens, in_dim = 3, MANY * 3 + 20, 40
    stack = drawn(experts * 72, in_dim, dtype).to(device).view(experts, 72, in_dim)
    codes = (stack * 7).round().clamp(-127, 127).to(torch.int8)
    scales = torch.full((experts, 72, 1), 0.125, dtype=dtype, device=device)
    scaled = scales, None, torch.zeros(experts, in_dim, dtype=torch.int32, device=device), in_dim
    x = drawn(tokens, in_dim, dtype).to(device)
    chosen = torch.tensor([0, 1, 1, 1, 1, 1, 1, 2], device=device).repeat(tokens)[:tokens, None]

    def floats(x: Tensor, chosen: Tensor) -> Tensor:
        tiles = tiles_of_any(x, ANY_ROWS)
        return grouped_floats_triton(x, stack, None, *sort_pairs(chosen, experts), tiles)

    def coded(x: Tensor, chosen: Tensor) -> Tensor:
        tiles, routed = tiles_of_any(x, ANY_CODES), sort_pairs(chosen, experts)
        return grouped_codes_triton(x, (codes, INT8), scaled, None, *routed, tiles)

    for product in (floats, coded):
        with noted_kernels() as compiled:
            alone = torch.cat([product(x[t : t + 1], chosen[t : t + 1]) for t in range(tokens)])
            assert torch.equal(product(x, chosen), alone)
        assert len(compiled) == 1, compiled


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_token_s_experts_are_added_in_their_order(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = drawn(5 * 3, 200, dtype).to(device).view(5, 3, 200)
    shares = drawn(5, 3, dtype).to(device)
    right = torch.einsum("tk,tkc->tc", shares.double(), x.double())
    found = weighted_sum_triton(x, shares)
    assert float((found.double() - right).abs().max() / right.abs().max()) < TOLERANCE[dtype]
    alone = torch.cat([weighted_sum_triton(x[t : t + 1], shares[t : t + 1]) for t in range(5)])
    assert torch.equal(found, alone)
    if dtype is torch.float32:  # the interpreter cuts bfloat16 where the loop rounds
        assert torch.equal(found.cpu(), weighted_sum(x.cpu(), shares.cpu()))
