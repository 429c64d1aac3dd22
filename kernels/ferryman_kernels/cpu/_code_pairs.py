"""int8 codes that become pairs of bfloat16 on their way to the processor's products.

A panel has 32 outputs: code[input][output]. A step is two inputs, 64 bytes of codes. bfloat16 holds
every code exactly.
"""

from __future__ import annotations

from typing import Any

from ferryman_kernels.cpu._compiled import numba
from ferryman_kernels.cpu._lanes import floats_of_codes
from ferryman_kernels.cpu._vectors import (
    AHEAD_BYTES,
    fused_values,
    generated,
    in_each_lane,
    pointer_at,
    prefetch_at,
    shuffled,
)

if numba is not None:
    from llvmlite import ir


WIDTH = 32
"""The outputs of a panel."""
STEP_BYTES, PAIRS_BYTES = 2 * WIDTH, 4 * WIDTH
"""The bytes of a step, in codes and as pairs."""


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
