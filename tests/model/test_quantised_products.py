"""Matrices of codes: cuts of any kind, and products, against numbers computed one by one."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from tests.kernels.int8_products import by_tiles
from torch import Tensor

from ferryman.model.weights.matrix import Matrix, join_linear
from ferryman.model.weights.quantisation import products, quantised_matrix
from ferryman.model.weights.quantisation.coded_panels import CodedPanelLinear
from ferryman.model.weights.quantisation.codes import FP4, INT4, ByteCodes, Codes, pack_nibbles
from ferryman.model.weights.quantisation.products import (
    WIDENED_FROM,
    Int4Linear,
    Int8Linear,
    Int8PackedLinear,
)
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, TiledLinear
from ferryman_kernels.products.int8_product import int8_panel_product, int8_quad_product
from ferryman_kernels.products.packed_product import reads_panels

CPU = torch.device("cpu")
KINDS = ("int8", "e4m3", "int4", "fp4")
TOLERANCES = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Of the largest number that comes out; a float32 is summed in the plain order of the inputs."""


@dataclass(frozen=True)
class CodedWeight:
    """A matrix, and each of its numbers in float64."""

    matrix: QuantisedMatrix
    meaning: Tensor


def drawn(
    kind: str,
    rows: int,
    columns: int,
    group: int,
    dtype: torch.dtype,
    *,
    has_zeros: bool = False,
    in_order: bool = True,
) -> CodedWeight:
    """Random codes, scales and zeros; groups of `group` columns, or in no order."""
    generator = torch.Generator().manual_seed(rows * columns + group)
    codes, numbers = _codes(kind, rows, columns, generator)
    groups = torch.arange(columns) // group
    if not in_order:
        groups = groups[torch.randperm(columns, generator=generator)]
    num_groups = int(groups.max()) + 1
    scales = torch.rand(rows, num_groups, generator=generator) + 0.1
    zeros = torch.randint(-7, 9, (rows, num_groups), generator=generator) if has_zeros else None
    meaning = torch.empty(rows, columns, dtype=torch.float64)
    for column, of_group in enumerate(groups.tolist()):
        zero = 0.0 if zeros is None else zeros[:, of_group].double()
        meaning[:, column] = (numbers[:, column] - zero) * scales[:, of_group].double()
    return CodedWeight(QuantisedMatrix(codes, scales, groups, zeros, dtype, CPU), meaning)


def _codes(kind: str, rows: int, columns: int, generator: torch.Generator) -> tuple[Codes, Tensor]:
    if kind == "int8":
        whole = torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8)
        return ByteCodes(whole), whole.double()
    if kind == "e4m3":
        eighth = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        return ByteCodes(eighth), eighth.double()
    table = INT4 if kind == "int4" else FP4
    nibbles = torch.randint(0, 16, (rows, columns), generator=generator)
    return pack_nibbles(nibbles, table), torch.tensor(table, dtype=torch.float64)[nibbles]


