"""int8 codes times integers of three digits, by the processor's products of bytes (AVX512-VNNI).

A product takes four bytes without a sign and four with one for each of 16 sums of 32 bits. A code
becomes the former by 128 more; digits of base 256 from -128 to 127 are the latter:

    Σ code · v = Σ_k 256ᵏ · Σ (code + 128) · digit_k(v) - 128 · Σ v

Every sum is exact, so its order does not matter.
"""

from __future__ import annotations

from typing import Any

from ferryman_kernels._compiled import numba
from ferryman_kernels._lanes import has_feature, words_at
from ferryman_kernels._vectors import LANES, generated, prefetch_at

if numba is not None:
    from llvmlite import ir
    from numba.core.cgutils import get_or_insert_function

    from ferryman_kernels._vectors import Vector

__all__ = [
    "HAS_BYTE_DOTS",
    "MOST_INPUTS",
    "STEP",
    "add_digits",
    "ask_ahead",
    "no_counts",
    "total_count",
]

HAS_BYTE_DOTS = has_feature("avx512vnni")
"""Whether the processor multiplies bytes and adds them to int32 (AVX512-VNNI)."""
STEP = 64
"""The codes that one product takes."""
_AHEAD_BYTES, _SECOND_CACHE = 8192, 2
MOST_INPUTS = (1 << 31) // (255 * 128)
"""The inputs of which a sum of products never leaves its 32 bits."""


@generated
def no_counts(typing: Any) -> Any:
    """no_counts(): 16 zeros, as int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)

    return Vector(numba.types.int32)(), generate


@generated
def add_digits(typing: Any, counts: Any, codes: Any, digits: Any) -> Any:
    """add_digits(counts, codes, digits): `counts` with (code + 128) · digit added for the 64 codes
    and digits at these addresses, four a lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counts, codes, digits = args
        words = words_at(builder, codes, LANES)
        # 128 more of a byte with a sign is the byte with its first bit changed.
        raised = builder.xor(words, ir.Constant(words.type, [0x80808080] * LANES))
        kind = words.type
        signs = ir.FunctionType(kind, (kind, kind, kind))
        dot = get_or_insert_function(builder.module, signs, "llvm.x86.avx512.vpdpbusd.512")
        return builder.call(dot, (counts, raised, words_at(builder, digits, LANES)))

    size = numba.types.intp
    return counts(counts, size, size), generate


@generated
def ask_ahead(typing: Any, codes: Any) -> Any:
    """ask_ahead(codes): asks for the memory further on from this address, for the second cache.

    The first one's few open requests would be all that a core asks for: a seventh to a fifth less.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ahead = builder.add(args[0], args[0].type(_AHEAD_BYTES))
        prefetch_at(builder, ahead, _SECOND_CACHE)
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp), generate


@generated
def total_count(typing: Any, counts: Any) -> Any:
    """total_count(counts): the sum of the lanes, as int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        signs = ir.FunctionType(word, (args[0].type,))
        add = get_or_insert_function(builder.module, signs, "llvm.vector.reduce.add.v16i32")
        return builder.sext(builder.call(add, args), ir.IntType(64))

    return numba.types.int64(counts), generate
