"""Functions of a few instructions that call compiled loops, one with its words or many in turn."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from ferryman_kernels.cpu._compiled import numba

if numba is not None:
    from llvmlite import ir
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

_WORD_BYTES = 8
_DONE = (0, -2)  # numba's codes of a function that has returned: a value, or none


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """A compiled function, whose memory `library` keeps."""

    address: int
    library: Any


@cache
def caller_of(kind: Any) -> CompiledCode:
    """The caller of functions of LLVM's type `kind`."""
    # Symbols of one process are told apart by their names.
    name = f"ferryman_call_{sha256(str(kind).encode()).hexdigest()}"
    return _compiled(name, lambda module: _call_with_words(module, name, kind))


def _call_with_words(module: Any, name: str, kind: Any) -> None:
    """A function that calls the one at the first of the words at its argument, with the others."""
    word = ir.IntType(64)
    caller = ir.Function(module, ir.FunctionType(ir.IntType(32), (word,)), name)
    builder = ir.IRBuilder(caller.append_basic_block())

    def read(index: int, part: Any) -> Any:
        place = builder.add(caller.args[0], word(index * _WORD_BYTES))
        return builder.load(builder.inttoptr(place, part.as_pointer()))

    function = read(0, kind.as_pointer())
    result, error = (builder.alloca(part.pointee) for part in kind.args[:2])
    args = [read(1 + index, part) for index, part in enumerate(kind.args[2:])]
    builder.ret(builder.call(function, [result, error, *args]))


@dataclass(frozen=True, slots=True)
class NativeDriver:
    """`run`, whose code is `code`."""

    run: Callable[[int, int], int]
    code: CompiledCode


@cache
def driver() -> NativeDriver:
    """run(count, table): runs so many launches of the table at an address, until one fails; the
    number of those that are done. Python's other threads run meanwhile."""
    name = "ferryman_run_launches"
    code = _compiled(name, lambda module: _call_in_turn(module, name))
    signs = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    return NativeDriver(signs(code.address), code)


def _call_in_turn(module: Any, name: str) -> None:
    word, status = ir.IntType(64), ir.IntType(32)
    driver = ir.Function(module, ir.FunctionType(word, (word, word)), name)
    count, table = driver.args
    first, again, end = (driver.append_basic_block() for _ in range(3))
    builder = ir.IRBuilder(first)
    builder.cbranch(builder.icmp_signed(">", count, word(0)), again, end)
    builder.position_at_end(again)
    index = builder.phi(word)
    row = builder.add(table, builder.mul(index, word(2 * _WORD_BYTES)))
    rows = builder.inttoptr(row, word.as_pointer())
    kind = ir.FunctionType(status, (word,)).as_pointer()
    caller = builder.inttoptr(builder.load(rows), kind)
    words = builder.load(builder.gep(rows, [ir.IntType(32)(1)]))
    code = builder.call(caller, [words])
    # A loop that has failed ends the run: those after it would read what it has not written.
    is_done = builder.or_(*(builder.icmp_signed("==", code, status(done)) for done in _DONE))
    following = builder.add(index, word(1))
    goes_on = builder.and_(is_done, builder.icmp_signed("<", following, count))
    done = builder.select(is_done, following, index)
    builder.cbranch(goes_on, again, end)
    index.add_incoming(word(0), first)
    index.add_incoming(following, again)
    builder.position_at_end(end)
    total = builder.phi(word)
    total.add_incoming(word(0), first)
    total.add_incoming(done, again)
    builder.ret(total)


def _compiled(name: str, build: Callable[[Any], None]) -> CompiledCode:
    """The function `name` that `build` writes into a module."""
    with global_compiler_lock:
        library = cpu_target.target_context.codegen().create_library(name)
        module = library.create_ir_module(name)
        build(module)
        library.add_ir_module(module)
        library.finalize()
        return CompiledCode(library.get_pointer_to_function(name), library)
