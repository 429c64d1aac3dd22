"""A processor's tiles (AMX) in numpy: its instruction's arithmetic, and the parts that loops call.

The instruction multiplies 16 tokens by 16 outputs, of 16 pairs of bfloat16. Of a sum it adds the
first of each pair, then the second ones, then both to what was there; every sum is a float32, and a
number below the normal ones is zero (Intel's manual, TDPBF16PS). A product of two bfloat16 has 16
bits, so it is exact in float32, and adding it rounds once as the instruction does.

`on_tiles` has loops of Python run on these tiles: their order of blocks, runs, halves and pairs,
and their addresses, on any processor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LEAST_NORMAL = np.float32(2.0**-126)
LINE, ROWS = 64, 16
BLOCK, TILE = 2 * ROWS * LINE, ROWS * LINE


def normal(numbers: Floats) -> Floats:
    """The numbers, but zero for those below the normal ones."""
    return np.where(np.abs(numbers) < LEAST_NORMAL, np.float32(0), numbers)


def widened(halves: NDArray[np.uint16]) -> Floats:
    """The numbers that bfloat16 stand for."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def narrowed(numbers: Floats) -> NDArray[np.uint16]:
    """The bfloat16 nearest to each number, to the even one of two."""
    words = normal(numbers).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def sums_of_block(x: Floats, weight: Floats) -> Floats:
    """The sums that an instruction adds: x [tokens, 32] by weight [outputs, 32], in its order."""
    ends = []
    for side in range(2):
        total = np.zeros((len(x), len(weight)), np.float32)
        for pair in range(side, x.shape[1], 2):
            total = normal(total + x[:, pair, None] * weight[None, :, pair])
        ends.append(total)
    return normal(ends[0] + ends[1])


def tiled_product(
    x: NDArray[np.uint16], weight: NDArray[np.uint16], bias: NDArray[np.uint16]
) -> NDArray[np.uint16]:
    """The product of bfloat16 in the order of tiles: block after block of 32 inputs."""
    inputs, outputs = normal(widened(x)), normal(widened(weight))
    total = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, x.shape[1], 32):
        part = slice(first, first + 32)
        total = normal(total + sums_of_block(inputs[:, part], outputs[:, part]))
    return narrowed(total + widened(bias))


def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
    """The memory at an address; its owner keeps it alive."""
    memory = (ctypes.c_uint8 * count).from_address(address)
    return np.ndarray((count,), np.uint8, memoryview(memory))


