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

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ferryman_kernels.cpu._compiled import numba, on_all_threads
from ferryman_kernels.cpu._loop_cache import shown_name
from ferryman_kernels.cpu._native_callers import NativeDriver, caller_of, driver
from ferryman_kernels.cpu.launches import RecordedLaunch

log = logging.getLogger(__name__)

MOST_LAUNCHES = 64
"""The most launches of a piece: between two pieces a watcher sees that a call goes on, and another
thread may launch a loop that is shared."""
_WORD_BITS = 64
_WORD_MASK = (1 << _WORD_BITS) - 1
_FLOAT_CODES = {32: "<f", 64: "<d"}
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
    return NativeRun(tuple(launches), table, table.ctypes.data, turn, driver())


def native_launch(launch: RecordedLaunch) -> NativeLaunch | None:
    """The launch as words; None if it is none of a compiled loop, or has other arguments."""
    loop = launch.loop
    if loop is None:
        return None
    kinds = tuple(_kind_of(loop, arg) for arg in launch.args)
    native = _native_loop(loop, kinds)
    parts = [_words_of(kind, arg) for kind, arg in zip(kinds, launch.args, strict=True)]
    if native is None or any(part is None for part in parts):
        return None
    words = [native.address, *(word for part in parts if part is not None for word in part)]
    if not native.address or len(words) != native.num_words:
        _report(loop)
        return None
    return NativeLaunch(launch, native.caller, np.array(words, np.uint64))


@dataclass(frozen=True, slots=True)
class NativeLoop:
    """A loop for arguments of some kinds: the address of its function, 0 if there is none, and that
    of the caller of such functions; a launch has `num_words` words."""

    address: int
    caller: int
    num_words: int


@cache
def _native_loop(loop: Any, kinds: tuple[Any, ...]) -> NativeLoop | None:
    """The loop as it was compiled for these kinds, None if it was not. A launch has compiled what
    it runs, so later ones of the same kinds find the same."""
    compiled = loop.overloads.get(kinds)
    if compiled is None:
        return None
    signature = compiled.signature
    kind = compiled.target_context.call_conv.get_function_type(
        signature.return_type, signature.args
    )
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    # Not a result and an error, but the function itself.
    return NativeLoop(address, caller_of(kind).address, len(kind.args) - 1)


@cache
def _report(loop: Any) -> None:
    log.warning("%s is launched from Python: numba passes other words", shown_name(loop.py_func))


def _kind_of(loop: Any, value: Any) -> Any:
    """numba's type of an argument. Most are whole numbers, whose type numba is long to find."""
    if type(value) is int and value.bit_length() < _WORD_BITS:
        return numba.types.int64
    return loop.typeof_pyval(value)


def _words_of(kind: Any, value: Any) -> list[int] | None:
    """A value of numba's type `kind` as its functions take it, or None."""
    if type(value) is int:
        return [value & _WORD_MASK]
    types = numba.types
    if isinstance(kind, types.NoneType):
        return [0]
    if isinstance(kind, types.Integer | types.Boolean):
        return [int(value) & _WORD_MASK]
    if isinstance(kind, types.Float):
        code = _FLOAT_CODES.get(kind.bitwidth)
        if code is None:
            return None
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