def test_every_byte_is_the_number_that_torch_says() -> None:
    """But for not-a-number, which no checkpoint may hold."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    eighths = codes.view(torch.float8_e4m3fn)[None]
    for dtype in TOLERANCES:
        assert torch.equal(ByteCodes(eighths).values(0, 1, dtype), eighths.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [12, 15])
@pytest.mark.parametrize("in_order", [True, False], ids=["groups in order", "in no order"])
def test_any_cut_is_that_cut_of_the_numbers(kind: str, columns: int, in_order: bool) -> None:
    whole = drawn(kind, 9, columns, 4, torch.float64, has_zeros=True, in_order=in_order)
    rng = random.Random(columns)
    matrix: Matrix = whole.matrix
    assert torch.equal(matrix.dequantised(), whole.meaning)
    for start in range(columns):
        length = rng.randint(1, columns - start)
        cut = matrix.narrow(1, start, length)
        assert cut.shape == (9, length)
        assert torch.equal(cut.dequantised(), whole.meaning[:, start : start + length])
        again = cut.narrow(0, 2, 5).narrow(1, length // 2, length - length // 2)
        assert torch.equal(again.dequantised(), cut.dequantised()[2:7, length // 2 :])
    order = torch.tensor([3, 3, 0, 8])
    assert torch.equal(matrix.with_rows(order).dequantised(), whole.meaning[order])
    joined = matrix.narrow(0, 4, 2).above([matrix.with_rows(order), matrix])
    expected = torch.cat([whole.meaning[4:6], whole.meaning[order], whole.meaning])
    assert torch.equal(joined.dequantised(), expected)
    factor = torch.arange(9, dtype=torch.float64)[:, None]
    assert torch.allclose(matrix.scaled(factor).dequantised(), whole.meaning * factor)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [
        (7, 5, 2),
        (32, 64, 32),
        (32, 64, 64),
        (40, 48, 48),
        (72, 64, 64),
        (48, 256, 128),
        (700, 700, 100),
    ],
)
@pytest.mark.parametrize("has_zeros", [True, False], ids=["zeros", "no zeros"])
@pytest.mark.parametrize("with_tiles", [True, False], ids=["tiles", "no tiles"])
def test_products_are_those_of_the_numbers(
    dtype: torch.dtype,
    kind: str,
    rows: int,
    columns: int,
    group: int,
    has_zeros: bool,
    with_tiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles, with bias, and torch's own products where they are taken; a batch row by row too."""
    monkeypatch.setattr(products, "has_tiles", lambda: with_tiles)
    whole = drawn(kind, rows, columns, group, dtype, has_zeros=has_zeros)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(rows, generator=generator).to(dtype)
    wide = torch.randn(11, 2 * columns, generator=generator).to(dtype)
    x = wide[:, columns:]
    with by_tiles() if with_tiles and dtype is torch.bfloat16 else nullcontext():
        found = join_linear([whole.matrix], bias)(x)
    exact = x.double() @ whole.meaning.T + bias.double()
    assert found.dtype is dtype
    assert float((found.double() - exact).abs().max() / exact.abs().max()) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("kind", "dims", "dtype", "chosen"),
    [
        pytest.param("int8", (40, 48, 48), torch.bfloat16, Int8Linear, id="int8"),
        pytest.param("int8", (40, 40, 40), torch.bfloat16, TiledLinear, id="odd columns"),
        pytest.param("int8", (40, 48, 24), torch.bfloat16, TiledLinear, id="int8 in groups"),
        pytest.param("int8", (40, 48, 48), torch.float32, Int8Linear, id="int8 and float32"),
        pytest.param("int8", (40, 48, 48), torch.float64, TiledLinear, id="int8 and float64"),
        pytest.param("int4", (32, 64, 32), torch.bfloat16, Int4Linear, id="int4"),
        pytest.param("int4", (40, 64, 32), torch.bfloat16, TiledLinear, id="odd rows"),
        pytest.param("int4", (32, 64, 16), torch.bfloat16, TiledLinear, id="short groups"),
        pytest.param("int4", (32, 64, 32), torch.float64, TiledLinear, id="int4 and float64"),
        pytest.param("fp4", (32, 64, 32), torch.bfloat16, TiledLinear, id="fp4"),
    ],
)
def test_a_product_of_torch_is_taken_where_it_is_right_and_fast(
    kind: str,
    dims: tuple[int, int, int],
    dtype: torch.dtype,
    chosen: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "has_tiles", lambda: False)
    for module in (products, quantised_matrix):
        monkeypatch.setattr(module, "reads_panels", lambda _: False)
    assert isinstance(drawn(kind, *dims, dtype).matrix.linear(None), chosen)


