"""Sums of 64 numbers at a time that stay in registers, for loops over a packed weight.

numba's own vectoriser keeps such sums in memory, which halved the speed of a product with one
token. Each step is one fused multiplication and addition by lane, in the order in which the loop
asks for it, so the bits of a sum follow from its loop alone. A weight is read at its address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferryman_kernels._compiled import RELAXED

try:
    import numba
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic, models, overload, register_model
except ModuleNotFoundError:
    numba = None

__all__ = [
    "LANES",
    "STEP_BYTES",
    "add_codes",
    "add_step",
    "no_sums",
    "part",
    "steps_of",
    "store",
    "total",
]

LANES = 64
"""Outputs that are summed at once: the width of a panel of a packed weight."""
STEP_BYTES = 256
"""Bytes that one step reads: a float32, or a pair of bfloat16, for each lane."""


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiled loops call."""
    if numba is None:
        return function
    compiled: Callable[..., Any] = numba.njit(fastmath=RELAXED, error_model="numpy")(function)
    return compiled


def steps_of(like: Any, row: Any) -> Any:
    """The steps of a row of inputs; `like` is an element of the weight: uint16 means bfloat16."""
    raise NotImplementedError("only in compiled loops")


def add_step(like: Any, sums: Any, address: Any, row: Any, step: Any) -> Any:
    """`sums` with the products of the inputs of `step` of `row`, float32, and the weights at
    `address`, added one input after the other."""
    raise NotImplementedError("only in compiled loops")


def add_codes(sums: Any, codes: Any, at: Any, x: Any, first: Any) -> Any:
    """`sums` with codes[at + i] · x[first + i] added in lane i; int8 codes and float32 x, flat."""
    raise NotImplementedError("only in compiled loops")


def total(sums: Any) -> Any:
    """The sum of all lanes: halves are added until one number is left."""
    raise NotImplementedError("only in compiled loops")


def no_sums() -> Any:
    """A zero in each lane."""
    raise NotImplementedError("only in compiled loops")


def store(sums: Any, array: Any) -> None:
    """Writes the lanes to `array` [64] of float32."""
    raise NotImplementedError("only in compiled loops")


if numba is not None:

    class Lanes(types.Type):
        """64 numbers in float32."""

        def __init__(self) -> None:
            super().__init__("Lanes")

    _LANES = Lanes()
    _WORDS = ir.VectorType(ir.IntType(32), LANES)
    _FLOATS = ir.VectorType(ir.FloatType(), LANES)

    @register_model(Lanes)
    class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, _FLOATS)

    def _in_each_lane(builder: Any, number: Any) -> Any:
        first = ir.Constant(ir.IntType(32), 0)
        nothing = ir.Constant(_FLOATS, ir.Undefined)
        one = builder.insert_element(nothing, number, first)
        return builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * LANES))

    def _fused(builder: Any, weights: Any, numbers: Any, sums: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        name = f"llvm.fma.v{LANES}f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [weights, numbers, sums])

    def _load(builder: Any, address: Any) -> Any:
        return builder.load(builder.inttoptr(address, _WORDS.as_pointer()), align=4)

    @intrinsic  # type: ignore[untyped-decorator]
    def _zeros(_: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return ir.Constant(_FLOATS, [0.0] * LANES)

        return _LANES(), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def _add_floats(_: Any, sums: Any, address: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            sums, address, number = given
            weights = builder.bitcast(_load(builder, address), _FLOATS)
            return _fused(builder, weights, _in_each_lane(builder, number), sums)

        return _LANES(_LANES, types.intp, types.float32), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def _add_pairs(_: Any, sums: Any, address: Any, first: Any, second: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            sums, address, first, second = given
            words = _load(builder, address)
            low = builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
            high = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
            first, second = _in_each_lane(builder, first), _in_each_lane(builder, second)
            sums = _fused(builder, builder.bitcast(low, _FLOATS), first, sums)
            return _fused(builder, builder.bitcast(high, _FLOATS), second, sums)

        return _LANES(_LANES, types.intp, types.float32, types.float32), generate

    def _load_from(context: Any, builder: Any, kind: Any, array: Any, at: Any, lanes: Any) -> Any:
        first = builder.gep(context.make_array(kind)(context, builder, array).data, [at])
        return builder.load(builder.bitcast(first, lanes.as_pointer()), align=1)

    @intrinsic  # type: ignore[untyped-decorator]
    def _add_codes(_: Any, sums: Any, codes: Any, at: Any, x: Any, first: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            sums, codes, at, x, first = given
            kinds = signature.args[1], signature.args[3]
            bytes_ = ir.VectorType(ir.IntType(8), LANES)
            stored = _load_from(context, builder, kinds[0], codes, at, bytes_)
            numbers = _load_from(context, builder, kinds[1], x, first, _FLOATS)
            wide_codes = builder.sitofp(builder.sext(stored, _WORDS), _FLOATS)
            return _fused(builder, wide_codes, numbers, sums)

        return _LANES(_LANES, codes, types.intp, x, types.intp), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def _total(_: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            (left,), width = given, LANES
            while width > 1:
                width //= 2
                order = ir.VectorType(ir.IntType(32), width)
                halves = [
                    builder.shuffle_vector(
                        left, left, ir.Constant(order, list(range(i, i + width)))
                    )
                    for i in (0, width)
                ]
                left = builder.fadd(*halves)
            return builder.extract_element(left, ir.Constant(ir.IntType(32), 0))

        return types.float32(_LANES), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def _store(_: Any, sums: Any, array: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            at = context.make_array(signature.args[1])(context, builder, given[1]).data
            builder.store(given[0], builder.bitcast(at, _FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(sums, array), generate

    def _holds_pairs(like: Any) -> bool:
        return bool(like == types.uint16)

    @overload(steps_of, strict=False)  # type: ignore[untyped-decorator]
    def _steps_of(like: Any, row: Any) -> Any:
        if _holds_pairs(like):
            return lambda like, row: row.shape[0] // 2
        return lambda like, row: row.shape[0]

    @overload(add_step, strict=False)  # type: ignore[untyped-decorator]
    def _add_step(like: Any, sums: Any, address: Any, row: Any, step: Any) -> Any:
        if _holds_pairs(like):
            return lambda like, sums, address, row, step: _add_pairs(
                sums, address, row[2 * step], row[2 * step + 1]
            )
        return lambda like, sums, address, row, step: _add_floats(sums, address, row[step])

    @overload(no_sums, strict=False)  # type: ignore[untyped-decorator]
    def _no_sums() -> Any:
        return lambda: _zeros()

    @overload(store, strict=False)  # type: ignore[untyped-decorator]
    def _stored(sums: Any, array: Any) -> Any:
        return lambda sums, array: _store(sums, array)

    @overload(add_codes, strict=False)  # type: ignore[untyped-decorator]
    def _codes_added(sums: Any, codes: Any, at: Any, x: Any, first: Any) -> Any:
        return lambda sums, codes, at, x, first: _add_codes(sums, codes, at, x, first)

    @overload(total, strict=False)  # type: ignore[untyped-decorator]
    def _totalled(sums: Any) -> Any:
        return lambda sums: _total(sums)
