"""Rows of two pools as one list, so that attention to a list has one softmax over both.

    list of a token = its near rows, then its far rows, without gaps, then -1

Kernels read a row at an address: where its pool begins, plus a distance. Distances from the lower
pool reach the rows of the upper one as well, so a list over both is a list of places in pages of
one row, whose numbers are as far apart as all rows' distances allow. In float64, and without loops,
the list is of a copy of the rows.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman_kernels.attention.latent_attention import reads_addresses


class PlacedRows(NamedTuple):
    """Rows of some tokens: `pages` [slots, page_size, dim], and `places` [tokens, rows] in them,
    each token's first, then -1."""

    pages: Tensor
    places: Tensor


def joined_rows(near: PlacedRows, far: PlacedRows) -> PlacedRows:
    """The rows of both for attention: `latent_attention` reads them like those of one pool.

    The pages may be a view of one pool that reaches into the other: the caller keeps both alive
    until they are read.
    """
    assert near.pages.dtype == far.pages.dtype, (near.pages.dtype, far.pages.dtype)
    assert near.pages.shape[2] == far.pages.shape[2], (near.pages.shape, far.pages.shape)
    if not far.places.shape[1]:
        return near
    pools = near.pages, far.pages
    if not reads_addresses(near.pages):
        rows = [pages[at // pages.shape[1], at % pages.shape[1]] for pages, at in _read(near, far)]
        return _copied(torch.cat(rows, dim=1), _joined(*_numbered(near, far)))
    base = min(pools, key=Tensor.data_ptr)
    dim, size = base.shape[2], base.itemsize
    apart = [(pages.data_ptr() - base.data_ptr()) // size for pages in pools]
    unit = gcd(dim, *apart, *(pages.stride(0) for pages in pools))
    lists = [
        _distances(rows, distance, unit) for rows, distance in zip((near, far), apart, strict=True)
    ]
    one_row = base[:1, :1].as_strided((1, 1, dim), (unit, dim, 1))
    return PlacedRows(one_row, _joined(*lists))


def _distances(rows: PlacedRows, begin: int, unit: int) -> Tensor:
    """The begin of each row, behind `begin`, in units of so many numbers."""
    (_, page_size, dim), stride = rows.pages.shape, rows.pages.stride(0)
    assert rows.pages.stride()[1:] == (dim, 1), rows.pages.stride()
    pages = torch.div(rows.places, page_size, rounding_mode="floor")
    at = begin // unit + pages * (stride // unit) + rows.places % page_size * (dim // unit)
    return torch.where(rows.places >= 0, at, -1)


def _joined(near: Tensor, far: Tensor) -> Tensor:
    """Each token's numbers of `near` [tokens, rows], then those of `far`, then -1."""
    width = near.shape[1] + far.shape[1]
    numbers, count = torch.arange(width, device=near.device), (near >= 0).sum(1, keepdim=True)
    from_near = near.gather(1, numbers.clamp_max(near.shape[1] - 1).expand(len(near), -1))
    behind = numbers - count
    from_far = far.gather(1, behind.clamp(0, far.shape[1] - 1))
    from_far = torch.where(behind < far.shape[1], from_far, -1)
    return torch.where(numbers < count, from_near, from_far)


def _read(*lists: PlacedRows) -> list[tuple[Tensor, Tensor]]:
    """The pages of each, and places of which those without a row read the first one."""
    return [(rows.pages, rows.places.clamp_min(0)) for rows in lists]


def _numbered(near: PlacedRows, far: PlacedRows) -> tuple[Tensor, Tensor]:
    """The numbers of both lists' rows where all are copied side by side, token after token."""
    tokens, width = near.places.shape[0], near.places.shape[1] + far.places.shape[1]
    numbers = torch.arange(tokens * width, device=near.places.device).view(tokens, width)
    first, second = numbers.split_with_sizes((near.places.shape[1], far.places.shape[1]), dim=1)
    return (
        torch.where(near.places >= 0, first, -1),
        torch.where(far.places >= 0, second, -1),
    )


def _copied(rows: Tensor, places: Tensor) -> PlacedRows:
    return PlacedRows(rows.flatten(0, 1)[:, None], places)