@pytest.mark.parametrize(
    ("dims", "dtype", "in_panels", "in_quads"),
    [
        pytest.param(
            (64, 48, 48), torch.bfloat16, int8_panel_product, int8_quad_product, id="wide"
        ),
        pytest.param(
            (1, 48, 48), torch.bfloat16, int8_panel_product, int8_quad_product, id="narrow"
        ),
        pytest.param(
            (64, 48, 24), torch.bfloat16, CodedPanelLinear, CodedPanelLinear, id="in groups"
        ),
        pytest.param(
            (64, 48, 48), torch.float32, int8_quad_product, int8_quad_product, id="float32"
        ),
        pytest.param((64, 48, 48), torch.float64, TiledLinear, TiledLinear, id="float64"),
    ],
)
def test_int8_is_multiplied_as_the_processor_does_it_best(
    dims: tuple[int, int, int],
    dtype: torch.dtype,
    in_panels: object,
    in_quads: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In panels where it multiplies tiles, in quads where it has vectors of 512 bits."""
    matrix = drawn("int8", *dims, dtype).matrix
    for module in (products, quantised_matrix):
        monkeypatch.setattr(module, "reads_panels", lambda dtype: dtype is not torch.float64)
    for has, chosen in ((True, in_panels), (False, in_quads)):
        monkeypatch.setattr(products, "has_tiles", lambda has=has: has)
        linear = matrix.linear(None)
        way = linear.product if isinstance(linear, Int8PackedLinear) else type(linear)
        assert way is chosen


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        # int8 has a loop for one token, and widens its codes from WIDENED_FROM tokens on.
        pytest.param("int8", (2, 5, 16, WIDENED_FROM - 1), id="int8"),
        pytest.param("int4", (1, 2, 5, 16, 33, 100, 292), id="int4"),
    ],
)
def test_a_row_of_torchs_product_does_not_depend_on_the_batch(
    kind: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "has_tiles", lambda: False)
    monkeypatch.setattr(products, "reads_panels", lambda _: False)
    matrix, x = mirrored(kind, 64, 128, 128 if kind == "int8" else 64, torch.bfloat16)
    if kind == "int8":
        matrix = replace(matrix, scales=matrix.scales[:, :1], groups=torch.zeros(256).long())
    linear = matrix.linear(None)
    assert isinstance(linear, Int8Linear | Int4Linear)
    whole = linear(x[: 7 + counts[-1]]) if kind == "int4" else linear(x[7 : 7 + counts[-1]])
    first = 7 if kind == "int4" else 0
    for count in counts:
        assert torch.equal(linear(x[7 : 7 + count]), whole[first : first + count])


@pytest.mark.usefixtures("threads_set_back")
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(16, 32, 32), (48, 96, 32), (176, 512, 128), (1040, 256, 256)]
)
def test_torchs_int4_gives_a_row_its_bits_alone_and_among_any_others(
    rows: int, columns: int, group: int
) -> None:
    """On any number of threads: torch promises it nowhere, so each processor is asked."""
    matrix, x = mirrored("int4", rows, columns, group, torch.bfloat16)
    linear = matrix.linear(None)
    assert isinstance(linear, Int4Linear)
    torch.set_num_threads(1)
    alone = torch.cat([linear(row[None]) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (*range(1, 36), 64, 100, 299):
            first = (7 * count) % (len(x) + 1 - count)
            part = slice(first, first + count)
            assert torch.equal(linear(x[part]), alone[part]), (threads, count)


@pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(7, 5, 2), (70, 64, 32), (1, 48, 48), (700, 350, 50)]
)
@pytest.mark.parametrize("in_order", [True, False], ids=["groups in order", "in no order"])
def test_a_row_of_a_product_does_not_depend_on_the_batch(
    dtype: torch.dtype, kind: str, rows: int, columns: int, group: int, in_order: bool
) -> None:
    matrix, x = mirrored(kind, rows, columns, group, dtype, in_order=in_order)
    linear = matrix.linear(None)
    whole = linear(x)
    assert whole.any()
    alone = torch.cat([linear(row[None]) for row in x[:: len(x) // 20]])
    assert torch.equal(alone, whole[:: len(x) // 20])
    for first, count in ((0, 2), (3, 5), (1, 33), (150, 150)):
        part = slice(first, first + count)
        assert torch.equal(linear(x[part]), whole[part])


def mirrored(
    kind: str, rows: int, columns: int, group: int, dtype: torch.dtype, *, in_order: bool = True
) -> tuple[QuantisedMatrix, Tensor]:
    """A matrix whose second half of columns is its first half, and 300 rows whose products with
    both cancel: what is left of a sum is the roundings on its way."""
    half = drawn(kind, rows, columns, group, dtype, in_order=in_order).matrix
    matrix = replace(
        half,
        codes=_twice(half.codes),
        scales=torch.cat([half.scales, half.scales], dim=1),
        groups=torch.cat([half.groups, half.groups + half.scales.shape[1]]),
    )
    x = torch.randn(300, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    return matrix, torch.cat([x, -x], dim=1)


def _twice(codes: Codes) -> Codes:
    return codes.arranged(lambda whole: torch.cat([whole, whole], dim=1))


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "widened"),
    [
        pytest.param(torch.bfloat16, True, (32, 512), id="bfloat16 instructions"),
        pytest.param(torch.bfloat16, False, (), id="bfloat16 without instructions"),
        pytest.param(torch.float32, False, (2, 31, 32, 512), id="float32, where torch has nothing"),
    ],
)
def test_a_products_way_follows_from_the_processor_and_the_tokens_alone(
    dtype: torch.dtype,
    has_bfloat16: bool,
    widened: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(products, "has_tiles", lambda: False)
    monkeypatch.setattr(products, "reads_panels", lambda _: False)
    linear = drawn("int8", 40, 48, 48, dtype).matrix.linear(None)
    assert isinstance(linear, Int8Linear)
    assert tuple(n for n in (2, 31, 32, 512) if n >= linear.widened_from) == widened


def test_parts_of_different_kinds_stand_side_by_side() -> None:
    """As where a tool quantised some of the parts of one product."""
    parts = [
        drawn("int8", 6, 10, 10, torch.float64),
        drawn("int8", 3, 10, 10, torch.float64),
        drawn("int4", 4, 10, 5, torch.float64),
        drawn("int4", 4, 10, 2, torch.float64),
    ]
    bias = torch.arange(17, dtype=torch.float64)
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = join_linear([part.matrix for part in parts], bias)(x)
    expected = x @ torch.cat([part.meaning for part in parts]).T + bias
    assert torch.allclose(found, expected, rtol=1e-13)
