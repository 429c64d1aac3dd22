"""int8 codes that become pairs of bfloat16 on their way to the processor's products.

A panel has 32 outputs: code[input][output]. A step is two inputs, 64 bytes of codes. bfloat16 holds
every code exactly.
"""

from __future__ import annotations

from typing import Any

from ferryman_kernels._compiled import numba
from ferryman_kernels._vectors import generated, prefetch_at

if numba is not None:
    from llvmlite import ir

__all__ = ["PAIRS_BYTES", "STEP_BYTES", "WIDTH", "widen_codes"]

WIDTH = 32
"""The outputs of a panel."""
STEP_BYTES, PAIRS_BYTES = 2 * WIDTH, 4 * WIDTH
"""The bytes of a step, in codes and as pairs."""
# Memory is asked for so many bytes ahead: the processor does not look beyond a page by itself.
_AHEAD = 4096


@generated
def widen_codes(typing: Any, codes: Any, pairs: Any) -> Any:
    """widen_codes(codes, pairs): writes the step at the address `codes` as pairs to that of
    `pairs`, and asks for codes further on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch_at(builder, builder.add(args[0], args[0].type(_AHEAD)))
        words = _pairs_of(builder, args[0])
        place = builder.inttoptr(args[1], words.type.as_pointer())
        builder.store(words, place, align=4)
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp, numba.types.intp), generate


def _pairs_of(builder: Any, address: Any) -> Any:
    """The step at an address as 32 words, the first input's bfloat16 in the lower half of each."""
    words = ir.VectorType(ir.IntType(32), WIDTH)

    def widened(at: Any) -> Any:
        place = builder.inttoptr(at, ir.VectorType(ir.IntType(8), WIDTH).as_pointer())
        codes = builder.sext(builder.load(place, align=1), words)
        floats = builder.sitofp(codes, ir.VectorType(ir.FloatType(), WIDTH))
        return builder.bitcast(floats, words)

    first = builder.lshr(widened(address), ir.Constant(words, [16] * WIDTH))
    return builder.or_(first, widened(builder.add(address, address.type(WIDTH))))
