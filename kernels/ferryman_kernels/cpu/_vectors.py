"""Several numbers at a time in compiled loops: a sum has one order, whoever compiles it.

numba's vectoriser may reorder sums only where the rules of arithmetic are relaxed, and then as it
likes: in a loop for one thread otherwise than in the shared one. These vectors are LLVM's own, so
nothing is relaxed and the bits follow from the source. Products are fused with what they are added
to; the lanes of a sum are joined in pairs. A processor with narrower registers takes several for
one vector.

Each function is generated as LLVM's instructions; `array` is a contiguous row of numbers. A vector
is loaded or spread with 16 lanes; `_lanes` makes others, and what takes a vector takes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ferryman_kernels.cpu._compiled import is_bfloat16, narrow, numba, part, wide

if numba is not None:
    from llvmlite import ir
    from numba.core.cgutils import get_or_insert_function
    from numba.core.datamodel import PrimitiveModel, register_default
    from numba.extending import intrinsic
    from numba.np.arrayobj import populate_array


AHEAD_BYTES = 4096
"""How far ahead loops ask for memory that they read once: the processor looks no further than a
page by itself."""
LANES = 16
_LOG2_E = 1.44269504
_EXP_SERIES = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip


def generated(function: Callable[..., Any]) -> Any:
    """A function for compiled loops whose instructions are made by hand."""
    return function if numba is None else intrinsic(function)


@generated
def row_at(typing: Any, address: Any, like: Any) -> Any:
    """row_at(address, like): the memory from there on as one row of the dtype of `like`.

    It has no end: the launcher checks what a loop reads, and keeps the memory alive.
    """
    kind = numba.types.Array(like.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = context.make_array(kind)(context, builder)
        size, ends = (
            context.get_constant(numba.types.intp, n) for n in (like.dtype.bitwidth // 8, 1 << 59)
        )
        data = builder.inttoptr(args[0], row.data.type)
        populate_array(row, data, shape=[ends], strides=[size], itemsize=size, meminfo=None)
        return row._getvalue()

    return kind(address, like), generate


@generated
def load(typing: Any, array: Any, at: Any) -> Any:
    """load(array, at): array[at : at + 16] as a vector, widened if it is bfloat16."""
    is_narrow = is_bfloat16(array)
    dtype = numba.types.float32 if is_narrow else array.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = ir.VectorType(ir.IntType(16) if is_narrow else _number(dtype), LANES)
        pointer = _pointer(context, builder, signature, args, stored)
        found = builder.load(pointer, align=array.dtype.bitwidth // 8)
        if not is_narrow:
            return found
        words = ir.VectorType(ir.IntType(32), LANES)
        upper = builder.shl(builder.zext(found, words), ir.Constant(words, [16] * LANES))
        return builder.bitcast(upper, ir.VectorType(ir.FloatType(), LANES))

    return Vector(dtype)(array, numba.types.intp), generate


@generated
def store(typing: Any, array: Any, at: Any, vector: Any) -> Any:
    """store(array, at, vector): array[at : at + lanes] ← vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature, args, args[2].type)
        builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, vector), generate


@generated
def store_narrow(typing: Any, array: Any, at: Any, vector: Any) -> Any:
    """store_narrow(array, at, vector): as `store`, rounded to nearest even if the array is
    bfloat16; a NaN that bfloat16 can hold stays one."""
    is_narrow = is_bfloat16(array)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = _rounded(builder, args[2]) if is_narrow else args[2]
        pointer = _pointer(context, builder, signature, args, numbers.type)
        builder.store(numbers, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, vector), generate


def _rounded(builder: Any, floats: Any) -> Any:
    lanes = floats.type.count
    words = ir.VectorType(ir.IntType(32), lanes)
    bits = builder.bitcast(floats, words)
    half, one, below = (ir.Constant(words, [number] * lanes) for number in (16, 1, 0x7FFF))
    even = builder.and_(builder.lshr(bits, half), one)
    upper = builder.lshr(builder.add(builder.add(bits, below), even), half)
    return builder.trunc(upper, ir.VectorType(ir.IntType(16), lanes))


@part
def copy_numbers(source: Any, at: Any, target: Any, to: Any, count: Any) -> None:
    """target[to : to + count] ← source[at : at + count], rounded if the target alone is bfloat16.
    The compiler makes no vectors of it: it does not know that the rows lie apart."""
    whole = count // LANES * LANES
    for number in range(0, whole, LANES):
        store_narrow(target, to + number, load(source, at + number))
    for number in range(whole, count):
        target[to + number] = narrow(wide(source[at + number]), target)


