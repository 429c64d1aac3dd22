"""int8 products: a token's bits at every place of every batch, in each way to multiply."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_packed_product import cancel, threads_of_torch
from torch import Tensor

from ferryman_kernels.cpu._lanes import HAS_DOTS
from ferryman_kernels.cpu._tiles import has_tiles
from ferryman_kernels.products import _int8_quads_compiled
from ferryman_kernels.products.int8_product import (
    int8_panel_product,
    int8_quad_product,
    panels_of_codes,
    quads_of_codes,
)
from ferryman_kernels.products.packed_product import reads_panels

pytestmark = pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")

CPU = torch.device("cpu")
WAYS = ["float32", "widened", *["dots"] * HAS_DOTS, *["tiles"] * has_tiles()]
TINY = 2.0**-118
"""Of so small numbers most products are normal, and most of what cancels is not."""


def packed(way: str, codes: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The product of x with `codes` and scales."""
    if way == "tiles":
        panels = panels_of_codes(codes, CPU)
        return lambda x, scales: int8_panel_product(x, panels, scales)
    quads = quads_of_codes(codes, CPU)
    return lambda x, scales: int8_quad_product(x, quads, scales)


@settings(max_examples=40, deadline=None)
@given(
    way=st.sampled_from(WAYS),
    out_dim=st.integers(1, 150),
    quads=st.integers(1, 100),
    tokens=st.integers(1, 300),
    size=st.sampled_from([1.0, TINY]),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_token_has_the_same_bits_at_every_place_of_every_batch(
    way: str,
    out_dim: int,
    quads: int,
    tokens: int,
    size: float,
    threads: int,
    data: st.DataObject,
) -> None:
    dtype = torch.float32 if way == "float32" else torch.bfloat16
    generator = torch.Generator().manual_seed(tokens * out_dim + quads)
    x = (size * torch.randn(tokens, 4 * quads, generator=generator)).to(dtype)
    codes = torch.randint(-127, 128, (out_dim, 4 * quads), generator=generator).to(torch.int8)
    cancel(x, codes)
    scales = torch.rand(out_dim, generator=generator).to(dtype) / size
    with pytest.MonkeyPatch.context() as patch, threads_of_torch(threads):
        patch.setattr(_int8_quads_compiled, "HAS_DOTS", way == "dots")
        product = packed(way, codes)
        whole = product(x, scales)
        places = data.draw(st.sets(st.integers(0, tokens - 1), min_size=1, max_size=40))
        for place in places:
            assert torch.equal(product(x[place : place + 1], scales)[0], whole[place])
        first = data.draw(st.integers(0, tokens - 1))
        count = data.draw(st.integers(1, tokens - first))
        part = slice(first, first + count)
        assert torch.equal(product(x[part], scales), whole[part])
