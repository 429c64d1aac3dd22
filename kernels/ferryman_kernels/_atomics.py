"""Words of memory that two threads of compiled loops read and write: `array` is one row of int64.

A load sees what was written before the store, swap or addition whose value it reads; so a job
written before its ticket is whole for every thread that has taken the ticket.
"""

from __future__ import annotations

import platform
from typing import Any

from ferryman_kernels._compiled import numba
from ferryman_kernels._vectors import generated, pointer_at

if numba is not None:
    from llvmlite import ir
    from numba.core.cgutils import get_or_insert_function

__all__ = ["add", "loaded", "pause", "stored", "swapped", "yield_core"]

_WORD_BYTES = 8
_HAS_PAUSE = platform.machine().lower() in ("x86_64", "amd64")


@generated
def loaded(typing: Any, array: Any, at: Any) -> Any:
    """loaded(array, at): array[at]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(context, builder, signature, args), "acquire", _WORD_BYTES)

    return numba.types.int64(array, numba.types.intp), generate


@generated
def stored(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """stored(array, at, value): array[at] ← value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word(context, builder, signature, args)
        builder.store_atomic(args[2], word, "release", _WORD_BYTES)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, numba.types.int64), generate


@generated
def add(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """add(array, at, value): array[at] ← array[at] + value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word(context, builder, signature, args)
        builder.atomic_rmw("add", word, args[2], "acq_rel")
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, numba.types.int64), generate


@generated
def swapped(typing: Any, array: Any, at: Any, expected: Any, value: Any) -> Any:
    """swapped(array, at, expected, value): whether array[at] was `expected`, and is `value` now."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word(context, builder, signature, args)
        found = builder.cmpxchg(word, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    word = numba.types.int64
    return numba.types.boolean(array, numba.types.intp, word, word), generate


@generated
def pause(typing: Any) -> Any:
    """pause(): a moment for a thread that looks at a word again and again."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _HAS_PAUSE:
            signs = ir.FunctionType(ir.VoidType(), ())
            name = "llvm.x86.sse2.pause"
            builder.call(get_or_insert_function(builder.module, signs, name), ())
        return context.get_dummy_value()

    return numba.types.void(), generate


@generated
def yield_core(typing: Any) -> Any:
    """yield_core(): lets another thread run on this core, if one waits (sched_yield of libc)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        signs = ir.FunctionType(ir.IntType(32), ())
        builder.call(get_or_insert_function(builder.module, signs, "sched_yield"), ())
        return context.get_dummy_value()

    return numba.types.void(), generate


def _word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return pointer_at(context, builder, signature.args[0], args[0], args[1], ir.IntType(64))
