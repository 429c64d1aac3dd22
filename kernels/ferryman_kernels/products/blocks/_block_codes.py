"""Codes of 64 outputs that become the numbers of a panel, as `block_product` lays them.

    number = code · scale + shift, rounded once to float32, and then to what the panel holds

A chunk is two inputs of a panel: 8 vectors of 16 numbers, in the order in which a panel has them.
Vector k of a chunk has its codes' lower four bits in bits 4·k of 16 words; a fifth bit of 32
vectors, and a fifth and a sixth of 16, have 16 words of their own behind all others of the group.
Codes of 8 bits are 16 bytes a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferryman_kernels.cpu._compiled import numba
from ferryman_kernels.cpu._lanes import LANES, STEP_BYTES, bfloats_of
from ferryman_kernels.cpu._vectors import (
    AHEAD_BYTES,
    fused_values,
    generated,
    prefetch_at,
    shuffled,
)

if numba is not None:
    from llvmlite import ir
    from numba.core.cgutils import for_range_slice, get_or_insert_function

    from ferryman_kernels.cpu._vectors import Vector


CHUNK_INPUTS = 2
FACTORS_BYTES = 8 * LANES
"""The room for the scales, and for the shifts behind them, of a group's outputs."""
_LINE_BYTES, _WORD_BYTES, _WIDTH, _VECTORS = 64, 4, 16, 8
_SIGN_AND_E4M3 = 0x87F0_0000  # bits 31 and 26 to 20
_CHUNKS_OF_PLANE = {4: 1, 5: 4, 6: 2, 8: 1}


@generated
def halves_at(typing: Any, address: Any) -> Any:
    """halves_at(address): 64 float16 as float32."""

    def widened(builder: Any, shorts: Any) -> Any:
        half = ir.VectorType(ir.HalfType(), LANES)
        return builder.fpext(builder.bitcast(shorts, half), _floats(LANES))

    return _lanes_of(16, widened, address)


@generated
def upper_halves_at(typing: Any, address: Any) -> Any:
    """upper_halves_at(address): 64 bfloat16 as float32."""

    def widened(builder: Any, shorts: Any) -> Any:
        words = builder.zext(shorts, _words(LANES))
        upper = builder.shl(words, ir.Constant(words.type, [16] * LANES))
        return builder.bitcast(upper, _floats(LANES))

    return _lanes_of(16, widened, address)


@generated
def e4m3_at(typing: Any, address: Any) -> Any:
    """e4m3_at(address): 64 numbers of FP8 (E4M3), none of them not-a-number, as float32."""

    def widened(builder: Any, codes: Any) -> Any:
        # Sign, exponent and mantissa go to their places; a product moves the exponent's bias.
        left = builder.shl(
            builder.sext(codes, _words(LANES)), ir.Constant(_words(LANES), [20] * LANES)
        )
        bits = builder.and_(left, ir.Constant(_words(LANES), [_SIGN_AND_E4M3] * LANES))
        bias = ir.Constant(_floats(LANES), [2.0**120] * LANES)
        return builder.fmul(builder.bitcast(bits, _floats(LANES)), bias)

    return _lanes_of(8, widened, address)


@generated
def floats_at(typing: Any, address: Any) -> Any:
    """floats_at(address): 64 float32."""
    return _lanes_of(32, lambda builder, read: builder.bitcast(read, _floats(LANES)), address)


@generated
def bytes_at(typing: Any, address: Any) -> Any:
    """bytes_at(address): 64 bytes from 0 to 255 as float32."""
    return _lanes_of(8, lambda builder, read: builder.uitofp(read, _floats(LANES)), address)


@generated
def signed_at(typing: Any, address: Any) -> Any:
    """signed_at(address): 64 bytes from -128 to 127 as float32."""
    return _lanes_of(8, lambda builder, read: builder.sitofp(read, _floats(LANES)), address)


