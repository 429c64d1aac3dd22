"""The loops over weights in blocks against float64, and their bits in any batch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_packed_product import threads_of_torch
from torch import Tensor

from ferryman_kernels.cpu._lanes import HAS_DOTS
from ferryman_kernels.cpu._tiles import has_tiles
from ferryman_kernels.cpu.launches import loops_for_many_tokens
from ferryman_kernels.products import _packed_product_compiled
from ferryman_kernels.products.blocks import _block_product_compiled, block_product
from ferryman_kernels.products.blocks.block_product import (
    E4M3,
    FLOATS,
    HALVES,
    NO_CODES,
    POWERS,
    SIGNED,
    UNSIGNED,
    BlockForm,
    BlockPanels,
    BlockParts,
    block_product_reference,
    block_rows,
    decoded_panels,
    pack_blocks,
    panel_bytes,
)
from ferryman_kernels.products.packed_product import reads_panels

pytestmark = pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")

BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8}
TABLE = tuple(float(i * i - 40) for i in range(16))
FORMS = {
    "4 bits": BlockForm(4, 32, 1, False, NO_CODES, table=TABLE),
    "4 bits and shifts": BlockForm(4, 32, 1, True, NO_CODES, table=TABLE),
    "4 bits and powers": BlockForm(4, 32, 1, False, NO_CODES, POWERS, table=TABLE),
    "4 bits and scales in FP8": BlockForm(4, 16, 1, False, NO_CODES, E4M3, table=TABLE),
    "4 bits and shifts, scales in FP8": BlockForm(4, 32, 1, True, NO_CODES, E4M3, table=TABLE),
    "4 bits and scales in floats": BlockForm(4, 32, 2, False, NO_CODES, FLOATS, table=TABLE),
    "4 bits, scales in codes": BlockForm(4, 32, 8, True, UNSIGNED, table=TABLE),
    "4 bits, scales with signs": BlockForm(4, 32, 8, False, SIGNED, table=TABLE),
    "5 bits": BlockForm(5, 32, 1, False, NO_CODES, offset=16),
    "5 bits, scales in codes": BlockForm(5, 32, 2, True, UNSIGNED),
    "6 bits": BlockForm(6, 16, 16, False, SIGNED, offset=32),
    "6 bits and shifts": BlockForm(6, 32, 1, True, NO_CODES),
    "8 bits": BlockForm(8, 32, 1, False, NO_CODES),
}
SCALES = {
    HALVES: torch.float16,
    POWERS: torch.bfloat16,
    E4M3: torch.float8_e4m3fn,
    FLOATS: torch.float32,
}
WAYS = ["widened", *["dots"] * HAS_DOTS, *["tiles"] * has_tiles()]


@contextmanager
def multiplied_by(way: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (_packed_product_compiled, _block_product_compiled, block_product):
            patch.setattr(module, "has_tiles", lambda: way == "tiles", raising=False)
        for module in (_packed_product_compiled, _block_product_compiled):
            patch.setattr(module, "HAS_DOTS", way == "dots")
        yield


def drawn(form: BlockForm, rows: int, records: int) -> BlockParts:
    generator = torch.Generator().manual_seed(rows * records + form.bits)
    columns = records * form.groups * form.group_len

    def integers(end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=generator)

    def halves() -> Tensor:
        numbers = torch.randn(rows, records, generator=generator) * 0.05
        return numbers.to(torch.float16).view(torch.int16)

    def scales() -> Tensor:
        """Any number of their dtype: those of FP8 have all of its exponents."""
        match form.scales:
            case block_product.POWERS:
                return (integers(8, rows, records) + 118 << 7).to(torch.int16)
            case block_product.E4M3:
                return (integers(127, rows, records) + 128 * integers(2, rows, records)).byte()
            case block_product.FLOATS:
                return torch.randn(rows, records, generator=generator).view(torch.int32)
        return halves()

    has_codes = form.codes_of_scales != NO_CODES
    codes = [integers(256, rows, records * form.groups).to(torch.uint8) for _ in range(2)]
    return BlockParts(
        integers(1 << form.bits, rows, columns).to(torch.uint8),
        scales(),
        halves() if form.has_shift else None,
        codes[0] if has_codes else None,
        codes[1] if has_codes and form.has_shift else None,
    )


def exact(form: BlockForm, parts: BlockParts, factors: Tensor) -> Tensor:
    """The numbers of a weight by their formula, in float64."""
    if form.bits == 4:
        numbers = torch.tensor(form.table, dtype=torch.float64)[parts.codes.long()]
    elif form.bits == 8:
        numbers = parts.codes.view(torch.int8).double()
    else:
        numbers = parts.codes.double() - form.offset
    scales, shifts = parts.scales.view(SCALES[form.scales]).double(), None
    scales = scales.repeat_interleave(form.groups, 1)
    if parts.shifts is not None:
        shifts = parts.shifts.view(torch.float16).double().repeat_interleave(form.groups, 1)
    if parts.scale_codes is not None:
        kind = torch.int8 if form.codes_of_scales == SIGNED else torch.uint8
        scales = scales * parts.scale_codes.view(kind).double()
    if shifts is not None and parts.shift_codes is not None:
        shifts = shifts * parts.shift_codes.double()
    numbers = numbers * scales.repeat_interleave(form.group_len, 1)
    if shifts is not None:
        numbers = numbers + shifts.repeat_interleave(form.group_len, 1)
    return numbers * factors[:, None].double()


def packed(form: BlockForm, parts: BlockParts, dtype: torch.dtype, factors: Tensor) -> BlockPanels:
    rows, columns = parts.codes.shape
    content = pack_blocks(parts, form, dtype)
    assert content.shape[1] == panel_bytes(form, columns)
    every = torch.zeros(len(content) * 64)
    every[:rows] = factors
    table = torch.tensor(form.table or TABLE)
    return BlockPanels(content, every, table, form, rows, columns, dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_it_is_the_product_and_the_bias(name: str, dtype: torch.dtype, way: str) -> None:
    form, rows = FORMS[name], 70
    parts = drawn(form, rows, 3 * 16 // form.groups)
    factors = torch.rand(rows) + 0.5
    weight = packed(form, parts, dtype, factors)
    numbers = exact(form, parts, factors).to(dtype)
    for tokens in (1, 3, 17, 200):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, 2 * weight.in_dim, generator=generator).to(dtype)[
            :, weight.in_dim :
        ]
        bias = torch.randn(rows, generator=generator).to(dtype)
        with multiplied_by(way):
            product = block_product.block_product(x, weight, bias)
        expected = block_product_reference(x.double(), numbers, bias)
        assert product.dtype is dtype
        assert (product.double() - expected).abs().max() <= BOUNDS[dtype] * expected.abs().max()


NOTHING = """
import torch
from tests.kernels.test_block_product import FORMS, drawn, packed
from ferryman_kernels.products.blocks.block_product import block_product
form, dtype = FORMS["4 bits"], getattr(torch, {dtype!r})
weight = packed(form, drawn(form, 64, 2), dtype, torch.ones(64))
x, bias = torch.empty(0, weight.in_dim, dtype=dtype), torch.empty(0, dtype=dtype)
print(tuple(block_product(x, weight, bias).shape))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_tokens_have_no_products(dtype: str) -> None:
    """As the head has them after a chunk that is not the last of its prompt. Tiles that are not
    configured end the process."""
    command = [sys.executable, "-c", NOTHING.format(dtype=dtype)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "(0, 64)\n"), ended.stderr


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_a_number_is_rounded_once_to_float32_and_once_to_the_dtype(
    name: str, dtype: torch.dtype
) -> None:
    form = FORMS[name]
    parts = drawn(form, 100, 2)
    ones = torch.ones(100)
    decoded = decoded_panels(packed(form, parts, dtype, ones), 0, 2)
    by_output = decoded.transpose(1, 2).flatten(2).flatten(0, 1)[:100]
    assert torch.equal(by_output, exact(form, parts, ones).float().to(dtype))


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(list(FORMS)),
    dtype=st.sampled_from(list(BOUNDS)),
    way=st.sampled_from(WAYS),
    rows=st.integers(1, 300),
    tokens=st.integers(1, 300),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_token_has_the_same_bits_at_every_place_of_every_batch(
    name: str, dtype: torch.dtype, way: str, rows: int, tokens: int, threads: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    form = FORMS[name]
    parts, ones = drawn(form, rows, 2 * 16 // form.groups), torch.ones(rows)
    half = parts.codes.shape[1] // 2
    repeat_half(parts)
    weight, bias = packed(form, parts, dtype, ones), torch.empty(0, dtype=dtype)
    x = torch.randn(tokens, 2 * half, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    # The second half of the sum takes the first one away, so roundings alone are left: another
    # order has other bits, in bfloat16 too.
    x[:, half:] = -x[:, :half]
    with multiplied_by(way), threads_of_torch(threads):
        product = block_product.block_product
        whole = product(x, weight, bias)
        alone = torch.cat([product(token[None], weight, bias) for token in x])
        assert torch.equal(whole, alone)
        first = data.draw(st.integers(0, tokens - 1))
        part = slice(first, first + data.draw(st.integers(1, tokens - first)))
        assert torch.equal(product(x[part], weight, bias), alone[part])


def repeat_half(parts: BlockParts) -> None:
    """Gives the second half of the inputs the numbers of the first one."""
    for numbers in (
        parts.codes, parts.scales, parts.shifts, parts.scale_codes, parts.shift_codes,
    ):  # fmt: skip
        if numbers is not None:
            half = numbers.shape[1] // 2
            numbers[:, half:] = numbers[:, :half]


@pytest.mark.skipif(not has_tiles(), reason="copies are for tiles")
@pytest.mark.parametrize("name", FORMS)
def test_many_tokens_have_the_bits_of_each_alone(name: str) -> None:
    form = FORMS[name]
    rows = 600
    parts, bias = drawn(form, rows, 32 // form.groups), torch.randn(rows).to(torch.bfloat16)
    weight = packed(form, parts, torch.bfloat16, torch.ones(rows))
    x = torch.randn(207, weight.in_dim).to(torch.bfloat16)
    product = block_product.block_product
    alone = torch.cat([product(token[None], weight, bias) for token in x])
    assert torch.equal(product(x, weight, bias), alone)
    with loops_for_many_tokens():
        assert torch.equal(product(x[:17], weight, bias), alone[:17])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("tokens", [2, 20])
def test_what_is_no_number_stays_in_its_token(dtype: torch.dtype, tokens: int) -> None:
    form = FORMS["6 bits"]
    weight = packed(form, drawn(form, 70, 2), dtype, torch.ones(70))
    bias, x = torch.empty(0, dtype=dtype), torch.randn(tokens, weight.in_dim).to(dtype)
    clean = x.clone()
    x[1, ::3] = torch.nan
    product = block_product.block_product
    assert torch.equal(product(x, weight, bias)[0], product(clean, weight, bias)[0])
    assert product(x, weight, bias)[1].isnan().all()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", ["4 bits and shifts", "8 bits"])
def test_rows_are_those_of_decoded_panels(name: str, dtype: torch.dtype) -> None:
    form = FORMS[name]
    weight = packed(form, drawn(form, 100, 2), dtype, torch.rand(100) + 0.5)
    rows = torch.tensor([0, 99, 64, 63, 5, 5])
    decoded = decoded_panels(weight, 0, 2).transpose(1, 2).flatten(2).flatten(0, 1)
    assert torch.equal(block_rows(weight, rows), decoded[rows, : weight.in_dim])


def test_a_row_that_is_none_has_no_numbers() -> None:
    form = FORMS["8 bits"]
    weight = packed(form, drawn(form, 100, 2), torch.float32, torch.ones(100))
    numbers = block_rows(weight, torch.tensor([-1, 7, 100]))
    assert numbers[[0, 2]].isnan().all()
    assert torch.equal(numbers[1:2], block_rows(weight, torch.tensor([7])))
