"""Pages in slabs that are NaN elsewhere, and tables that name them in random order."""

from __future__ import annotations

import torch
from torch import Tensor

PAGE_SIZE = 8


def row_pages(dtype: torch.dtype, slots: int, dim: int) -> Tensor:
    """A strided view [slots, page_size, dim] of random rows; the memory beside it is NaN."""
    size = PAGE_SIZE * dim
    slab = torch.full((slots, 2 * size + 8), torch.nan, dtype=dtype)
    slab[:, 8 : 8 + size] = torch.randn(slots, size)
    return slab[:, 8 : 8 + size].view(slots, PAGE_SIZE, dim)


def table_of(ends: list[int], slots: int) -> Tensor:
    """Pages in random order for each request; entries beyond its end are -1."""
    order = torch.randperm(slots).tolist()
    used = [-(-end // PAGE_SIZE) for end in ends]
    rows = [[order.pop() for _ in range(n)] + [-1] * (max(used) - n) for n in used]
    return torch.tensor(rows)


def spoil_beyond(pages: Tensor, table: Tensor, ends: list[int]) -> None:
    """Fills the pages after each request's end with NaN: no kernel may read them."""
    for row, end in zip(table, ends, strict=True):
        if end % PAGE_SIZE:
            pages[row[end // PAGE_SIZE], end % PAGE_SIZE :] = torch.nan


def rows_of(pages: Tensor, table: Tensor, end: int) -> Tensor:
    """The rows [end, dim] of one request, in order, in float64."""
    return torch.stack([pages[table[p // PAGE_SIZE], p % PAGE_SIZE] for p in range(end)]).double()
