"""Tiles of bfloat16 that the processor multiplies as matrices (AMX), for compiled loops.

A tile has up to 16 rows of 64 bytes: 16 float32, or 16 pairs of bfloat16. A step multiplies up to
32 tokens by 32 inputs of 32 outputs:

    tiles 0, 1    sums of the first 16 tokens, for outputs 0 to 15 and 16 to 31
    tiles 2, 3    sums of the other tokens
    tiles 4, 5    the inputs of the first tokens and of the others
    tiles 6, 7    weights as pairs [16 pairs of inputs, 16 outputs, 2]

or up to 16 tokens by 32 inputs of 64 outputs: then tiles 0 to 3 have the sums of 16 outputs each,
and tiles 6 and 7 their weights in turn. Both ways give a sum the same bits, which are those of its
steps in their order.

A thread owns its tiles. Their configuration has to be put back: oneDNN, for one, may count on what
it configured before.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np

from ferryman_kernels.cpu._compiled import numba, part
from ferryman_kernels.cpu._lanes import HAS_DOTS, has_feature
from ferryman_kernels.cpu._vectors import LANES, generated, prefetch_at

if numba is not None:
    from llvmlite import ir
    from numba.core.cgutils import get_or_insert_function


ROWS = 16
"""Rows of a tile: tokens, or pairs of inputs."""
CONFIG_BYTES = 64
ASKED_BYTES = 1024
"""The bytes that are asked for at once."""
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@cache
def has_tiles() -> bool:
    """Whether this process may multiply tiles of bfloat16: Linux gives their memory on request."""
    if not (HAS_DOTS and has_feature("amx-bf16") and sys.platform == "linux"):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


@part
def aligned_words(count: Any) -> Any:
    """Memory that begins with a line of the caches, as a tile's rows then do."""
    memory = np.empty(count + LANES, np.int32)
    first = -memory.ctypes.data % 64 // 4
    return memory[first : first + count]


@part
def tile_configuration(first: Any, others: Any) -> Any:
    """The processor's manual has the bytes: tiles of `first` rows for tokens (0, 1, 4) and of
    `others` (2, 3, 5)."""
    config = np.zeros(CONFIG_BYTES, np.uint8)
    config[0] = 1
    for tile in range(8):
        config[16 + 2 * tile] = 64
        config[48 + tile] = ROWS
    config[48] = config[49] = config[52] = first
    config[50] = config[51] = config[53] = others
    return config


@generated
def configure(typing: Any, config: Any) -> Any:
    """configure(config): the tiles as the 64 bytes of `config` say; their numbers are zero then."""
    return numba.types.void(config), _of_config("llvm.x86.ldtilecfg")


@generated
def copy_configuration(typing: Any, config: Any) -> Any:
    """copy_configuration(config): writes the tiles' configuration to the 64 bytes of `config`."""
    return numba.types.void(config), _of_config("llvm.x86.sttilecfg")


@part
def configure_rows(config: Any, first: Any, others: Any) -> None:
    """Configures the tiles as `tile_configuration` does, if `config`, the last one, says otherwise:
    that takes as long as 30 products of tiles."""
    if config[48] != first or config[50] != others:
        config[:] = tile_configuration(first, others)
        configure(config)


@generated
def clear_sums(typing: Any) -> Any:
    """clear_sums(): tiles 0 to 3 are zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for tile in range(4):
            _call(builder, "llvm.x86.tilezero", _number(tile))
        return context.get_dummy_value()

    return numba.types.void(), generate


@generated
def add_first_tokens(typing: Any, pairs: Any, pairs_stride: Any, x: Any, x_stride: Any) -> Any:
    """add_first_tokens(pairs, pairs_stride, x, x_stride): the products of 32 inputs with the
    weights, whose rows of 32 pairs begin at the address `pairs`, are added to tiles 0 and 1; the
    tokens' inputs begin at the address `x`. Strides are bytes. The weights stay in tiles 6 and 7.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs, pairs_stride, x, x_stride = args
        second = builder.add(pairs, pairs.type(_HALF_BYTES))
        load_tile(builder, 4, x, x_stride)
        load_tile(builder, 6, pairs, pairs_stride)
        load_tile(builder, 7, second, pairs_stride)
        add_tiles(builder, 0, 4, 6)
        add_tiles(builder, 1, 4, 7)
        return context.get_dummy_value()

    size = numba.types.intp
    return numba.types.void(size, size, size, size), generate


