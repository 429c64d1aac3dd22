"""int8 codes that become pairs of bfloat16 on their way to the processor's products.

A panel has 32 outputs: code[input][output]. A step is two inputs, 64 bytes of codes. In a row of
codes pairs are neighbours. bfloat16 holds every code exactly.
"""

from __future__ import annotations

from typing import Any

from ferryman_kernels._compiled import numba
from ferryman_kernels._lanes import dots_of, floats_of_codes, words_at
from ferryman_kernels._vectors import (
    AHEAD_BYTES,
    LANES,
    fused_values,
    generated,
    in_each_lane,
    pointer_at,
    prefetch_at,
    shuffled,
    totals_of_four,
)

if numba is not None:
    from llvmlite import ir

__all__ = [
    "PAIRS_BYTES",
    "ROWS",
    "STEP_BYTES",
    "WIDTH",
    "add_block",
    "add_row_dots",
    "add_two_inputs",
    "store_row_dots",
    "widen_codes",
    "widen_row",
]

WIDTH = 32
"""The outputs of a panel."""
STEP_BYTES, PAIRS_BYTES = 2 * WIDTH, 4 * WIDTH
"""The bytes of a step, in codes and as pairs."""
ROWS = 4
"""Rows of codes that share what they are multiplied by."""


@generated
def widen_codes(typing: Any, codes: Any, pairs: Any) -> Any:
    """widen_codes(codes, pairs): writes the step at the address `codes` as pairs to that of
    `pairs`, and asks for codes further on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch_at(builder, builder.add(args[0], args[0].type(AHEAD_BYTES)))
        words = _pairs_of(builder, args[0])
        place = builder.inttoptr(args[1], words.type.as_pointer())
        builder.store(words, place, align=4)
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp, numba.types.intp), generate


@generated
def widen_row(typing: Any, codes: Any, pairs: Any) -> Any:
    """widen_row(codes, pairs): writes the 32 codes at the address `codes` as bfloat16 to that of
    `pairs`, and asks for codes further on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch_at(builder, builder.add(args[0], args[0].type(AHEAD_BYTES)))
        upper = builder.lshr(_floats_of(builder, args[0]), ir.Constant(_words(), [16] * WIDTH))
        found = builder.trunc(upper, ir.VectorType(ir.IntType(16), WIDTH))
        builder.store(found, builder.inttoptr(args[1], found.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp, numba.types.intp), generate


@generated
def add_row_dots(typing: Any, sums: Any, rows: Any, stride: Any, x: Any) -> Any:
    """add_row_dots(sums, rows, stride, x): `sums`, 16 lanes for each of four rows of bfloat16, with
    the products of 32 numbers of each row and 32 of `x` added; addresses, rows `stride` bytes
    apart. Only where the processor `HAS_DOTS`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, rows, stride, x = args
        inputs, found = words_at(builder, x, LANES), []
        for row in range(ROWS):
            own = shuffled(builder, sums, sums, range(row * LANES, (row + 1) * LANES))
            place = builder.add(rows, builder.mul(stride, stride.type(row)))
            found.append(dots_of(builder, own, words_at(builder, place, LANES), inputs))
        low = shuffled(builder, found[0], found[1], range(2 * LANES))
        high = shuffled(builder, found[2], found[3], range(2 * LANES))
        return shuffled(builder, low, high, range(ROWS * LANES))

    size = numba.types.intp
    return sums(sums, size, size, size), generate


@generated
def store_row_dots(typing: Any, array: Any, at: Any, sums: Any) -> Any:
    """store_row_dots(array, at, sums): array[at : at + 4] ← the sum of each row's lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, at, sums = args
        parts = [
            shuffled(builder, sums, sums, range(row * LANES, (row + 1) * LANES))
            for row in range(ROWS)
        ]
        found = totals_of_four(builder, parts)
        place = pointer_at(context, builder, signature.args[0], array, at, found.type)
        builder.store(found, place, align=4)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, sums), generate


@generated
def add_two_inputs(typing: Any, sums: Any, codes: Any, x: Any, at: Any) -> Any:
    """add_two_inputs(sums, codes, x, at): `sums`, 64 lanes, with the products of the step at the
    address `codes` and two inputs added: lane i for x[at], lane 32 + i for x[at + 1]; a flat
    float32 array. Asks for codes further on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, address, x, at = args
        prefetch_at(builder, builder.add(address, address.type(AHEAD_BYTES)))
        codes = floats_of_codes(builder, _pointer(builder, address), 2 * WIDTH)
        kind, places = ir.FloatType(), (at, builder.add(at, at.type(1)))
        numbers = [
            builder.load(pointer_at(context, builder, signature.args[2], x, each, kind), align=4)
            for each in places
        ]
        both = [in_each_lane(builder, number, WIDTH) for number in numbers]
        inputs = shuffled(builder, both[0], both[1], range(2 * WIDTH))
        return fused_values(builder, codes, inputs, sums)

    return sums(sums, numba.types.intp, x, numba.types.intp), generate


@generated
def add_block(typing: Any, total: Any, sums: Any) -> Any:
    """add_block(total, sums): `total` with the sums of both inputs of a pair added, lane by lane;
    its lanes from 32 on are those below."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, sums = args
        halves = [[*range(n, n + WIDTH)] * 2 for n in (0, WIDTH)]
        both = builder.fadd(*(shuffled(builder, sums, sums, half) for half in halves))
        return builder.fadd(total, both)

    return total(total, sums), generate


def _words() -> Any:
    return ir.VectorType(ir.IntType(32), WIDTH)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def _floats_of(builder: Any, address: Any) -> Any:
    """The 32 codes at an address as the bits of float32, whose lower halves are zero."""
    return builder.bitcast(floats_of_codes(builder, _pointer(builder, address), WIDTH), _words())


def _pairs_of(builder: Any, address: Any) -> Any:
    """The step at an address as 32 words, the first input's bfloat16 in the lower half of each."""
    second = _floats_of(builder, builder.add(address, address.type(WIDTH)))
    first = builder.lshr(_floats_of(builder, address), ir.Constant(_words(), [16] * WIDTH))
    return builder.or_(first, second)
