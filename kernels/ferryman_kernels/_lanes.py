"""Sums of 64 numbers at a time that stay in registers, for loops over a stored weight.

numba's own vectoriser keeps such sums in memory, which halved the speed of a product with one
token. They are vectors as in `_vectors`, of 64 lanes: each step is one fused multiplication and
addition by lane, in the order in which the loop asks for it. A packed weight is read at its
address.
"""

from __future__ import annotations

from typing import Any

from ferryman_kernels._compiled import numba
from ferryman_kernels._vectors import fused_values, generated, in_each_lane, pointer_at

if numba is not None:
    from llvmlite import ir
    from numba.extending import overload

    from ferryman_kernels._vectors import Vector

__all__ = ["LANES", "STEP_BYTES", "add_codes", "add_step", "no_sums", "steps_of"]

LANES = 64
"""Outputs that are summed at once: the width of a panel of a packed weight."""
STEP_BYTES = 256
"""Bytes that one step reads: a float32, or a pair of bfloat16, for each lane."""


@generated
def no_sums(typing: Any) -> Any:
    """no_sums(): a zero in each lane, in float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.VectorType(ir.FloatType(), LANES), [0.0] * LANES)

    return Vector(numba.types.float32, LANES)(), generate


@generated
def add_codes(typing: Any, sums: Any, codes: Any, at: Any, x: Any, first: Any) -> Any:
    """add_codes(sums, codes, at, x, first): `sums` with codes[at + i] · x[first + i] added in lane
    i; int8 codes and float32 x, flat."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def loaded(place: int, number: Any) -> Any:
            kind, array, at = signature.args[place], args[place], args[place + 1]
            pointer = pointer_at(context, builder, kind, array, at, ir.VectorType(number, LANES))
            return builder.load(pointer, align=1)

        words = builder.sext(loaded(1, ir.IntType(8)), ir.VectorType(ir.IntType(32), LANES))
        x_lanes = loaded(3, ir.FloatType())
        return fused_values(builder, builder.sitofp(words, x_lanes.type), x_lanes, args[0])

    return sums(sums, codes, numba.types.intp, x, numba.types.intp), generate


def steps_of(like: Any, row: Any) -> Any:
    """The steps of a row of inputs; `like` is an element of the weight: uint16 means bfloat16."""
    raise NotImplementedError("only in compiled loops")


def add_step(like: Any, sums: Any, address: Any, row: Any, step: Any) -> Any:
    """`sums` with the products of the inputs of `step` of `row`, float32, and the weights at
    `address`, added one input after the other."""
    raise NotImplementedError("only in compiled loops")


@generated
def _add_floats(typing: Any, sums: Any, address: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, address, number = args
        weights = builder.bitcast(_words_at(builder, address), sums.type)
        return fused_values(builder, weights, in_each_lane(builder, number, LANES), sums)

    return sums(sums, numba.types.intp, numba.types.float32), generate


@generated
def _add_pairs(typing: Any, sums: Any, address: Any, first: Any, second: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, address, *numbers = args
        words = _words_at(builder, address)
        low = builder.shl(words, ir.Constant(words.type, [16] * LANES))
        high = builder.and_(words, ir.Constant(words.type, [0xFFFF0000] * LANES))
        for half, number in zip((low, high), numbers, strict=True):
            weights = builder.bitcast(half, sums.type)
            sums = fused_values(builder, weights, in_each_lane(builder, number, LANES), sums)
        return sums

    float32 = numba.types.float32
    return sums(sums, numba.types.intp, float32, float32), generate


def _words_at(builder: Any, address: Any) -> Any:
    """The 256 bytes at an address."""
    words = ir.VectorType(ir.IntType(32), LANES)
    return builder.load(builder.inttoptr(address, words.as_pointer()), align=4)


if numba is not None:

    @overload(steps_of, strict=False)  # type: ignore[untyped-decorator]
    def _steps_of(like: Any, row: Any) -> Any:
        if like == numba.types.uint16:
            return lambda like, row: row.shape[0] // 2
        return lambda like, row: row.shape[0]

    @overload(add_step, strict=False)  # type: ignore[untyped-decorator]
    def _add_step(like: Any, sums: Any, address: Any, row: Any, step: Any) -> Any:
        if like == numba.types.uint16:
            return lambda like, sums, address, row, step: _add_pairs(
                sums, address, row[2 * step], row[2 * step + 1]
            )
        return lambda like, sums, address, row, step: _add_floats(sums, address, row[step])
