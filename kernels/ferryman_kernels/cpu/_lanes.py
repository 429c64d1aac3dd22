"""Sums of 64 numbers at a time that stay in registers, for loops over a stored weight.

numba's own vectoriser keeps such sums in memory, which halved the speed of a product with one
token. They are vectors as in `_vectors`, of 64 lanes: each step is one fused multiplication and
addition by lane, in the order in which the loop asks for it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ferryman_kernels.cpu._compiled import is_bfloat16, numba
from ferryman_kernels.cpu._vectors import (
    fused_values,
    generated,
    in_each_lane,
    pointer_at,
    shuffled,
)

if numba is not None:
    from llvmlite import ir
    from llvmlite.binding import get_host_cpu_name
    from numba.core.cgutils import get_or_insert_function
    from numba.core.codegen import get_host_cpu_features

    from ferryman_kernels.cpu._vectors import Vector


LANES = 64
"""Outputs that are summed at once: the width of a panel of a packed weight."""
STEP_BYTES = 256
"""Bytes that one step reads: a float32, or a pair of bfloat16, for each lane."""


def compiled_for() -> tuple[str, str]:
    """LLVM's name of the processor that numba compiles for, and its features, as "+avx2,-amx-tile";
    there has to be numba."""
    name: str | None = numba.config.CPU_NAME
    features: str | None = numba.config.CPU_FEATURES
    return (
        get_host_cpu_name() if name is None else name,
        str(get_host_cpu_features()) if features is None else features,
    )


@cache
def has_feature(name: str) -> bool:
    """Whether numba compiles for a processor with the feature that LLVM calls so."""
    return numba is not None and f"+{name}" in compiled_for()[1].split(",")


HAS_DOTS = has_feature("avx512bf16")
"""Whether the processor multiplies pairs of bfloat16 and adds them to float32 (AVX512-BF16)."""


@generated
def no_sums(typing: Any) -> Any:
    """no_sums(): a zero in each lane, in float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.VectorType(ir.FloatType(), LANES), [0.0] * LANES)

    return Vector(numba.types.float32, LANES)(), generate


