"""A processor's tiles (AMX) in numpy: its instruction's arithmetic, and the parts that loops call.

The instruction multiplies 16 tokens by 16 outputs, of 16 pairs of bfloat16. Of a sum it adds the
first of each pair, then the second ones, then both to what was there; every sum is a float32, and a
number below the normal ones is zero (Intel's manual, TDPBF16PS). A product of two bfloat16 has 16
bits, so it is exact in float32, and adding it rounds once as the instruction does.

`on_tiles` has loops of Python run on these tiles, with vectors of `vector_parts`: their order of
blocks, runs, halves and pairs, and their addresses, on any processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.kernels.vector_parts import VECTOR_PARTS, Floats, bytes_at, rounded, widened

from ferryman_kernels.cpu._compiled import Loop
from ferryman_kernels.cpu._tiles import has_tiles

Processor = Callable[[], AbstractContextManager[None]]

LEAST_NORMAL = np.float32(2.0**-126)
LINE, ROWS = 64, 16
BLOCK, TILE = 2 * ROWS * LINE, ROWS * LINE


def normal(numbers: Floats) -> Floats:
    """The numbers, but zero for those below the normal ones."""
    return np.where(np.abs(numbers) < LEAST_NORMAL, np.float32(0), numbers)


def narrowed(numbers: Floats) -> NDArray[np.uint16]:
    """The bfloat16 nearest to each number, as the processor's own instruction rounds."""
    return rounded(normal(numbers))


def sums_of_block(x: Floats, weight: Floats) -> Floats:
    """The sums that an instruction adds: x [tokens, 32] by weight [outputs, 32], in its order."""
    ends = []
    for side in range(2):
        total = np.zeros((len(x), len(weight)), np.float32)
        for pair in range(side, x.shape[1], 2):
            total = normal(total + x[:, pair, None] * weight[None, :, pair])
        ends.append(total)
    return normal(ends[0] + ends[1])


def tiled_sums(x: NDArray[np.uint16], weight: NDArray[np.uint16]) -> Floats:
    """The sums of a product of bfloat16 in the order of tiles: block after block of 32 inputs, the
    last one with zeros behind it."""
    inputs, outputs = (
        normal(widened(np.pad(each, ((0, 0), (0, -each.shape[1] % 32))))) for each in (x, weight)
    )
    total = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, inputs.shape[1], 32):
        part = slice(first, first + 32)
        total = normal(total + sums_of_block(inputs[:, part], outputs[:, part]))
    return total


def tiled_product(
    x: NDArray[np.uint16], weight: NDArray[np.uint16], bias: NDArray[np.uint16]
) -> NDArray[np.uint16]:
    """The product, with a bias, in the order of tiles."""
    return narrowed(tiled_sums(x, weight) + widened(bias))


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

    def _load(self, tile: int, address: int, stride: int) -> None:
        rows = [bytes_at(address + row * stride, LINE) for row in range(len(self.tiles[tile]))]
        self.tiles[tile] = np.array(rows, np.uint8).reshape(-1, LINE)

    def _store(self, tile: int, address: int, stride: int) -> None:
        for row, line in enumerate(self.tiles[tile]):
            bytes_at(address + row * stride, LINE)[:] = line

    def _add(self, sums: int, inputs: int, weights: int) -> None:
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
        self._load(4, x, x_stride)
        for tile in range(2):
            self._load(6 + tile, pairs + tile * LINE, pairs_stride)
            self._add(tile, 4, 6 + tile)

    def add_other_tokens(self, x: int, x_stride: int) -> None:
        self._load(5, x, x_stride)
        for tile in range(2):
            self._add(2 + tile, 5, 6 + tile)

    def add_few_tokens(self, pairs: int, pairs_stride: int, x: int, x_stride: int) -> None:
        self._load(4, x, x_stride)
        for tile in range(4):
            self._load(6 + tile % 2, pairs + tile * LINE, pairs_stride)
            self._add(tile, 4, 6 + tile % 2)

    def store_sums(self, sums: int, stride: int) -> None:
        for tile in range(4):
            self._store(tile, sums + tile // 2 * ROWS * stride + tile % 2 * LINE, stride)

    def store_first_rows(self, sums: int, stride: int, first: int = 0) -> None:
        for side in range(2):
            self._store(first + side, sums + side * LINE, stride)

    def store_other_rows(self, sums: int, stride: int) -> None:
        self.store_first_rows(sums, stride, 2)

    def store_few_sums(self, sums: int, stride: int) -> None:
        for tile in range(4):
            self._store(tile, sums + tile * LINE, stride)

    def load_sums(self, sums: int) -> None:
        for tile in range(4):
            self._load(tile, sums + tile // 2 * ROWS * 2 * LINE + tile % 2 * LINE, 2 * LINE)

    def add_near_half(self, x: int, weights: int) -> None:
        self._load(4, x, LINE)
        for tile in range(2):
            self._load(6 + tile, weights + tile * TILE, LINE)
            self._add(tile, 4, 6 + tile)

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


PARTS: dict[str, Callable[..., Any]] = {
    **VECTOR_PARTS,
    "row_at": row_at,
    "lanes_at": lambda array, at: array[at : at + 64],
    "half_at": lambda array, at: array[at : at + 32],
    "store_rounded": store_rounded,
    "prange": range,
}


def in_python(value: Any) -> Any:
    """A compiled function, or a loop, as the Python that it is compiled from."""
    if isinstance(value, Loop):
        return lambda elements, *args: value.function(*args)
    return getattr(value, "py_func", value)


@contextmanager
def on_tiles(*modules: Any) -> Iterator[TileProcessor]:
    """The loops of these modules run in Python, on tiles in numpy."""
    processor = TileProcessor()
    own = {name: getattr(processor, name) for name in dir(processor) if not name.startswith("_")}
    parts = PARTS | {name: part for name, part in own.items() if callable(part)}
    parts |= {f"_store_{rows}_rows": own[f"store_{rows}_rows"] for rows in ("first", "other")}
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for module in modules:
            for name, value in tuple(vars(module).items()):
                part = parts.get(name, in_python(value))
                if part is not value:
                    patch.setattr(module, name, part)
        yield processor


@contextmanager
def lent(processor: TileProcessor) -> Iterator[TileProcessor]:
    """The tiles are configured as others left them, three rows each, and have to be so again."""
    theirs = np.zeros(64, np.uint8)
    theirs[0], theirs[16:32:2], theirs[48:56] = 1, 64, 3
    processor.configure(theirs)
    yield processor
    assert processor.config.tolist() == theirs.tolist()


needs_tiles = pytest.mark.skipif(not has_tiles(), reason="this processor multiplies no tiles")


def on_each_processor(numpy_tiles: Processor) -> pytest.MarkDecorator:
    """Runs a test in `numpy_tiles`, and by this processor's own tiles if it has any."""
    return pytest.mark.parametrize(
        "processor",
        [
            pytest.param(numpy_tiles, id="numpy"),
            pytest.param(nullcontext, id="processor", marks=needs_tiles),
        ],
    )