class TileProcessor:
    """Eight tiles and their configuration, with the calls of `_tiles` and `_near_tiles`."""

    def __init__(self) -> None:
        self.config = np.zeros(64, np.uint8)
        self.tiles = [np.zeros((ROWS, LINE), np.uint8) for _ in range(8)]

    # The processor's instructions.

    def configure(self, config: NDArray[np.uint8]) -> None:
        self.config = config.copy()
        self.tiles = [np.zeros((int(config[48 + tile]), LINE), np.uint8) for tile in range(8)]

    def copy_configuration(self, config: NDArray[np.uint8]) -> None:
        config[:] = self.config

    def load(self, tile: int, address: int, stride: int) -> None:
        rows = [bytes_at(address + row * stride, LINE) for row in range(len(self.tiles[tile]))]
        self.tiles[tile] = np.array(rows, np.uint8).reshape(-1, LINE)

    def store(self, tile: int, address: int, stride: int) -> None:
        for row, line in enumerate(self.tiles[tile]):
            bytes_at(address + row * stride, LINE)[:] = line

    def add(self, sums: int, inputs: int, weights: int) -> None:
        x = normal(widened(self.tiles[inputs].view(np.uint16)))
        pairs = normal(widened(self.tiles[weights].view(np.uint16)))
        weight = pairs.reshape(ROWS, ROWS, 2).transpose(1, 0, 2).reshape(ROWS, 2 * ROWS)
        with np.errstate(all="ignore"):  # memory behind the last token may hold anything
            total = normal(self.tiles[sums].view(np.float32) + sums_of_block(x, weight))
        self.tiles[sums] = np.ascontiguousarray(total).view(np.uint8)

    # The parts of loops.

    def configure_rows(self, config: NDArray[np.uint8], first: int, others: int) -> None:
        if config[48] != first or config[50] != others:
            config[48] = config[49] = config[52] = first
            config[50] = config[51] = config[53] = others
            self.configure(config)

    def clear_sums(self) -> None:
        for tile in range(4):
            self.tiles[tile] = np.zeros_like(self.tiles[tile])

    def add_first_tokens(self, pairs: int, pairs_stride: int, x: int, x_stride: int) -> None:
        self.load(4, x, x_stride)
        for tile in range(2):
            self.load(6 + tile, pairs + tile * LINE, pairs_stride)
            self.add(tile, 4, 6 + tile)

    def add_other_tokens(self, x: int, x_stride: int) -> None:
        self.load(5, x, x_stride)
        for tile in range(2):
            self.add(2 + tile, 5, 6 + tile)

    def add_few_tokens(self, pairs: int, pairs_stride: int, x: int, x_stride: int) -> None:
        self.load(4, x, x_stride)
        for tile in range(4):
            self.load(6 + tile % 2, pairs + tile * LINE, pairs_stride)
            self.add(tile, 4, 6 + tile % 2)

    def store_sums(self, sums: int, stride: int) -> None:
        for tile in range(4):
            self.store(tile, sums + tile // 2 * ROWS * stride + tile % 2 * LINE, stride)

    def store_few_sums(self, sums: int, stride: int) -> None:
        for tile in range(4):
            self.store(tile, sums + tile * LINE, stride)

    def load_sums(self, sums: int) -> None:
        for tile in range(4):
            self.load(tile, sums + tile // 2 * ROWS * 2 * LINE + tile % 2 * LINE, 2 * LINE)

    def add_near_half(self, x: int, weights: int) -> None:
        self.load(4, x, LINE)
        for tile in range(2):
            self.load(6 + tile, weights + tile * TILE, LINE)
            self.add(tile, 4, 6 + tile)

    def add_near_tokens(self, x: int, weights: int) -> None:
        self.add_near_half(x, weights)
        self.add_other_tokens(x + TILE, LINE)

    def copy_weights(self, panel: int, near: int) -> None:
        for row in range(ROWS):
            for tile in range(2):
                self.copy_line(
                    panel + row * 4 * LINE + tile * LINE, near + tile * TILE + row * LINE
                )

    def copy_line(self, source: int, to: int) -> None:
        bytes_at(to, LINE)[:] = bytes_at(source, LINE)


def row_at(address: int, like: NDArray[Any]) -> NDArray[Any]:
    """A row without an end, as the loops have it."""
    return bytes_at(address, 1 << 24).view(like.dtype)


def store_rounded(y: NDArray[np.uint16], at: int, sums: Floats, added: Floats) -> None:
    y[at : at + len(sums)] = narrowed(sums + added)


def _nothing(*_: object) -> None:
    """In place of a wish for memory."""


PARTS: dict[str, Callable[..., Any]] = {
    "row_at": row_at,
    "lanes_at": lambda array, at: array[at : at + 64],
    "half_at": lambda array, at: array[at : at + 32],
    "store_rounded": store_rounded,
    "wide": lambda value: widened(np.array([value], np.uint16))[0],
    "narrow": lambda value, _like: narrowed(np.array([value], np.float32))[0],
    "ask_for_lines": _nothing,
    "ask_for_row": _nothing,
    "prange": range,
}


@contextmanager
def on_tiles(*modules: Any) -> Iterator[TileProcessor]:
    """The loops of these modules run in Python, on tiles in numpy."""
    processor = TileProcessor()
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name in tuple(vars(module)):
                part = getattr(processor, name, PARTS.get(name))
                if part is not None and not name.startswith("_"):
                    patch.setattr(module, name, part)
        yield processor