@generated
def lanes_at(typing: Any, array: Any, at: Any) -> Any:
    """lanes_at(array, at): array[at : at + 64] of a flat float32 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _floats_at(context, builder, signature.args[0], *args)

    return Vector(numba.types.float32, LANES)(array, numba.types.intp), generate


@generated
def half_at(typing: Any, array: Any, at: Any) -> Any:
    """half_at(array, at): array[at : at + 32] of a flat float32 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _floats_at(context, builder, signature.args[0], args[0], args[1], LANES // 2)

    return Vector(numba.types.float32, LANES // 2)(array, numba.types.intp), generate


@generated
def store_rounded(typing: Any, array: Any, at: Any, sums: Any, added: Any) -> Any:
    """store_rounded(array, at, sums, added): array[at : at + lanes] ← sums + added, rounded to
    nearest even if the array is bfloat16."""
    is_narrow = is_bfloat16(array)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, at, *both = args
        lanes = builder.fadd(*both)
        lanes = _rounded(builder, lanes) if is_narrow else lanes
        place = pointer_at(context, builder, signature.args[0], array, at, lanes.type)
        builder.store(lanes, place, align=2)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, sums, sums), generate


def _rounded(builder: Any, floats: Any) -> Any:
    """bfloat16 nearest to each lane, as `narrow` rounds; the processor gives zero below 1.2e-38."""
    lanes = floats.type.count
    shorts = ir.VectorType(ir.IntType(16), lanes)
    if HAS_DOTS:
        return builder.bitcast(builder.fptrunc(floats, ir.VectorType(_Bfloat(), lanes)), shorts)
    words = ir.VectorType(ir.IntType(32), lanes)
    half, one, below, no_number = (
        ir.Constant(words, [number] * lanes) for number in (16, 1, 0x7FFF, 0x7FC0)
    )
    bits = builder.bitcast(floats, words)
    even = builder.and_(builder.lshr(bits, half), one)
    upper = builder.lshr(builder.add(builder.add(bits, below), even), half)
    is_none = builder.fcmp_unordered("uno", floats, floats)
    upper = builder.select(is_none, no_number, upper)
    return builder.trunc(upper, shorts)


def bfloats_of(builder: Any, low: Any, high: Any) -> Any:
    """bfloat16 nearest to 16 float32 and, behind them, to 16 others, as `_rounded` rounds."""
    if HAS_DOTS:
        # LLVM would round each half by itself and join them.
        kind = ir.VectorType(_Bfloat(), 32)
        signs = ir.FunctionType(kind, (low.type, low.type))
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        rounded = builder.call(get_or_insert_function(builder.module, signs, name), (high, low))
        return builder.bitcast(rounded, ir.VectorType(ir.IntType(16), 32))
    return _rounded(builder, shuffled(builder, low, high, range(32)))


@generated
def add_scaled(typing: Any, sums: Any, array: Any, at: Any, number: Any) -> Any:
    """add_scaled(sums, array, at, number): `sums` with array[at + i] · number added in lane i; a
    flat float32 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _floats_at(context, builder, signature.args[1], args[1], args[2])
        return fused_values(builder, lanes, in_each_lane(builder, args[3], LANES), args[0])

    return sums(sums, array, numba.types.intp, numba.types.float32), generate


def _floats_at(
    context: Any, builder: Any, kind: Any, array: Any, at: Any, lanes: int = LANES
) -> Any:
    pointer = pointer_at(context, builder, kind, array, at, ir.VectorType(ir.FloatType(), lanes))
    return builder.load(pointer, align=4)


@generated
def add_codes(typing: Any, sums: Any, codes: Any, at: Any, x: Any, first: Any) -> Any:
    """add_codes(sums, codes, at, x, first): `sums` with codes[at + i] · x[first + i] added in lane
    i; int8 codes and float32 x, flat."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, codes, at, x, first = args
        place = pointer_at(context, builder, signature.args[1], codes, at, ir.IntType(8))
        inputs = _floats_at(context, builder, signature.args[3], x, first)
        return fused_values(builder, floats_of_codes(builder, place, LANES), inputs, sums)

    return sums(sums, codes, numba.types.intp, x, numba.types.intp), generate


def floats_of_codes(builder: Any, place: Any, lanes: int) -> Any:
    """The int8 codes at LLVM's pointer to the first of them, as float32."""
    vector = ir.VectorType(ir.IntType(8), lanes)
    codes = builder.load(builder.bitcast(place, vector.as_pointer()), align=1)
    words = builder.sext(codes, ir.VectorType(ir.IntType(32), lanes))
    return builder.sitofp(words, ir.VectorType(ir.FloatType(), lanes))


def dots_of(builder: Any, sums: Any, words: Any, inputs: Any) -> Any:
    """`sums`, 16 of LLVM's float32, with the products of pairs of bfloat16 added, a pair a word."""
    pairs = ir.VectorType(_Bfloat(), 32)
    signs = ir.FunctionType(sums.type, (sums.type, pairs, pairs))
    dot = get_or_insert_function(builder.module, signs, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(dot, (sums, *(builder.bitcast(each, pairs) for each in (words, inputs))))


def words_at(builder: Any, address: Any, lanes: int) -> Any:
    """The words of 4 bytes at an address."""
    words = ir.VectorType(ir.IntType(32), lanes)
    return builder.load(builder.inttoptr(address, words.as_pointer()), align=2)


if numba is not None:

    class _Bfloat(ir.Type):  # type: ignore[misc]
        """LLVM's bfloat, which llvmlite does not name."""

        def _to_string(self) -> str:
            return "bfloat"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, _Bfloat)

        def __hash__(self) -> int:
            return hash(_Bfloat)
