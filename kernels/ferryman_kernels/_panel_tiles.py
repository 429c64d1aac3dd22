"""A part of a product whose sums stay in registers: some rows of x by the 64 outputs of a panel.

A step is a word of each row, a float32 or a pair of bfloat16, and 64 words of a packed weight. Sums
are float32, each added to step after step; of a pair the second product first. Three or four rows
are as many sums as registers hold beside the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferryman_kernels._compiled import numba
from ferryman_kernels._lanes import STEP_BYTES, dots_of, words_at
from ferryman_kernels._vectors import LANES, fused_values, generated, in_each_lane, prefetch_at

if numba is not None:
    from llvmlite import ir
    from numba.core.cgutils import alloca_once_value, for_range_slice

__all__ = ["WORD_BYTES", "add_tile"]

WORD_BYTES, _VECTOR_BYTES = 4, 64
_SECOND_CACHE = 2


@generated
def add_tile(
    typing: Any, stored: Any, multiplied: Any, panel: Any, span: Any, rows: Any, inputs: Any,
    sums: Any, ask: Any,
) -> Any:  # fmt: skip
    """add_tile(stored, multiplied, panel, span, rows, inputs, sums, ask): adds the products of the
    steps of `span`, first and end, to sums[rows]: of the panel at that address with the rows of x,
    whose addresses are `inputs`. A row may be named twice.

    `stored` is an element of the weight: uint16 means bfloat16. `multiplied` is the same, or a
    float32 where bfloat16 is widened before; the processor's own product of pairs takes numbers
    below 1.2e-38 for zero, and otherwise gives the same bits. Each step asks for memory at two
    places for the second cache: `ask` is the first step's address, and the bytes to the next one's.
    """
    add = _adding(stored, multiplied)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, panel, span, rows, inputs, sums, ask = args
        starts, own = (
            context.make_array(kind)(context, builder, array).data
            for kind, array in zip(signature.args[5:7], (inputs, sums), strict=True)
        )
        first, end = (builder.extract_value(span, i) for i in range(2))
        asked, stride = (builder.extract_value(ask, i) for i in range(2))
        named = [builder.extract_value(rows, i) for i in range(signature.args[4].count)]
        starts = [builder.load(builder.gep(starts, [row])) for row in named]
        places = [_vectors(builder, _row_of(builder, own, row)) for row in named]
        kept = [[_variable(builder, place) for place in row] for row in places]
        # Loads and stores of a variable within the loop become moves between registers, or none.
        with for_range_slice(builder, first, end, first.type(1)) as (step, _):
            since = builder.mul(builder.sub(step, first), stride)
            _ask(builder, builder.add(asked, since), stride)
            at = builder.add(panel, builder.mul(step, step.type(STEP_BYTES)))
            words = [words_at(builder, place, LANES) for place in _vectors(builder, at)]
            for start, row in zip(starts, kept, strict=True):
                word = _word_of(builder, start, step)
                for weights, variable in zip(words, row, strict=True):
                    found = add(builder, builder.load(variable), weights, word)
                    builder.store(found, variable)
        for row, variables in zip(places, kept, strict=True):
            for place, variable in zip(row, variables, strict=True):
                builder.store(builder.load(variable), _floats(builder, place), align=4)
        return context.get_dummy_value()

    size = numba.types.intp
    args = stored, multiplied, size, span, rows, inputs, sums, ask
    return numba.types.void(*args), generate


def _adding(stored: Any, multiplied: Any) -> Callable[..., Any]:
    """The function that adds to a vector of sums what a vector of weights and a word give."""
    if stored == numba.types.float32:
        return _add_floats
    return _add_dots if multiplied == stored else _add_pairs


def _add_floats(builder: Any, sums: Any, words: Any, word: Any) -> Any:
    inputs = in_each_lane(builder, builder.bitcast(word, ir.FloatType()), LANES)
    return fused_values(builder, builder.bitcast(words, sums.type), inputs, sums)


def _add_dots(builder: Any, sums: Any, words: Any, word: Any) -> Any:
    return dots_of(builder, sums, words, in_each_lane(builder, word, LANES))


def _add_pairs(builder: Any, sums: Any, words: Any, word: Any) -> Any:
    """In the order of the processor's own instruction, so that both ways give the same bits."""
    inputs = in_each_lane(builder, word, LANES)
    shift = ir.Constant(words.type, [16] * LANES)
    upper = ir.Constant(words.type, [0xFFFF0000] * LANES)
    second = builder.and_(words, upper), builder.and_(inputs, upper)
    first = builder.shl(words, shift), builder.shl(inputs, shift)
    for weights, numbers in (second, first):
        both = builder.bitcast(weights, sums.type), builder.bitcast(numbers, sums.type)
        sums = fused_values(builder, both[0], both[1], sums)
    return sums


def _ask(builder: Any, address: Any, stride: Any) -> None:
    prefetch_at(builder, address, _SECOND_CACHE)
    half = builder.ashr(stride, stride.type(1))
    prefetch_at(builder, builder.add(address, half), _SECOND_CACHE)


def _variable(builder: Any, place: Any) -> Any:
    """The vector of sums at an address, in a variable that becomes a register."""
    return alloca_once_value(builder, builder.load(_floats(builder, place), align=4))


def _row_of(builder: Any, sums: Any, row: Any) -> Any:
    first = builder.ptrtoint(sums, row.type)
    return builder.add(first, builder.mul(row, row.type(STEP_BYTES)))


def _vectors(builder: Any, address: Any) -> list[Any]:
    """The addresses of the vectors of 64 words."""
    places = range(0, STEP_BYTES, _VECTOR_BYTES)
    return [builder.add(address, address.type(place)) for place in places]


def _floats(builder: Any, address: Any) -> Any:
    vector = ir.VectorType(ir.FloatType(), LANES)
    return builder.inttoptr(address, vector.as_pointer())


def _word_of(builder: Any, start: Any, step: Any) -> Any:
    """The word of a step in the row that begins at an address."""
    place = builder.add(start, builder.mul(step, step.type(WORD_BYTES)))
    return builder.load(builder.inttoptr(place, ir.IntType(32).as_pointer()), align=2)
