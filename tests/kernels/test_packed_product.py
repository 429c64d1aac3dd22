"""The loops over a weight in panels against float64, and their bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ferryman_kernels.cpu import _compiled
from ferryman_kernels.cpu._lanes import HAS_DOTS
from ferryman_kernels.cpu._tiles import has_tiles
from ferryman_kernels.cpu.launches import (
    RecordedLaunch,
    launches_told_to,
    loops_for_many_tokens,
)
from ferryman_kernels.products import _packed_product_compiled
from ferryman_kernels.products._tiled_product_compiled import tiled_loop
from ferryman_kernels.products.packed_product import (
    pack_panels,
    packed_grouped_product,
    packed_product,
    packed_product_reference,
    panel_rows,
    reads_panels,
    stack_panels,
)

pytestmark = pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")

BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8}
"""Of the largest output: sums of 1,500 float32 products; half in the last place of a bfloat16."""
SHAPES = [(3, 16), (64, 32), (65, 33), (100, 70), (131, 1500), (300, 700)]


WAYS = ["widened", *["dots"] * HAS_DOTS, *["tiles"] * has_tiles()]
"""The ways to multiply bfloat16 that this processor has; float32 has one."""


@contextmanager
def multiplied_by(way: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_packed_product_compiled, "HAS_DOTS", way == "dots")
        patch.setattr(_packed_product_compiled, "has_tiles", lambda: way == "tiles")
        yield


@pytest.fixture(params=WAYS)
def multiplied(request: pytest.FixtureRequest) -> Iterator[None]:
    with multiplied_by(request.param):
        yield


def drawn(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, the weight and its bias; x is a part of something wider."""
    generator = torch.Generator().manual_seed(tokens * shape[0] + shape[1])
    out_dim, in_dim = shape
    x = torch.randn(tokens, 2 * in_dim, generator=generator).to(dtype)[:, in_dim:]
    weight = torch.randn(out_dim, in_dim, generator=generator).to(dtype)
    return x, weight, torch.randn(out_dim, generator=generator).to(dtype)


def cancel(x: Tensor, weight: Tensor) -> None:
    """Gives the second half of the inputs the products of the first with the other sign. So
    roundings alone are left of a sum: another order has other bits, in bfloat16 too."""
    half = x.shape[1] // 2
    x[:, half : 2 * half] = x[:, :half]
    weight[..., half : 2 * half] = -weight[..., :half]
    weight[..., 2 * half :] = 0


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 13, 32, 200])
def test_it_is_the_product_and_the_bias(
    dtype: torch.dtype, shape: tuple[int, int], tokens: int
) -> None:
    x, weight, bias = drawn(shape, tokens, dtype)
    exact = packed_product_reference(x.double(), weight, bias)
    found = packed_product(x, pack_panels(weight), bias)
    assert found.dtype is dtype
    assert (found.double() - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max()


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(list(BOUNDS)),
    way=st.sampled_from(WAYS),
    shape=st.tuples(st.integers(1, 200), st.integers(1, 300)),
    tokens=st.integers(1, 300),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_token_has_the_same_bits_at_every_place_of_every_batch(
    dtype: torch.dtype,
    way: str,
    shape: tuple[int, int],
    tokens: int,
    threads: int,
    data: st.DataObject,
) -> None:
    x, weight, _ = drawn(shape, tokens, dtype)
    cancel(x, weight)
    own, bias = pack_panels(weight), torch.empty(0, dtype=dtype)
    with multiplied_by(way), threads_of_torch(threads):
        whole = packed_product(x, own, bias)
        alone = torch.cat([packed_product(token[None], own, bias) for token in x])
        assert torch.equal(whole, alone)
        first = data.draw(st.integers(0, tokens - 1))
        count = data.draw(st.integers(1, tokens - first))
        part = slice(first, first + count)
        assert torch.equal(packed_product(x[part], own, bias), alone[part])


@pytest.mark.skipif(not has_tiles(), reason="copies are for tiles")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [192, 207, 530])
@pytest.mark.parametrize("shape", [(256, 32), (300, 700), (600, 1500)], ids=str)
def test_many_tokens_have_the_bits_of_each_alone(
    shape: tuple[int, int], tokens: int, threads: int
) -> None:
    x, weight, bias = drawn(shape, tokens, torch.bfloat16)
    cancel(x, weight)
    own = pack_panels(weight)
    alone = torch.cat([packed_product(token[None], own, bias) for token in x])
    with threads_of_torch(threads):
        assert torch.equal(packed_product(x, own, bias), alone)


@pytest.mark.skipif(not has_tiles(), reason="copies are for tiles")
@pytest.mark.parametrize("tokens", [1, 17, 40])
def test_few_tokens_have_the_same_bits_by_the_loops_of_many(tokens: int) -> None:
    x, weight, bias = drawn((300, 700), tokens, torch.bfloat16)
    cancel(x, weight)
    own, ran = pack_panels(weight), list[RecordedLaunch]()
    few = packed_product(x, own, bias)
    with threads_of_torch(2), loops_for_many_tokens(), launches_told_to(ran.append):
        assert torch.equal(packed_product(x, own, bias), few)
    assert [launched.run for launched in ran] == [tiled_loop._on_all_threads]


