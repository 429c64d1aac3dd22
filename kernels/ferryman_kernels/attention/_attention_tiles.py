"""The tiles of paged attention in Triton: tables by dtype, width of a head, and kind of card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ferryman_kernels._triton import shared_bytes

T = TypeVar("T")


class PrefillTiles(NamedTuple):
    """The queries of one program of prefill, the keys of one step, its warps and stages of
    loads."""

    queries: int
    keys: int
    warps: int
    stages: int


class DecodeTiles(NamedTuple):
    """The keys of one step of a program of decode, its warps and stages of loads."""

    keys: int
    warps: int
    stages: int


# By the widest head. Timed on an H200 with tools/tune_kernels.py, but for heads of 512, which are
# chosen by registers, spills and shared memory as compiled for sm_90a.
_PREFILL_TILES = {
    64: PrefillTiles(128, 64, 8, 2),
    128: PrefillTiles(128, 128, 8, 2),
    256: PrefillTiles(64, 64, 8, 2),
    512: PrefillTiles(32, 16, 8, 3),
}
LARGE_TILES_BYTES = 160 * 1024
"""Shared memory of the largest of them; a card with less takes the next ones."""

_SMALL_PREFILL_TILES = {
    128: PrefillTiles(64, 64, 4, 3),
    256: PrefillTiles(64, 32, 8, 3),
    512: PrefillTiles(32, 16, 8, 3),
}
_DECODE_TILES = {
    128: DecodeTiles(64, 4, 2),
    256: DecodeTiles(32, 4, 2),
    512: DecodeTiles(16, 4, 3),
}
# float32 is multiplied without the card's matrix units, out of registers: larger tiles spill 19 kB.
_FLOAT32_PREFILL_TILES = {
    128: PrefillTiles(32, 32, 8, 3),
    256: PrefillTiles(16, 16, 8, 3),
    512: PrefillTiles(16, 32, 8, 3),
}
_FLOAT32_DECODE_TILES = DecodeTiles(16, 4, 3)


def prefill_tiles(q: Tensor, block_dim: int) -> PrefillTiles:
    """For queries whose heads are padded to `block_dim`, on their card."""
    if q.dtype != torch.bfloat16:
        return _tiles_for(block_dim, _FLOAT32_PREFILL_TILES)
    has_room = shared_bytes(q.device) >= LARGE_TILES_BYTES
    return _tiles_for(block_dim, _PREFILL_TILES if has_room else _SMALL_PREFILL_TILES)


def decode_tiles(q: Tensor, block_dim: int) -> DecodeTiles:
    """For queries whose heads are padded to `block_dim`."""
    if q.dtype != torch.bfloat16:
        return _FLOAT32_DECODE_TILES
    return _tiles_for(block_dim, _DECODE_TILES)


def _tiles_for(block_dim: int, table: Mapping[int, T]) -> T:
    return next(tiles for widest, tiles in table.items() if block_dim <= widest)
