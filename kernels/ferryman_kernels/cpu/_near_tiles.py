"""Tiles whose rows lie side by side in memory, for products of many tokens (AMX).

A block of 32 inputs is two tiles, one behind the other, each 16 rows of 64 bytes:

    inputs     those of 16 tokens, and those of the next 16
    weights    of a half of a panel, as pairs of inputs for 16 outputs, and for the next 16

Tiles are numbered as in `_tiles`. Weights that a product reads again and again stay in the nearest
cache, since inputs are loaded past it: products wait for the second cache half as often. Rows that
lie further apart share few places of the nearest cache, and do not stay.
"""

from __future__ import annotations

from typing import Any

from ferryman_kernels.cpu._compiled import numba
from ferryman_kernels.cpu._lanes import STEP_BYTES, words_at
from ferryman_kernels.cpu._tiles import ROWS, add_tiles, load_tile
from ferryman_kernels.cpu._vectors import LANES, generated, prefetch_at

LINE_BYTES = 64
"""The bytes of a tile's row."""
_TILE_BYTES = ROWS * LINE_BYTES
BLOCK_BYTES = 2 * _TILE_BYTES
_PAST_THE_NEAREST = "llvm.x86.tileloaddt164"


@generated
def add_near_tokens(typing: Any, x: Any, weights: Any) -> Any:
    """add_near_tokens(x, weights): adds the products of a block to tiles 0 to 3, of 32 tokens by 32
    outputs; both arguments are addresses."""
    return _adding(2)


@generated
def add_near_half(typing: Any, x: Any, weights: Any) -> Any:
    """add_near_half(x, weights): the same for the first 16 tokens, to tiles 0 and 1."""
    return _adding(1)


def _adding(tiles: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x, weights), line = args, args[0].type(LINE_BYTES)
        # The second cache takes longest to answer.
        load_tile(builder, 4, x, line, _PAST_THE_NEAREST)
        load_tile(builder, 6, weights, line)
        load_tile(builder, 7, builder.add(weights, weights.type(_TILE_BYTES)), line)
        add_tiles(builder, 0, 4, 6)
        add_tiles(builder, 1, 4, 7)
        if tiles == 2:
            others = builder.add(x, x.type(_TILE_BYTES))
            load_tile(builder, 5, others, line, _PAST_THE_NEAREST)
            add_tiles(builder, 2, 5, 6)
            add_tiles(builder, 3, 5, 7)
        return context.get_dummy_value()

    size = numba.types.intp
    return numba.types.void(size, size), generate


@generated
def copy_weights(typing: Any, panel: Any, near: Any) -> Any:
    """copy_weights(panel, near): copies a block of a half of a panel, whose rows begin at the
    address `panel`, to the tiles at the address `near`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for row in range(ROWS):
            for tile in range(2):
                place = args[0].type(row * STEP_BYTES + tile * LINE_BYTES)
                to = args[1].type(tile * _TILE_BYTES + row * LINE_BYTES)
                _copy(builder, builder.add(args[0], place), builder.add(args[1], to))
        return context.get_dummy_value()

    size = numba.types.intp
    return numba.types.void(size, size), generate


@generated
def ask_for_row(typing: Any, panel: Any) -> Any:
    """ask_for_row(panel): asks for a row of a block that `copy_weights` copies, for the second
    cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for line in range(0, 2 * LINE_BYTES, LINE_BYTES):
            prefetch_at(builder, builder.add(args[0], args[0].type(line)), 2)
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp), generate


@generated
def copy_line(typing: Any, source: Any, to: Any) -> Any:
    """copy_line(source, to): copies a row of a tile from one address to the other."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _copy(builder, *args)
        return context.get_dummy_value()

    size = numba.types.intp
    return numba.types.void(size, size), generate


def _copy(builder: Any, source: Any, to: Any) -> None:
    words = words_at(builder, source, LANES)
    builder.store(words, builder.inttoptr(to, words.type.as_pointer()), align=LINE_BYTES)


@generated
def load_sums(typing: Any, sums: Any) -> Any:
    """load_sums(sums): tiles 0 to 3 from the address `sums`, where `store_sums` has left them with
    a stride of 128 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stride = args[0].type(2 * LINE_BYTES)
        for tile in range(4):
            place = tile // 2 * ROWS * 2 * LINE_BYTES + tile % 2 * LINE_BYTES
            load_tile(builder, tile, builder.add(args[0], args[0].type(place)), stride)
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp), generate
