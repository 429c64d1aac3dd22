"""A token's row is written to the page and offset of its position, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ferryman_kernels.attention.latent_pages import (
    places_of,
    write_latents,
    write_latents_reference,
    write_latents_triton,
)

TABLE = torch.tensor([[3, 0, 5], [2, 7, -1]])
ROWS = torch.tensor([0, 0, 0, 1, 1])
POSITIONS = torch.tensor([3, 4, 11, 0, 7])
CPU = torch.device("cpu")
every_way = pytest.mark.parametrize(
    "run", [write_latents, write_latents_reference, write_latents_triton]
)


def _view(slab: Tensor, dtype: torch.dtype) -> Tensor:
    """A section of a slot: [slots, page_size 4, dim 12]."""
    return slab.view(dtype)[:, 32 : 32 + 48].view(-1, 4, 12)


@every_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_is_written_where_its_page_says(
    run: Callable[..., None], dtype: torch.dtype, device: torch.device
) -> None:
    place = device if run is write_latents_triton else CPU
    slab = torch.randint(0, 100, (9, 128 * dtype.itemsize), dtype=torch.uint8)
    wide = torch.randn(5, 20).to(dtype)
    expected = slab.clone()
    for token, (row, position) in enumerate(zip(ROWS, POSITIONS, strict=True)):
        _view(expected, dtype)[TABLE[row, position // 4], position % 4] = wide[token, :12]
    written = slab.to(place, copy=True)
    tables = (TABLE.to(place), ROWS.to(place), POSITIONS.to(place))
    run(_view(written, dtype), wide.to(place)[:, :12], *tables)
    assert torch.equal(written.cpu(), expected)


@every_way
def test_a_position_without_a_page_is_written_nowhere(
    run: Callable[..., None], device: torch.device
) -> None:
    place = device if run is write_latents_triton else CPU
    slab = torch.zeros(9, 512, dtype=torch.uint8, device=place)
    where = (TABLE.to(place), torch.tensor([1], device=place), torch.tensor([9], device=place))
    run(_view(slab, torch.float32), torch.ones(1, 12, device=place), *where)
    assert not slab.any()


def test_a_place_is_slot_and_offset_and_nobody_without_a_page_has_one() -> None:
    positions = torch.tensor([[0, 5, 11, -1], [3, 4, 9, -1]])
    places = places_of(positions, TABLE, torch.tensor([0, 1]), page_size=4)
    assert places.tolist() == [[3 * 4, 0 * 4 + 1, 5 * 4 + 3, -1], [2 * 4 + 3, 7 * 4, -1, -1]]
