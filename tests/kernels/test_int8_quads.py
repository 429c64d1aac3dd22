"""The int8 product over quads of codes against float64, and its infinities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.int8_products import (
    check_that_infinity_stays_in_its_token,
    drawn_beside_nan,
)
from tests.kernels.loop_versions import answers_of_one_thread_and_two
from torch import Tensor

from ferryman_kernels.cpu import _code_quads
from ferryman_kernels.cpu._compiled import numba
from ferryman_kernels.cpu._lanes import HAS_DOTS
from ferryman_kernels.products import _int8_quads_compiled
from ferryman_kernels.products.int8_product import (
    int8_quad_product,
    int8_quad_product_reference,
    quads_of_codes,
)
from ferryman_kernels.products.packed_product import reads_panels

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8}
"""Of the largest output: sums of 1,500 float32 products; half in the last place of a bfloat16."""
SHAPES = [(3, 16), (64, 32), (128, 48), (100, 80), (131, 1504)]
"""Outputs and inputs; three end within a panel, and two have several runs."""

needs_vectors = pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")


@pytest.fixture(params=[False, True], ids=["widened", "by the processor's dots"])
def multiplied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways to multiply pairs."""
    if request.param and not HAS_DOTS:
        pytest.skip("this processor has no bfloat16 instructions")
    monkeypatch.setattr(_int8_quads_compiled, "HAS_DOTS", request.param)


def product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return int8_quad_product(x, quads_of_codes(codes, CPU), scales)


