"""An adapter's summand of a row: the same bits among any other rows of any adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ferryman.model.shapes.batch import AdapterSegment
from ferryman.model.weights.adapted import ActiveSegments, AdaptedMatrix, LowRank
from ferryman.model.weights.matrix import PlainMatrix
from ferryman_kernels.products.packed_product import reads_panels

CPU = torch.device("cpu")


@pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [1, 8, 24])
def test_an_adapted_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, rank: int) -> None:
    """Both products cancel: what is left of a sum is the roundings on its way."""
    generator = torch.Generator().manual_seed(rank)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    down, up, active = drawn(rank, 200), drawn(90, rank), ActiveSegments()
    down = torch.cat([down, down], 1)
    parts = (LowRank(1, down, up), LowRank(2, torch.cat([down, down]), torch.cat([up, -up], 1)))
    zeros = PlainMatrix(torch.zeros(90, 400), dtype, CPU)
    linear = AdaptedMatrix(zeros, parts, active, dtype, CPU).linear(None)
    x = drawn(300, 200).to(dtype)
    x = torch.cat([x, -x], 1)
    adapters = torch.randint(0, 3, (300,), generator=generator)

    def product(first: int, count: int) -> Tensor:
        own = adapters[first : first + count]
        rows = ((number, (own == number).nonzero()[:, 0]) for number in (1, 2))
        segments = tuple(AdapterSegment(number, places) for number, places in rows)
        active.select(segments, count)
        return linear(x[first : first + count])

    whole = product(0, 300)
    assert whole.any()
    assert torch.equal(torch.cat([product(row, 1) for row in range(0, 300, 7)]), whole[::7])
    for first, count in ((3, 2), (5, 9), (1, 70), (120, 180)):
        assert torch.equal(product(first, count), whole[first : first + count])
