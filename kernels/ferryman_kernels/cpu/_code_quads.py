"""int8 codes in panels of 64 outputs, four inputs of an output side by side.

codes[i // 4][o][i % 4]          a panel [inputs / 4, 64, 4]
pairs[i // 2][o][i % 2]          the same as bfloat16, which holds every code exactly
floats[i][o]                     the same as float32
"""

from __future__ import annotations

import struct
from typing import Any

from ferryman_kernels.cpu._compiled import numba
from ferryman_kernels.cpu._lanes import STEP_BYTES, has_feature
from ferryman_kernels.cpu._vectors import LANES, generated, shuffled

if numba is not None:
    from llvmlite import ir
    from numba.core.cgutils import get_or_insert_function


HAS_BYTE_TABLES = has_feature("avx512vbmi")
"""Whether the processor looks bytes up in tables of 128 (AVX512-VBMI)."""
QUAD = 4
"""Inputs whose codes lie side by side."""
_VECTOR_BYTES = 64


@generated
def widen_quads(typing: Any, widened: Any, codes: Any, words: Any) -> Any:
    """widen_quads(widened, codes, words): writes four inputs of a panel, 256 bytes at the address
    `codes`, to that of `words`: as two steps of pairs, or if `widened` is a float32, as four of
    floats."""
    unpacked = pairs_of_quads if widened == numba.types.uint16 else floats_of_quads

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, codes, words = args
        kind = ir.VectorType(ir.IntType(32), LANES).as_pointer()
        for at in range(0, STEP_BYTES, _VECTOR_BYTES):
            place = builder.inttoptr(builder.add(codes, codes.type(at)), kind)
            for step, vector in enumerate(unpacked(builder, builder.load(place, align=1))):
                into = builder.add(words, words.type(step * STEP_BYTES + at))
                builder.store(vector, builder.inttoptr(into, kind), align=1)
        return context.get_dummy_value()

    return numba.types.void(widened, numba.types.intp, numba.types.intp), generate


def floats_of_quads(builder: Any, quads: Any) -> list[Any]:
    """The four numbers of each of 16 quads as float32, as words: the first of all, the second.

    A code becomes the lower bits of a large float32, which is then subtracted: of the first byte of
    a word one of 2²³, of the second one of 2¹⁵.
    """
    words, floats = quads.type, ir.VectorType(ir.FloatType(), LANES)
    numbers = []
    for half in (quads, builder.lshr(quads, ir.Constant(words, [16] * LANES))):
        for byte, large in enumerate((2.0**23, 2.0**15)):
            code = builder.and_(half, ir.Constant(words, [0xFF << 8 * byte] * LANES))
            # 128 more of a byte with a sign is the byte with its first bit changed.
            bits = struct.unpack("<I", struct.pack("<f", large))[0] | 0x80 << 8 * byte
            raised = builder.xor(code, ir.Constant(words, [bits] * LANES))
            lowered = builder.fsub(
                builder.bitcast(raised, floats), ir.Constant(floats, [large + 128] * LANES)
            )
            numbers.append(builder.bitcast(lowered, words))
    return numbers


def pairs_of_quads(builder: Any, quads: Any) -> list[Any]:
    """The first and the last pair of each of 16 quads, a pair a word."""
    return _looked_up(builder, quads) if HAS_BYTE_TABLES else _computed(builder, quads)


def _computed(builder: Any, quads: Any) -> list[Any]:
    """The pairs by way of float32, whose lower halves are zero."""
    numbers = floats_of_quads(builder, quads)
    half = ir.Constant(quads.type, [16] * LANES)
    firsts = (builder.lshr(number, half) for number in numbers[::2])
    return [builder.or_(*pair) for pair in zip(firsts, numbers[1::2], strict=True)]


def _looked_up(builder: Any, quads: Any) -> list[Any]:
    """As `_computed`, from tables of both bytes of a bfloat16: 9 instructions in place of 16."""
    kind = ir.VectorType(ir.IntType(8), _VECTOR_BYTES)
    codes = builder.bitcast(quads, kind)
    # Bytes are joined within fourths of a vector: the first pairs are to be in their lower halves.
    order = [
        16 * part + i
        for part in range(4)
        for i in (0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)
    ]
    codes = shuffled(builder, codes, codes, order)
    low, high = _bytes_of(builder, codes)
    pairs = []
    for half in (0, 8):
        places = [16 * fourth + half + i for fourth in range(4) for i in range(8)]
        joined = [place + table for place in places for table in (0, _VECTOR_BYTES)]
        pairs.append(builder.bitcast(shuffled(builder, low, high, joined), quads.type))
    return pairs


def _bytes_of(builder: Any, codes: Any) -> tuple[Any, Any]:
    """The low and the high byte of each code's bfloat16."""
    kind, flag = codes.type, ir.IntType(1)
    signs = ir.FunctionType(kind, (kind, flag))
    absolute = get_or_insert_function(builder.module, signs, f"llvm.abs.v{_VECTOR_BYTES}i8")
    size = builder.call(absolute, (codes, flag(0)))
    low, high = (_looked_up_bytes(builder, table, size) for table in _tables())
    # A table of 128 has no place for the size 128, whose low byte is that of zero.
    least = ir.Constant(kind, [-128] * _VECTOR_BYTES)
    of_least = ir.Constant(kind, [0x43] * _VECTOR_BYTES)
    high = builder.select(builder.icmp_signed("==", codes, least), of_least, high)
    return low, builder.or_(high, builder.and_(codes, least))


def _tables() -> tuple[list[int], list[int]]:
    """The low and the high byte of the bfloat16 of each number from 0 to 127."""
    words = [struct.unpack("<I", struct.pack("<f", number))[0] >> 16 for number in range(128)]
    return [word & 0xFF for word in words], [word >> 8 for word in words]


def _looked_up_bytes(builder: Any, table: list[int], index: Any) -> Any:
    kind = index.type
    first, last = (ir.Constant(kind, part) for part in (table[:64], table[64:]))
    signs = ir.FunctionType(kind, (kind, kind, kind))
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    looked_up = get_or_insert_function(builder.module, signs, name)
    return builder.call(looked_up, (first, index, last))