def test_a_panel_has_the_codes_of_64_outputs_and_zeros_behind_them() -> None:
    codes = torch.arange(70 * 8).view(70, 8).to(torch.int8)
    quads = quads_of_codes(codes, CPU)
    assert quads.shape == (2, 2, 64, 4)
    for output in range(128):
        for i in range(8):
            expected = codes[output, i] if output < 70 else 0
            assert quads[output // 64, i // 4, output % 64, i % 4] == expected


def test_the_reference_is_the_formula() -> None:
    x = torch.tensor([[1.0, -2.0, 0.0, 0.0], [0.5, 3.0, 0.0, 1.0]])
    codes, scales = torch.tensor([[127, -128, 5, 2]], dtype=torch.int8), torch.tensor([0.25])
    found = int8_quad_product_reference(x, quads_of_codes(codes, CPU), scales)
    assert found.tolist() == [[95.75], [-79.625]]


@needs_vectors
@pytest.mark.parametrize("has_tables", [False, True])
def test_every_code_becomes_its_bfloat16(has_tables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_tables and not _code_quads.HAS_BYTE_TABLES:
        pytest.skip("the processor has no tables of bytes")
    monkeypatch.setattr(_code_quads, "HAS_BYTE_TABLES", has_tables)
    quads = torch.arange(-128, 128).to(torch.int8)
    pairs = torch.full((2, 64, 2), torch.nan, dtype=torch.bfloat16)
    # A function of its own for each way: the loops' cache has only the processor's.
    widen = numba.njit(lambda codes, pairs: _code_quads.widen_quads(np.uint16(0), codes, pairs))
    widen(quads.data_ptr(), pairs.data_ptr())
    assert torch.equal(pairs.float(), quads.view(64, 2, 2).transpose(0, 1).float())


@needs_vectors
def test_every_code_becomes_its_float32() -> None:
    quads = torch.arange(-128, 128).to(torch.int8)
    floats = torch.full((4, 64), torch.nan)
    widen = numba.njit(lambda codes, words: _code_quads.widen_quads(np.float32(0), codes, words))
    widen(quads.data_ptr(), floats.data_ptr())
    assert torch.equal(floats, quads.view(64, 4).T.float())


@needs_vectors
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 17, 33])
def test_it_is_the_product_with_the_numbers_that_the_codes_stand_for(
    tokens: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, codes, scales = drawn_beside_nan(tokens, shape, dtype)
    exact = (x.double() @ codes.double().T) * scales.double()
    found = product(x, codes, scales)
    assert found.dtype is dtype
    assert (found.double() - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max()


@needs_vectors
def test_more_tokens_than_sums_fit_a_cache_take_turns() -> None:
    rows = _int8_quads_compiled.MOST_ROWS
    x, codes, scales = drawn_beside_nan(rows + 7, (65, 80))
    whole = product(x, codes, scales)
    assert torch.equal(product(x[rows - 20 :], codes, scales), whole[rows - 20 :])
    exact = (x.double() @ codes.double().T) * scales.double()
    assert (whole.double() - exact).abs().max() <= BOUNDS[x.dtype] * exact.abs().max()


@needs_vectors
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_token_is_summed_before_it_is_rounded(tokens: int) -> None:
    """A sum in bfloat16 loses the 1 beside 130,048."""
    x = torch.tensor([[1024.0, 1.0, -1024.0, 0.0]], dtype=torch.bfloat16).repeat(tokens, 1)
    codes = torch.tensor([[127, 1, 127, 9]], dtype=torch.int8)
    assert product(x, codes, torch.ones(1, dtype=torch.bfloat16)).tolist() == [[1.0]] * tokens


@needs_vectors
@pytest.mark.skipif(not HAS_DOTS, reason="this processor has no bfloat16 instructions")
def test_the_processors_dots_have_the_bits_of_widened_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawing = drawn_beside_nan(9, (131, 1504))
    by_dots = product(*drawing)
    monkeypatch.setattr(_int8_quads_compiled, "HAS_DOTS", False)
    assert torch.equal(product(*drawing), by_dots)


@needs_vectors
def test_small_inputs_are_summed_beside_the_greatest() -> None:
    x = torch.full((1, 128), 2.0**-20, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    codes = torch.ones(2, 128, dtype=torch.int8)
    codes[1, 0] = 0
    found = product(x, codes, torch.ones(2, dtype=torch.bfloat16))
    assert found[0, 0] == 1.0
    assert abs(found[0, 1].item() - 127 * 2.0**-20) <= 127 * 2.0**-22


@needs_vectors
@pytest.mark.parametrize("row", [0.0, 2.0**-120, -(2.0**-126)], ids=["zeros", "tiny", "least"])
def test_rows_of_tiny_numbers_are_multiplied_all_the_same(row: float) -> None:
    x = torch.full((1, 72), row, dtype=torch.bfloat16)
    codes = torch.full((2, 72), -2, dtype=torch.int8)
    found = product(x, codes, torch.ones(2, dtype=torch.bfloat16))
    assert found.tolist() == [[-144 * row] * 2]


@needs_vectors
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_threads_read_every_input(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One input of each token counts; the greatest one has a code of 0."""
    x = torch.zeros(tokens, 4096, dtype=torch.bfloat16)
    codes = torch.zeros(128, 4096, dtype=torch.int8)
    for token in range(tokens):
        x[token, 5 * token], x[token, -1] = 1.5703125 * 2.0**-14, 1.9921875
        codes[:, 5 * token] = 1
    ones = torch.ones(128, dtype=torch.bfloat16)
    one, two = answers_of_one_thread_and_two(
        monkeypatch, _int8_quads_compiled._product_loop, lambda: product(x, codes, ones)
    )
    assert torch.equal(one, torch.full((tokens, 128), 1.5703125 * 2.0**-14).bfloat16())
    assert torch.equal(two, one)


@needs_vectors
def test_no_token_gives_no_row() -> None:
    x, codes, scales = drawn_beside_nan(1, (64, 32))
    assert product(x[:0], codes, scales).shape == (0, 64)


@needs_vectors
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("others", [1, 9])
@pytest.mark.parametrize("in_dim", [16, 32])
def test_infinity_and_not_a_number_stay_in_their_token(others: int, in_dim: int) -> None:
    check_that_infinity_stays_in_its_token(product, others, in_dim)
