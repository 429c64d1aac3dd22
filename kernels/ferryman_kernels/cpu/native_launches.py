"""Launches of compiled loops that run one after another without Python between them.

At one request the weights of each product push Python's code and numbers out of the nearer caches,
so what Python does between two loops is read again from far away: five times as long as in a cache.
Here a launch is a row of words, and a compiled loop calls launch after launch:

    words     address of the function · its arguments, as numba passes them, 8 bytes each
    table     for each launch, the address of a caller and that of its words

A caller reads the words of all functions of one type, and is compiled once for it. numba passes
an array as owner, parent, size, bytes of an element, address, lengths and strides, and a tuple as
its parts. A launch with arguments of other kinds stays Python's.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from ferryman_kernels.cpu._compiled import numba, on_all_threads
from ferryman_kernels.cpu.launches import RecordedLaunch

if numba is not None:
    from llvmlite import ir
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

MOST_LAUNCHES = 64
"""The most launches of a piece: between two pieces a watcher sees that a call goes on, and another
thread may launch a loop that is shared."""
_WORD_BYTES = 8
_WORD_MASK = (1 << 64) - 1
_DONE = (0, -2)  # numba's codes of a function that has returned: a value, or none
_NO_OWNER = [0, 0]


@dataclass(frozen=True, slots=True)
class LaunchPiece:
    """`run(*args)` repeats so many launches."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    num_launches: int


def launch_pieces(launches: Sequence[RecordedLaunch]) -> Iterator[LaunchPiece]:
    """All launches in their order. Loops that follow each other are one piece; any other launch is
    one by itself."""
    loops: list[NativeLaunch] = []
    for launch in launches:
        native = native_launch(launch)
        if loops and (native is None or len(loops) == MOST_LAUNCHES):
            yield LaunchPiece(native_run(loops), (), len(loops))
            loops = []
        if native is None:
            yield LaunchPiece(launch.run, launch.args, 1)
        else:
            loops.append(native)
    if loops:
        yield LaunchPiece(native_run(loops), (), len(loops))


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """A launch as words; `launch` keeps the memory of its arguments."""

    launch: RecordedLaunch
    caller: int
    words: Any

    @property
    def is_shared(self) -> bool:
        return self.launch.run is not self.launch.loop


@dataclass(frozen=True, slots=True)
class NativeRun:
    """Launches that follow each other: the rows of `table`, which lies at `address`. They run in a
    `turn`."""

    launches: tuple[NativeLaunch, ...]
    table: Any
    address: int
    turn: Callable[[], AbstractContextManager[None]]
    driver: NativeDriver

    def __call__(self) -> None:
        """Raises RuntimeError if a loop fails, as for want of memory."""
        with self.turn():
            done = self.driver.run(len(self.launches), self.address)
        if done < len(self.launches):
            raise RuntimeError(f"a loop has failed: {self.launches[done].launch.loop}")


def native_run(launches: Sequence[NativeLaunch]) -> NativeRun:
    table = np.array([(launch.caller, launch.words.ctypes.data) for launch in launches], np.uint64)
    turn = on_all_threads if any(launch.is_shared for launch in launches) else nullcontext
    return NativeRun(tuple(launches), table, table.ctypes.data, turn, _driver())


def native_launch(launch: RecordedLaunch) -> NativeLaunch | None:
    """The launch as words; None if it is none of a compiled loop, or has other arguments."""
    loop = launch.loop
    if loop is None:
        return None
    kinds = tuple(loop.typeof_pyval(arg) for arg in launch.args)
    compiled = loop.overloads.get(kinds)
    parts = [_words_of(kind, arg) for kind, arg in zip(kinds, launch.args, strict=True)]
    if compiled is None or any(part is None for part in parts):
        return None
    function, signature = compiled.fndesc.llvm_func_name, compiled.signature
    kind = compiled.target_context.call_conv.get_function_type(
        signature.return_type, signature.args
    )
    words = [compiled.library.get_pointer_to_function(function)]
    words += [word for part in parts if part is not None for word in part]
    assert len(words) == len(kind.args) - 1, (len(words), str(kind))  # a result and an error
    return NativeLaunch(launch, _caller(kind).address, np.array(words, np.uint64))


def _words_of(kind: Any, value: Any) -> list[int] | None:
    """A value of numba's type `kind` as its functions take it, or None."""
    types = numba.types
    if isinstance(kind, types.NoneType):
        return [0]
    if isinstance(kind, types.Integer | types.Boolean):
        return [int(value) & _WORD_MASK]
    if isinstance(kind, types.Float):
        code = "<d" if kind.bitwidth == 64 else "<f"
        return [int.from_bytes(struct.pack(code, float(value)), "little")]
    if isinstance(kind, types.BaseTuple):
        parts = [_words_of(part, number) for part, number in zip(kind, value, strict=True)]
        if any(part is None for part in parts):
            return None
        return [word for part in parts if part is not None for word in part]
    if isinstance(kind, types.Array):
        sizes = [value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
        return [*_NO_OWNER, *(size & _WORD_MASK for size in sizes)]
    return None


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """A compiled function, whose memory `library` keeps."""

    address: int
    library: Any


@cache
def _caller(kind: Any) -> CompiledCode:
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
def _driver() -> NativeDriver:
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