@generated
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """prefetch(array, at): asks for the memory of array[at], which may lie behind the end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _ask_for(builder, _pointer(context, builder, signature, args, ir.IntType(8)))
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), generate


@generated
def spread(typing: Any, number: Any) -> Any:
    """spread(number): the vector with that number in each lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return in_each_lane(builder, args[0], LANES)

    return Vector(number)(number), generate


@generated
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """fused(a, b, c): a · b + c, rounded once; of three vectors or of three numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fused_values(builder, *args)

    return c(c, c, c), generate


@generated
def multiplied(typing: Any, a: Any, b: Any) -> Any:
    """multiplied(a, b): a · b of two vectors, lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return a(a, a), generate


@generated
def plus(typing: Any, a: Any, b: Any) -> Any:
    """plus(a, b): a + b of two vectors, lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return a(a, a), generate


@generated
def quotient(typing: Any, a: Any, b: Any) -> Any:
    """quotient(a, b): a / b of two vectors, lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return a(a, a), generate


@generated
def greater(typing: Any, a: Any, b: Any) -> Any:
    """greater(a, b): in each lane the greater number; `b` where one is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _greater(builder, *args)

    return a(a, a), generate


@generated
def greatest(typing: Any, vector: Any) -> Any:
    """greatest(vector): the greatest of the lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_folded(builder, args[0], 1, _greater), ir.IntType(32)(0))

    return vector.dtype(vector), generate


@generated
def total(typing: Any, vector: Any) -> Any:
    """total(vector): the sum of the lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_folded(builder, args[0], 1, _sum), ir.IntType(32)(0))

    return vector.dtype(vector), generate


@generated
def store_totals(typing: Any, array: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """store_totals(array, at, a, b, c, d): array[at : at + 4] ← the sums of each one's lanes.

    Each fourth of a vector is added up in two steps, which four vectors share.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = totals_of_four(builder, args[2:])
        pointer = _pointer(context, builder, signature, args, sums.type)
        builder.store(sums, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, a, a, a, a), generate


@generated
def exps(typing: Any, vector: Any) -> Any:
    """exps(vector): exp of each lane, with the bits that `_compiled.exp` has by strict rules; they
    depend on that lane alone."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        series = _exps if vector.dtype == numba.types.float32 else _exact_exps
        return series(builder, args[0])

    return vector(vector), generate


def _exps(builder: Any, x: Any) -> Any:
    """exp(k·log 2 + r) = 2ᵏ·exp(r), |r| ≤ log(2)/2, by its minimax polynomial (Cephes)."""

    def number(value: float) -> Any:
        return ir.Constant(x.type, [value] * x.type.count)

    least, words = number(-64.0), ir.VectorType(ir.IntType(32), x.type.count)
    inside = builder.fcmp_ordered(">=", x, least)
    within = builder.select(inside, x, least)
    within = builder.select(builder.fcmp_ordered("<", within, number(89.0)), within, number(89.0))
    halves = fused_values(builder, within, number(_LOG2_E), number(0.5))
    k = _of_lanes(builder, "llvm.floor", halves)
    r = fused_values(builder, k, number(-0.693359375), within)
    r = fused_values(builder, k, number(2.12194440e-4), r)
    p = number(_EXP_SERIES[0])
    for factor in _EXP_SERIES[1:]:
        p = fused_values(builder, p, r, number(factor))
    p = builder.fadd(fused_values(builder, p, builder.fmul(r, r), r), number(1.0))
    exponent = builder.add(builder.fptosi(k, words), ir.Constant(words, [127] * x.type.count))
    shift = ir.Constant(words, [23] * x.type.count)
    power = builder.bitcast(builder.shl(exponent, shift), x.type)
    beneath = builder.select(builder.fcmp_ordered("<", x, least), number(0.0), x)  # NaN stays
    return builder.select(inside, builder.fmul(p, power), beneath)


def _exact_exps(builder: Any, x: Any) -> Any:
    return _of_lanes(builder, "llvm.exp", x)


def _of_lanes(builder: Any, name: str, x: Any) -> Any:
    """What LLVM's function of that name gives for a vector."""
    signs = ir.FunctionType(x.type, (x.type,))
    name = f"{name}.v{x.type.count}{x.type.element.intrinsic_name}"
    return builder.call(get_or_insert_function(builder.module, signs, name), (x,))