@generated
def add_other_tokens(typing: Any, x: Any, x_stride: Any) -> Any:
    """add_other_tokens(x, x_stride): as `add_first_tokens` with the same weights, to tiles 2 and 3;
    `x` is the address of the seventeenth token's inputs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        load_tile(builder, 5, *args)
        add_tiles(builder, 2, 5, 6)
        add_tiles(builder, 3, 5, 7)
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp, numba.types.intp), generate


@generated
def add_few_tokens(typing: Any, pairs: Any, pairs_stride: Any, x: Any, x_stride: Any) -> Any:
    """add_few_tokens(pairs, pairs_stride, x, x_stride): as `add_first_tokens`, of 64 outputs, to
    tiles 0 to 3."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs, pairs_stride, x, x_stride = args
        load_tile(builder, 4, x, x_stride)
        for tile in range(4):
            weights, at = 6 + tile % 2, builder.add(pairs, pairs.type(tile * _HALF_BYTES))
            load_tile(builder, weights, at, pairs_stride)
            add_tiles(builder, tile, 4, weights)
        return context.get_dummy_value()

    size = numba.types.intp
    return numba.types.void(size, size, size, size), generate


@generated
def ask_for_lines(typing: Any, address: Any) -> Any:
    """ask_for_lines(address): asks for the next ASKED_BYTES of memory, for the second cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for line in range(0, ASKED_BYTES, _HALF_BYTES):
            prefetch_at(builder, builder.add(args[0], args[0].type(line)), 2)
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp), generate


@generated
def store_sums(typing: Any, sums: Any, stride: Any) -> Any:
    """store_sums(sums, stride): writes tiles 0 to 3, of 32 tokens by 32 outputs, to float32 at the
    address `sums`, a token each `stride` bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, stride = args
        others = builder.add(sums, builder.mul(stride, stride.type(ROWS)))
        for tile, rows in enumerate((sums, sums, others, others)):
            _store(builder, tile, builder.add(rows, rows.type(tile % 2 * _HALF_BYTES)), stride)
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp, numba.types.intp), generate


@generated
def store_few_sums(typing: Any, sums: Any, stride: Any) -> Any:
    """store_few_sums(sums, stride): as `store_sums`, of 16 tokens by 64 outputs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, stride = args
        for tile in range(4):
            _store(builder, tile, builder.add(sums, sums.type(tile * _HALF_BYTES)), stride)
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp, numba.types.intp), generate


_HALF_BYTES = 64


def _of_config(name: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        _call(builder, name, builder.bitcast(data, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return generate


def load_tile(
    builder: Any, tile: int, address: Any, stride: Any, way: str = "llvm.x86.tileloadd64"
) -> None:
    """Loads a tile whose rows begin at LLVM's value `address`, by LLVM's function `way`."""
    _call(builder, way, _number(tile), _pointer(builder, address), stride)


def _store(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _call(builder, "llvm.x86.tilestored64", _number(tile), _pointer(builder, address), stride)


def add_tiles(builder: Any, sums: int, inputs: int, weights: int) -> None:
    """Adds the products of two tiles to a third."""
    tiles = (_number(tile) for tile in (sums, inputs, weights))
    _call(builder, "llvm.x86.tdpbf16ps", *tiles)


def _number(tile: int) -> Any:
    return ir.IntType(8)(tile)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def _call(builder: Any, name: str, *args: Any) -> None:
    signs = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(get_or_insert_function(builder.module, signs, name), args)