@contextmanager
def threads_of_torch(threads: int) -> Iterator[None]:
    """The loops are shared by so many, however small they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_compiled, "WORTH_SHARING", 0)
            yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("tokens", [2, 20, 100])
def test_what_is_no_number_stays_in_its_token(dtype: torch.dtype, tokens: int) -> None:
    x, weight, bias = drawn((70, 50), tokens, dtype)
    own, clean = pack_panels(weight), x.clone()
    x[1, ::3], x[-1] = torch.nan, torch.inf
    found, expected = packed_product(x, own, bias), packed_product(clean, own, bias)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2:-1], expected[2:-1])
    assert found[1].isnan().all()


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_infinities_and_not_a_number_keep_their_meaning(dtype: torch.dtype) -> None:
    x = torch.ones(1, 32, dtype=dtype)
    x[0, 5] = torch.inf
    weight = torch.ones(4, 32, dtype=dtype)
    weight[0, 5], weight[1, 5], weight[2, 6] = 0, -3, torch.nan
    found = packed_product(x, pack_panels(weight), torch.empty(0, dtype=dtype))[0]
    assert found.isnan().tolist() == [True, False, True, False]
    assert found[[1, 3]].tolist() == [-torch.inf, torch.inf]


@pytest.mark.skipif(not HAS_DOTS, reason="this processor has no bfloat16 instructions")
def test_the_processors_dots_have_the_bits_of_widened_numbers() -> None:
    x, weight, bias = drawn((131, 1500), 5, torch.bfloat16)
    found = []
    for way in ("dots", "widened"):
        with multiplied_by(way):
            found.append(packed_product(x, pack_panels(weight), bias))
    assert torch.equal(*found)


@pytest.mark.usefixtures("multiplied")
def test_a_number_below_the_normal_ones_counts_as_itself_or_as_zero() -> None:
    weight, tiny = torch.ones(1, 32, dtype=torch.bfloat16), 2.0**-130
    x = torch.full((1, 32), tiny, dtype=torch.bfloat16)
    found = packed_product(x, pack_panels(weight), torch.empty(0, dtype=torch.bfloat16))
    assert found.item() in (0.0, 32 * tiny)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (64, 32), (100, 33)], ids=str)
def test_panels_have_the_weight_and_zeros_behind_it(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    _, weight, _ = drawn(shape, 1, dtype)
    panels = pack_panels(weight).panels
    unpacked = panels.transpose(1, 2).flatten(2).flatten(0, 1)
    assert torch.equal(unpacked[: shape[0], : shape[1]], weight)
    assert unpacked.count_nonzero() == weight.count_nonzero()
    assert panels.data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_weight_may_begin_at_any_number_of_its_memory(dtype: torch.dtype) -> None:
    memory = torch.arange(1 + 64 * 32).to(dtype)
    weight = memory[1:].view(64, 32)
    assert torch.equal(pack_panels(weight).panels, pack_panels(weight.clone()).panels)


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(65, 34), (100, 70)], ids=str)
@pytest.mark.parametrize(("rows", "per_row"), [(1, 1), (1, 3), (9, 2)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_grouped_product_is_each_row_times_its_chosen_experts(
    dtype: torch.dtype, shape: tuple[int, int], rows: int, per_row: int, has_bias: bool
) -> None:
    drawing = [drawn(shape, 1 + expert, dtype) for expert in range(5)]
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
    # Expert 3 is never chosen, and expert 1 by most.
    chosen = torch.tensor([[1, 0, 4], [2, 1, 0], [1, 4, 0]]).repeat(3, 1)[:rows, :per_row]
    biases = torch.stack([bias for *_, bias in drawing])
    stack = stack_panels(
        [pack_panels(weight) for _, weight, _ in drawing],
        biases if has_bias else torch.empty(1, 0, dtype=dtype),
    )
    found = packed_grouped_product(x, stack, chosen.contiguous())
    weights = torch.stack([weight for _, weight, _ in drawing]).double()[chosen]
    exact = torch.einsum("rkoi,ri->rko", weights, x.double()).flatten(0, 1)
    if has_bias:
        exact += biases.double()[chosen].flatten(0, 1)
    assert found.dtype is dtype
    assert (found.double() - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max()


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(list(BOUNDS)),
    way=st.sampled_from(WAYS),
    shape=st.tuples(st.integers(1, 140), st.integers(1, 100)),
    tokens=st.integers(1, 300),
    threads=st.integers(1, 3),
    busy=st.floats(0, 1),
)
def test_a_grouped_product_has_the_bits_of_each_expert_alone(
    dtype: torch.dtype,
    way: str,
    shape: tuple[int, int],
    tokens: int,
    threads: int,
    busy: float,
) -> None:
    """`busy` is the share of tokens that choose the same two of five experts."""
    generator = torch.Generator().manual_seed(tokens)
    x, _, _ = drawn(shape, tokens, dtype)
    weights = torch.randn(5, *shape, generator=generator).to(dtype)
    cancel(x, weights)
    biases = torch.zeros(5, shape[0], dtype=dtype)
    chosen = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(tokens)])
    chosen[torch.rand(tokens, generator=generator) < busy] = torch.tensor([3, 1])
    own = [pack_panels(weight) for weight in weights]
    with multiplied_by(way), threads_of_torch(threads):
        found = packed_grouped_product(x, stack_panels(own, biases), chosen)
        for expert in range(5):
            alone = packed_product(x, own[expert], biases[expert])
            rows, _ = (chosen == expert).nonzero(as_tuple=True)
            assert torch.equal(found.view(tokens, 2, -1)[chosen == expert], alone[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_dim", [1, 7, 48, 577])
def test_rows_of_panels_are_those_of_the_weight(dtype: torch.dtype, in_dim: int) -> None:
    weight = torch.randn(100, in_dim).to(dtype)
    rows = torch.tensor([0, 99, 64, 63, 5, 5])
    assert torch.equal(panel_rows(pack_panels(weight), rows), weight[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_no_panel_has_is_not_a_number(dtype: torch.dtype) -> None:
    weight = torch.randn(100, 48).to(dtype)
    numbers = panel_rows(pack_panels(weight), torch.tensor([-1, 7, 100]))
    assert numbers[[0, 2]].isnan().all()
    assert torch.equal(numbers[1], weight[7])