def totals_of_four(builder: Any, vectors: Sequence[Any]) -> Any:
    """The sums of each of four vectors' lanes, as four of LLVM's lanes."""

    def added(x: Any, y: Any, low: Sequence[int], high: Sequence[int]) -> Any:
        return builder.fadd(*(shuffled(builder, x, y, _fourths(part)) for part in (low, high)))

    first = added(vectors[0], vectors[1], (0, 16, 1, 17), (2, 18, 3, 19))
    second = added(vectors[2], vectors[3], (0, 16, 1, 17), (2, 18, 3, 19))
    return _folded(builder, added(first, second, (0, 1, 16, 17), (2, 3, 18, 19)), 4, _sum)


def in_each_lane(builder: Any, number: Any, lanes: int) -> Any:
    """The vector with LLVM's value `number` in each lane."""
    empty = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = builder.insert_element(empty, number, ir.IntType(32)(0))
    return shuffled(builder, first, first, [0] * lanes)


def fused_values(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c of LLVM's values: three vectors of one type, or three numbers."""
    kind = a.type
    size = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    name = f"llvm.fma.{size}{getattr(kind, 'element', kind).intrinsic_name}"
    signs = ir.FunctionType(kind, (kind, kind, kind))
    return builder.call(get_or_insert_function(builder.module, signs, name), (a, b, c))


def prefetch_at(builder: Any, address: Any, closeness: int = 3) -> None:
    """Asks for the memory at LLVM's value `address`, as `prefetch` does: for every cache, or (2)
    from the second one on."""
    _ask_for(builder, builder.inttoptr(address, ir.IntType(8).as_pointer()), closeness)


def _ask_for(builder: Any, pointer: Any, closeness: int = 3) -> None:
    word = ir.IntType(32)
    signs = ir.FunctionType(ir.VoidType(), (pointer.type, word, word, word))
    asked = get_or_insert_function(builder.module, signs, "llvm.prefetch.p0")
    builder.call(asked, (pointer, word(0), word(closeness), word(1)))  # to read, data


def _number(dtype: Any) -> Any:
    if dtype == numba.types.int32:
        return ir.IntType(32)
    return ir.DoubleType() if dtype == numba.types.float64 else ir.FloatType()


def _pointer(context: Any, builder: Any, signature: Any, args: Any, lanes: Any) -> Any:
    """Where the first argument, an array, has the element that the second one names."""
    return pointer_at(context, builder, signature.args[0], args[0], args[1], lanes)


def pointer_at(context: Any, builder: Any, kind: Any, array: Any, at: Any, lanes: Any) -> Any:
    """Where array[at] lies, as a pointer to `lanes`; `kind` is numba's type of the array."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), lanes.as_pointer())


def shuffled(builder: Any, x: Any, y: Any, order: Sequence[int]) -> Any:
    """The lanes of x, from 16 on those of y, in the order given."""
    kind = ir.VectorType(ir.IntType(32), len(order))
    return builder.shuffle_vector(x, y, ir.Constant(kind, list(order)))


def _fourths(part: Sequence[int]) -> list[int]:
    """The choice of lanes that `part` makes in the first fourth, for all four."""
    return [lane + low for low in range(0, LANES, 4) for lane in part]


def _folded(builder: Any, vector: Any, width: int, join: Callable[..., Any]) -> Any:
    """The upper half of the lanes joined to the lower half, until `width` are left."""
    size = vector.type.count
    while size > width:
        size //= 2
        halves = (range(size), range(size, 2 * size))
        vector = join(builder, *(shuffled(builder, vector, vector, half) for half in halves))
    return vector


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


if numba is not None:

    class Vector(numba.types.Type):  # type: ignore[misc]
        """numba's type of a vector of numbers of `dtype`."""

        def __init__(self, dtype: Any, lanes: int = LANES) -> None:
            self.dtype, self.lanes = dtype, lanes
            super().__init__(name=f"Vector({dtype}, {lanes})")

    @register_default(Vector)
    class VectorModel(PrimitiveModel):  # type: ignore[misc]
        """A vector is one LLVM value, in memory as in registers."""

        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, ir.VectorType(_number(kind.dtype), kind.lanes))
