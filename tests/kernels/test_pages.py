"""Keys and values are written to the page and offset of their position, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ferryman_kernels.attention.pages import (
    gather_pages,
    scatter_pages,
    write_kv,
    write_kv_reference,
    write_kv_triton,
)

TABLE = torch.tensor([[3, 0, 5], [2, 7, -1]])
ROWS = torch.tensor([0, 0, 0, 1, 1])
POSITIONS = torch.tensor([3, 4, 11, 0, 7])


def _views(slab: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two sections of a slot, as views of one slab: [slots, kv_heads 3, page_size 4, dim 8]."""
    cells = slab.view(dtype)
    key = cells[:, 32 : 32 + 96].view(-1, 3, 4, 8)
    return key, cells[:, 128 : 128 + 96].view(-1, 3, 4, 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [write_kv, write_kv_reference, write_kv_triton])
def test_a_token_is_written_where_its_page_says(
    run: Callable[..., None], dtype: torch.dtype, device: torch.device
) -> None:
    place = device if run is write_kv_triton else torch.device("cpu")
    slab = torch.randint(0, 100, (9, 256 * dtype.itemsize), dtype=torch.uint8)
    heads = torch.randn(5, 6, 8).to(dtype)
    expected = slab.clone()
    for pages, part in zip(_views(expected, dtype), torch.split(heads, 3, dim=1), strict=True):
        for token, (row, position) in enumerate(zip(ROWS, POSITIONS, strict=True)):
            pages[TABLE[row, position // 4], :, position % 4] = part[token]
    written = slab.to(place, copy=True)
    keys, values = torch.split(heads.to(place), 3, dim=1)
    tables = (TABLE.to(place), ROWS.to(place), POSITIONS.to(place))
    run(*_views(written, dtype), keys, values, *tables)
    assert torch.equal(written.cpu(), expected)


@pytest.mark.parametrize("run", [write_kv, write_kv_reference, write_kv_triton])
def test_a_position_without_a_page_is_written_nowhere(
    run: Callable[..., None], device: torch.device
) -> None:
    place = device if run is write_kv_triton else torch.device("cpu")
    slab = torch.zeros(9, 1024, dtype=torch.uint8, device=place)
    heads = torch.ones(1, 3, 8, device=place)
    where = (TABLE.to(place), torch.tensor([1], device=place), torch.tensor([9], device=place))
    run(*_views(slab, torch.float32), heads, heads, *where)
    assert not slab.any()


def test_gathered_pages_scatter_back_bit_for_bit() -> None:
    slab = torch.randint(0, 256, (9, 192), dtype=torch.uint8)
    other, slots = torch.zeros_like(slab), torch.tensor([8, 0, 4])
    pages = gather_pages(slab, slots)
    assert torch.equal(pages, slab[[8, 0, 4]])
    scatter_pages(other, slots, pages)
    expected = torch.zeros_like(slab)
    expected[[8, 0, 4]] = slab[[8, 0, 4]]
    assert torch.equal(other, expected)