@generated
def less_scaled(typing: Any, vector: Any, scale: Any, offset: Any) -> Any:
    """less_scaled(vector, scale, offset): vector - scale · offset, a number, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        number = builder.fneg(args[2])
        empty = ir.Constant(kind, ir.Undefined)
        first = builder.insert_element(empty, number, ir.IntType(32)(0))
        spread = shuffled(builder, first, first, [0] * kind.count)
        return fused_values(builder, args[1], spread, args[0])

    return vector(vector, vector, numba.types.float32), generate


@generated
def store_factors(typing: Any, stored: Any, address: Any, vector: Any) -> Any:
    """store_factors(stored, address, vector): writes a factor for each lane of a step of `stored`:
    64 float32, or if steps are pairs of bfloat16, each factor twice."""
    copies = 2 if stored == numba.types.uint16 else 1

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Line by line, as they are read again: LLVM takes the numbers of a longer store apart.
        for line in range(0, LANES * copies, _WIDTH):
            lanes = [lane // copies for lane in range(line, line + _WIDTH)]
            factors = shuffled(builder, args[2], args[2], lanes)
            place = builder.add(args[1], args[1].type(line * _WORD_BYTES))
            builder.store(factors, _pointer(builder, place, factors.type), align=_LINE_BYTES)
        return context.get_dummy_value()

    return numba.types.void(stored, numba.types.intp, vector), generate


@generated
def decode_four(
    typing: Any, stored: Any, codes: Any, chunks: Any, table: Any, factors: Any, panel: Any
) -> Any:
    """decode_four(stored, codes, chunks, table, factors, panel): writes so many chunks, whose codes
    of 4 bits begin at the address `codes`, to the address `panel`. A code's number is in the 16
    float32 at `table`; scales are at `factors`, shifts FACTORS_BYTES behind."""
    return _decoder(4, stored)


@generated
def decode_five(
    typing: Any, stored: Any, codes: Any, chunks: Any, table: Any, factors: Any, panel: Any
) -> Any:
    """decode_five(…): the same of 5 bits, 0 to 31; the table is not read."""
    return _decoder(5, stored)


@generated
def decode_six(
    typing: Any, stored: Any, codes: Any, chunks: Any, table: Any, factors: Any, panel: Any
) -> Any:
    """decode_six(…): the same of 6 bits, 0 to 63; the table is not read."""
    return _decoder(6, stored)


@generated
def decode_eight(
    typing: Any, stored: Any, codes: Any, chunks: Any, table: Any, factors: Any, panel: Any
) -> Any:
    """decode_eight(…): the same of 8 bits, -128 to 127; the table is not read."""
    return _decoder(8, stored)


def _decoder(bits: int, stored: Any) -> Any:
    is_paired, size = stored == numba.types.uint16, numba.types.intp

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, codes, chunks, table, factors, panel = args
        numbers = _loaded(builder, table, 0, _floats(_WIDTH)) if bits == 4 else None
        count = _VECTORS if is_paired else _VECTORS // CHUNK_INPUTS
        scales, shifts = (
            [_loaded(builder, factors, at + line * _LINE_BYTES, _floats(_WIDTH))
             for line in range(count)]
            for at in (0, FACTORS_BYTES)
        )  # fmt: skip
        per = _CHUNKS_OF_PLANE[bits]
        plane = builder.add(codes, builder.mul(chunks, chunks.type(_LINE_BYTES)))
        with for_range_slice(builder, chunks.type(0), chunks, chunks.type(per)) as (first, turn):
            upper = None
            if per > 1:
                place = builder.add(plane, builder.mul(turn, turn.type(_LINE_BYTES)))
                upper = _line(builder, place)
            for chunk in range(per):
                index = builder.add(first, first.type(chunk))
                words = _codes_of_chunk(builder, bits, codes, index)
                vectors = [
                    fused_values(
                        builder, _number(builder, bits, words, upper, chunk, k, numbers),
                        scales[k % count], shifts[k % count],
                    )
                    for k in range(_VECTORS)
                ]  # fmt: skip
                _store_chunk(builder, panel, index, vectors, is_paired)
        return context.get_dummy_value()

    return numba.types.void(stored, size, size, size, size, size), generate


def _codes_of_chunk(builder: Any, bits: int, codes: Any, index: Any) -> list[Any]:
    """The 16 words that all vectors of a chunk share, or of 8 bits the words of each vector."""
    lines = 2 if bits == 8 else 1
    place = builder.add(codes, builder.mul(index, index.type(lines * _LINE_BYTES)))
    if bits < 8:
        return [_line(builder, place)]
    for line in range(lines):
        _ask_later(builder, builder.add(place, place.type(line * _LINE_BYTES)))
    return [
        builder.sext(_loaded(builder, place, k * _WIDTH, _bytes(), _WIDTH), _words(_WIDTH))
        for k in range(_VECTORS)
    ]


def _line(builder: Any, address: Any) -> Any:
    """The 16 words at an address; asks for those that follow later."""
    _ask_later(builder, address)
    return _loaded(builder, address, 0, _words(_WIDTH))


def _ask_later(builder: Any, address: Any) -> None:
    prefetch_at(builder, builder.add(address, address.type(AHEAD_BYTES)))


def _number(
    builder: Any, bits: int, words: list[Any], upper: Any, chunk: int, k: int, numbers: Any
) -> Any:
    """The numbers of the codes of vector k of a chunk, before scale and shift, in float32."""
    if bits == 8:
        return builder.sitofp(words[k], _floats(_WIDTH))
    code = _moved(builder, words[0], 4 * k)
    if bits == 4:
        kind = ir.FunctionType(_floats(_WIDTH), (_floats(_WIDTH), _words(_WIDTH)))
        name = "llvm.x86.avx512.permvar.sf.512"
        # The processor reads the four lowest bits of each index alone.
        return builder.call(get_or_insert_function(builder.module, kind, name), (numbers, code))
    wide = bits - 4
    above = _moved(builder, upper, wide * (8 * chunk + k) - 4)
    lower = builder.and_(code, _same(0xF))
    higher = builder.and_(above, _same(((1 << wide) - 1) << 4))
    return builder.sitofp(builder.or_(lower, higher), _floats(_WIDTH))


def _moved(builder: Any, words: Any, down: int) -> Any:
    if down > 0:
        return builder.lshr(words, _same(down))
    return builder.shl(words, _same(-down)) if down < 0 else words


def _store_chunk(builder: Any, panel: Any, index: Any, vectors: list[Any], is_paired: bool) -> None:
    steps = 1 if is_paired else CHUNK_INPUTS
    place = builder.add(panel, builder.mul(index, index.type(steps * STEP_BYTES)))
    lines = vectors
    if is_paired:
        lines = [bfloats_of(builder, *vectors[k : k + 2]) for k in range(0, _VECTORS, 2)]
    for number, line in enumerate(lines):
        at = builder.add(place, place.type(number * _LINE_BYTES))
        builder.store(line, _pointer(builder, at, line.type), align=_LINE_BYTES)


def _lanes_of(bits: int, widened: Callable[[Any, Any], Any], address: Any) -> Any:
    """A function that reads 64 integers of so many bits at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(bits), LANES)
        return widened(builder, _loaded(builder, args[0], 0, kind))

    return Vector(numba.types.float32, LANES)(address), generate


def _loaded(builder: Any, address: Any, at: int, kind: Any, align: int = _LINE_BYTES) -> Any:
    place = builder.add(address, address.type(at))
    return builder.load(_pointer(builder, place, kind), align=align)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _same(number: int) -> Any:
    return ir.Constant(_words(_WIDTH), [number] * _WIDTH)


def _bytes() -> Any:
    return ir.VectorType(ir.IntType(8), _WIDTH)


def _words(lanes: int) -> Any:
    return ir.VectorType(ir.IntType(32), lanes)


def _floats(lanes: int) -> Any:
    return ir.VectorType(ir.FloatType(), lanes)
