"""A part of a product whose sums stay in registers: some rows of x by the 64 outputs of a panel.

A step is a word of each row and 64 words of a panel. A word is a float32 or a pair of bfloat16.
Sums are float32, each added to step after step, of a pair the second product first. Three or four
rows are enough sums for a processor to multiply without a wait; six are as many as registers hold
beside the panel's words, and load each word less often.

Of a panel of int8 codes a step is a quad of each output: it becomes two or four words in registers,
which are added one after the other, as if they had been stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferryman_kernels.cpu._code_quads import QUAD, floats_of_quads, pairs_of_quads
from ferryman_kernels.cpu._compiled import inlined, numba, part
from ferryman_kernels.cpu._lanes import STEP_BYTES, dots_of, words_at
from ferryman_kernels.cpu._vectors import LANES, fused_values, generated, in_each_lane, prefetch_at

if numba is not None:
    from llvmlite import ir
    from numba.core.cgutils import alloca_once_value, for_range_slice


RUN, LONG_RUN = 32, 64
"""Steps that all rows take before the next steps: 8 or 16 KiB, which the nearest cache holds. Many
rows repay more, since sums are then loaded and stored less often."""
PANEL_AHEAD_BYTES = 8192
"""How far ahead a step asks for memory."""
MOST_ASKING = 4
"""The first groups of rows, which ask for memory."""

MANY = 16
"""The most rows that take the shorter run."""
WORD_BYTES, _VECTOR_BYTES, _ADDRESS_BYTES = 4, 64, 8
_SECOND_CACHE = 2


@generated
def add_tile(
    typing: Any, stored: Any, multiplied: Any, panel: Any, span: Any, rows: Any, inputs: Any,
    sums: Any, ask: Any,
) -> Any:  # fmt: skip
    """add_tile(stored, multiplied, panel, span, rows, inputs, sums, ask): adds the products of the
    steps of `span`, first and end, to sums[rows]: of the panel at that address with rows of x. The
    addresses of these are at the address `inputs`, the sums, 64 a row, at that of `sums`. A row may
    be named twice.

    `stored` is an element of the weight: uint16 means bfloat16. `multiplied` is the same, or
    float32 where both numbers are widened in registers; the processor's own product of pairs takes
    numbers below 1.2e-38 for zero, and otherwise gives the same bits.

    Each step asks for memory, for the second cache, in two parts: `ask` is the first step's
    address, and the bytes to the next one's.
    """
    add, taken = _way(stored, multiplied)
    size = numba.types.intp
    args = stored, multiplied, size, span, rows, size, size, ask
    return numba.types.void(*args), _tile(add, taken, taken, 1, 2)


@generated
def add_coded_tile(
    typing: Any, widened: Any, multiplied: Any, panel: Any, span: Any, rows: Any, inputs: Any,
    sums: Any, ask: Any,
) -> Any:  # fmt: skip
    """add_coded_tile(widened, multiplied, panel, span, rows, inputs, sums, ask): the same of a
    panel of quads of codes, whose elements become `widened` in registers; it asks for memory in
    four parts."""
    add, taken = _way(widened, multiplied)
    words, weights = QUAD, floats_of_quads
    if widened == numba.types.uint16:
        words, weights = QUAD // 2, pairs_of_quads if multiplied == widened else _seconds_and_firsts
    size = numba.types.intp
    args = widened, multiplied, size, span, rows, size, size, ask
    return numba.types.void(*args), _tile(add, weights, taken, words, 4)


Taken = Callable[[Any, Any], list[Any]]
"""A function of LLVM's builder and a vector of words: the vectors to multiply, in their order."""


def _tile(
    add: Callable[..., Any], weights: Taken, inputs: Taken, words: int, parts: int
) -> Callable[..., Any]:
    """The instructions of a tile. A step has so many `words` of each row; a vector of the panel
    becomes those of `weights`, and a row's words become `inputs`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), LANES)
        _, _, panel, span, rows, addresses, sums, ask = args
        first, end = (builder.extract_value(span, i) for i in range(2))
        asked, stride = (builder.extract_value(ask, i) for i in range(2))
        named = [builder.extract_value(rows, i) for i in range(signature.args[4].count)]
        starts = [_start_of(builder, addresses, row) for row in named]
        places = [_vectors(builder, _row_of(builder, sums, row)) for row in named]
        kept = [[_variable(builder, place, vector) for place in row] for row in places]
        # Loads and stores of a variable within the loop become moves between registers, or none.
        with for_range_slice(builder, first, end, first.type(1)) as (step, _):
            since = builder.mul(builder.sub(step, first), stride)
            _ask(builder, builder.add(asked, since), stride, parts)
            at = builder.add(panel, builder.mul(step, step.type(STEP_BYTES)))
            factors = [
                weights(builder, words_at(builder, place, LANES)) for place in _vectors(builder, at)
            ]
            for start, row in zip(starts, kept, strict=True):
                spread = _words_of(builder, start, step, words)
                numbers = [number for word in spread for number in inputs(builder, word)]
                for of_vector, variable in zip(factors, row, strict=True):
                    total = builder.load(variable)
                    for factor, number in zip(of_vector, numbers, strict=True):
                        total = add(builder, total, factor, number)
                    builder.store(total, variable)
        for row, variables in zip(places, kept, strict=True):
            for place, variable in zip(row, variables, strict=True):
                builder.store(builder.load(variable), _pointer(builder, place, vector), align=4)
        return context.get_dummy_value()

    return generate


def _way(stored: Any, multiplied: Any) -> tuple[Callable[..., Any], Taken]:
    """The function that adds to a vector of sums what words of weights and of inputs give, and what
    becomes of words before. Both ways of pairs give the same bits."""
    if multiplied == numba.types.float32:
        return _add_floats, _as_they_are if stored == multiplied else _second_and_first
    return dots_of, _as_they_are


def _add_floats(builder: Any, sums: Any, words: Any, inputs: Any) -> Any:
    factors, numbers = (builder.bitcast(vector, sums.type) for vector in (words, inputs))
    return fused_values(builder, factors, numbers, sums)


def _as_they_are(builder: Any, words: Any) -> list[Any]:
    return [words]


def _second_and_first(builder: Any, pairs: Any) -> list[Any]:
    """The numbers of pairs as float32, in the order of the processor's own instruction."""
    upper = ir.Constant(pairs.type, [0xFFFF0000] * LANES)
    return [
        builder.and_(pairs, upper),
        builder.shl(pairs, ir.Constant(pairs.type, [16] * LANES)),
    ]


def _seconds_and_firsts(builder: Any, quads: Any) -> list[Any]:
    """The numbers of quads of codes as float32, in the order of their pairs."""
    first, second, third, fourth = floats_of_quads(builder, quads)
    return [second, first, fourth, third]


def _ask(builder: Any, address: Any, stride: Any, parts: int) -> None:
    fraction = builder.sdiv(stride, stride.type(parts))
    for _ in range(parts):
        prefetch_at(builder, address, _SECOND_CACHE)
        address = builder.add(address, fraction)


def _variable(builder: Any, place: Any, vector: Any) -> Any:
    """The vector of sums at an address, in a variable that becomes a register."""
    return alloca_once_value(builder, builder.load(_pointer(builder, place, vector), align=4))


def _row_of(builder: Any, sums: Any, row: Any) -> Any:
    return builder.add(sums, builder.mul(row, row.type(STEP_BYTES)))


def _start_of(builder: Any, inputs: Any, row: Any) -> Any:
    place = builder.add(inputs, builder.mul(row, row.type(_ADDRESS_BYTES)))
    return builder.load(builder.inttoptr(place, place.type.as_pointer()))


def _vectors(builder: Any, address: Any) -> list[Any]:
    """The addresses of the vectors of 64 words."""
    places = range(0, STEP_BYTES, _VECTOR_BYTES)
    return [builder.add(address, address.type(place)) for place in places]


def _pointer(builder: Any, address: Any, vector: Any) -> Any:
    return builder.inttoptr(address, vector.as_pointer())


def _words_of(builder: Any, start: Any, step: Any, count: int) -> list[Any]:
    """The `count` words of a step in the row that begins at an address, each in every lane."""
    place = builder.add(start, builder.mul(step, step.type(count * WORD_BYTES)))
    kind = ir.IntType(32).as_pointer()
    places = [builder.add(place, place.type(word * WORD_BYTES)) for word in range(count)]
    words = (builder.load(builder.inttoptr(address, kind), align=2) for address in places)
    return [in_each_lane(builder, word, LANES) for word in words]


@inlined
def add_span(
    stored: Any, multiplied: Any, panel: Any, span: Any, count: Any, inputs: Any, sums: Any,
    asked: Any, stride: Any,
) -> None:  # fmt: skip
    """As `add_tile`, for `count` rows. The steps of the first groups of rows ask for memory from
    `asked` on, `stride` bytes a step."""
    size, own = (span[1] - span[0]) * stride, panel + span[0] * STEP_BYTES
    sixes = count // 6 if count > MANY else 0
    for group in range(sixes):
        ask = (asked + group * size, stride) if group < MOST_ASKING else (own, 0)
        row = 6 * group
        six = row, row + 1, row + 2, row + 3, row + 4, row + 5
        add_tile(stored, multiplied, panel, span, six, inputs, sums, ask)
    rest, last = count - 6 * sixes, count - 1
    groups = (rest + 3) // 4
    fours = max(0, rest - 3 * groups)
    for group in range(groups):
        ask = (own, 0)
        if sixes == 0 and group < MOST_ASKING:
            ask = asked + group * size, stride
        row = 6 * sixes + 3 * group + min(group, fours)
        # A row that is missing is the last one again: with fewer products the loop overtakes the
        # processor's prefetching, and was slower by a fifth.
        rows = row, min(row + 1, last), min(row + 2, last)
        if group < fours:
            add_tile(stored, multiplied, panel, span, (*rows, row + 3), inputs, sums, ask)
        else:
            add_tile(stored, multiplied, panel, span, rows, inputs, sums, ask)


@part
def stride_of_asking(step_bytes: Any, rows: Any) -> Any:
    """The bytes that each step of each asking group asks for, so that together they ask for at
    least as much as they read."""
    groups = (rows + 3) // 4
    if groups == 1:
        return step_bytes
    return step_bytes // (2 if groups < MOST_ASKING else MOST_ASKING)
