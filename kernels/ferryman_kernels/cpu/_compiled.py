"""Loops compiled for the CPU by numba; without numba the torch reference runs instead.

Loops release the GIL and are cached on disk. Of the relaxed rules of arithmetic only reordered sums
and fused products are allowed, or none (`STRICT`): NaN and infinity keep their meaning. bfloat16 is
passed as uint16, the upper half of a float32.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._loop_cache import cached, compiling, digest_of_sources, shown_name
from ferryman_kernels.cpu.launches import for_many_tokens, launch

try:
    import numba
    from numba import prange
    from numba.extending import intrinsic, overload, register_jitable
except ModuleNotFoundError:
    numba = None
    prange = range

__all__ = [
    "STRICT",
    "Loop",
    "as_array",
    "as_flat",
    "compiled",
    "exp",
    "inlined",
    "is_bfloat16",
    "narrow",
    "numba",
    "on_all_threads",
    "part",
    "prange",
    "row_like",
    "serves",
    "silu",
    "wide",
]

RELAXED = {"reassoc", "contract", "nsz"}
STRICT: set[str] = set()
"""The rules of a loop whose source alone decides about the order of its sums."""
WORTH_SHARING = 1 << 18
"""The number of elements from which the other threads help; one passes them in 0.1 to 0.2 ms."""

WEIGHTS_PER_ELEMENT = 4
"""The weights that a product multiplies in the time of an element if a cache holds them: each takes
0.1 ns. Where memory is read for one token, a weight takes as long as an element (0205)."""

_LEAST_EXPONENT = np.float32(-64.0)
_PACKAGE = Path(__file__).parents[1]

_KNOWN = frozenset((torch.float32, torch.float64, torch.bfloat16))
_LAUNCHING = Lock()  # two threads must never enter numba's work queue at once
_ONCE = nullcontext()
COMPILING_SECONDS, LOOK_SECONDS = 60.0, 0.02


def _layer() -> str:
    """numba's way to threads: those of torch's products, so that nobody waits for a core on which
    the other's threads spin (decision 0105). Without OpenMP's library it has threads of its own."""
    try:
        import numba.np.ufunc.omppool  # noqa: F401
    except ImportError:
        return "workqueue"
    return "omp"


if numba is not None:
    numba.config.THREADING_LAYER = _layer()


def serves(*tensors: Tensor) -> bool:
    """Whether a compiled loop can take these tensors: on the CPU, in a supported dtype."""
    return numba is not None and all(t.is_cpu and t.dtype in _KNOWN for t in tensors)


class Loop:
    """A function of numpy arrays with `prange` in it, shared by as many threads as torch uses."""

    def __init__(self, function: Callable[..., None], relaxed: set[str] = RELAXED) -> None:
        self.function, self.relaxed = function, relaxed

    @cached_property
    def alone(self) -> Any:
        return self._compile(parallel=False)

    @cached_property
    def shared(self) -> Any:
        return self._compile(parallel=True)

    def _compile(self, *, parallel: bool) -> Any:
        options = {
            "nogil": True,
            "fastmath": self.relaxed,
            "error_model": "numpy",
            "parallel": parallel,
        }
        return cached(_named(self.function, "shared" if parallel else "alone"), options)

    def __call__(self, elements: int, *args: Any) -> None:
        """Runs over arrays of about `elements` numbers in all; few elements stay on one thread."""
        if (elements >= WORTH_SHARING or for_many_tokens.get()) and _num_threads() > 1:
            with _ONCE if "shared" in self.__dict__ else _turn(self.shared):
                launch(self.shared, self._on_all_threads, *args)
        else:
            self.on_one_thread(*args)

    def on_one_thread(self, *args: Any) -> None:
        """Runs a loop that has nothing to share."""
        with _ONCE if "alone" in self.__dict__ else _turn(self.alone):
            launch(self.alone, self.alone, *args)

    def _on_all_threads(self, *args: Any) -> None:
        with on_all_threads():
            self.shared(*args)


@contextmanager
def on_all_threads() -> Iterator[None]:
    """For loops that share their work."""
    with _LAUNCHING:
        _set_threads(_num_threads())
        yield


def _num_threads() -> int:
    return min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))


@contextmanager
def _turn(loop: Any) -> Iterator[None]:
    """For the first call of a loop. While one process compiles it, others wait, and then find it in
    the cache: two workers that start together have half of the work each.

    Nobody waits longer than compiling takes: the other one may be stopped.
    """
    path = Path(loop.stats.cache_path or os.devnull, f"{loop.py_func.__qualname__}.lock")
    try:
        file = path.open("wb")
    except OSError:  # there is no cache, so nothing to wait for
        yield
        return
    with file:
        for look in range(round(COMPILING_SECONDS / LOOK_SECONDS)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not look:  # for those who watch this process, this wait is a compilation
                    compiling.info("%s", shown_name(loop.py_func))
                time.sleep(LOOK_SECONDS)
            except OSError:  # a file system without locks
                break
        yield


def _set_threads(threads: int) -> None:
    """For the next loop. numba's first call of this sets the number for torch as well."""
    of_torch = torch.get_num_threads()
    numba.set_num_threads(threads)
    if torch.get_num_threads() != of_torch:
        torch.set_num_threads(of_torch)


def compiled(function: Callable[..., Any]) -> Any:
    """A function for loops to call, compiled once for all of them, by strict rules."""
    options = {"nogil": True, "error_model": "numpy"}
    return function if numba is None else cached(_named(function, "part"), options)


def part(function: Callable[..., Any]) -> Any:
    """A function for loops to call that becomes a part of each, by that loop's rules."""
    return function if numba is None else register_jitable(error_model="numpy")(function)


def inlined(function: Callable[..., Any]) -> Any:
    """As `part`, written out where it is called: for what is called every few hundred
    nanoseconds."""
    if numba is None:
        return function
    return register_jitable(error_model="numpy", inline="always")(function)


def _named(function: Callable[..., None], version: str) -> Callable[..., None]:
    """The same function under a name of its own, with a digest of the package's sources in it.

    The cache on disk asks for the name, the types and the time of the function's own file. With
    one name the version that was compiled first would serve both: a loop for one thread would run
    on all of them. Without the digest a loop would keep parts that another file has changed.
    """
    version = f"{version}_{digest_of_sources(_PACKAGE)[:12]}"
    named = FunctionType(
        function.__code__,
        function.__globals__,
        f"{function.__name__}_{version}",
        function.__defaults__,
        function.__closure__,
    )
    named.__qualname__ = f"{function.__qualname__}_{version}"
    named.__module__ = function.__module__
    return named


def as_array(tensor: Tensor) -> Any:
    """The tensor's memory as a numpy array; bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def as_flat(states: Tensor) -> Any:
    """The memory from the first to the last element of a strided view, as one row."""
    last = sum((n - 1) * step for n, step in zip(states.shape, states.stride(), strict=True))
    return as_array(states.as_strided((last + 1,), (1,)))


@cache
def row_like(dtype: torch.dtype) -> Any:
    """An empty row, by whose type a loop knows how numbers at an address are stored."""
    return as_array(torch.empty(0, dtype=dtype))


def wide(value: Any) -> Any:
    """A number as the loop computes with it: uint16 is read as bfloat16."""
    raise NotImplementedError("only in compiled loops")


def narrow(value: Any, like: Any) -> Any:
    """A computed number as an element of the array `like`, rounded to nearest even."""
    raise NotImplementedError("only in compiled loops")


def exp(value: Any) -> Any:
    """exp for float32 within 2e-7, in a form that vectorises, by strict rules with the same bits
    alone and among vectors; exact for float64.

    Above 88.37 it is infinite, or silu(-1e38) would be -0.6. Below -64 it is 0, so a product with a
    number above 1e-10 is normal or 0: processors multiply subnormal numbers up to a hundred times
    slower. NaN stays NaN.
    """
    raise NotImplementedError("only in compiled loops")


def silu(value: Any) -> Any:
    """value · sigmoid(value), in the dtype of the value."""
    raise NotImplementedError("only in compiled loops")


def is_bfloat16(array_or_number: Any) -> bool:
    return bool(getattr(array_or_number, "dtype", array_or_number) == numba.types.uint16)


def _wide(value: Any) -> Callable[..., Any]:
    if is_bfloat16(value):
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


def _narrow(value: Any, like: Any) -> Callable[..., Any]:
    if not is_bfloat16(like):
        return lambda value, like: value

    def rounded(value: Any, like: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        even = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
        upper = np.uint16(np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
        return upper if value == value else np.uint16(0x7FC0)

    return rounded


def _exp(value: Any) -> Callable[..., Any]:
    if value == numba.types.float64:
        return lambda value: np.exp(value)

    def series(value: Any) -> Any:
        """exp(k·log 2 + r) = 2ᵏ·exp(r), |r| ≤ log(2)/2, by its minimax polynomial (Cephes)."""
        x = value if value > _LEAST_EXPONENT else _LEAST_EXPONENT
        x = x if x < np.float32(89.0) else np.float32(89.0)
        k = np.floor(_fused(x, np.float32(1.44269504), np.float32(0.5)))
        r = _fused(k, np.float32(-0.693359375), x)
        r = _fused(k, np.float32(2.12194440e-4), r)
        p = np.float32(1.9875691500e-4)
        p = _fused(p, r, np.float32(1.3981999507e-3))
        p = _fused(p, r, np.float32(8.3334519073e-3))
        p = _fused(p, r, np.float32(4.1665795894e-2))
        p = _fused(p, r, np.float32(1.6666665459e-1))
        p = _fused(p, r, np.float32(5.0000001201e-1))
        p = _fused(p, r * r, r) + np.float32(1.0)
        power = np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
        low = np.float32(0.0) if value < _LEAST_EXPONENT else value
        return p * power if value >= _LEAST_EXPONENT else low

    return series


def _multiplied_and_added(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once; `_vectors`, which has it too, needs this module."""
    return c(c, c, c), lambda context, builder, signature, args: builder.fma(*args)


_fused: Any = _multiplied_and_added if numba is None else intrinsic(_multiplied_and_added)


def _silu(value: Any) -> Callable[..., Any]:
    # An integer 1 would turn a float32 into a float64, and with it the whole loop.
    if value == numba.types.float64:
        return lambda value: value / (np.float64(1.0) + np.exp(-value))
    return lambda value: value / (np.float32(1.0) + exp(-value))


if numba is not None:
    for function, chosen in ((wide, _wide), (narrow, _narrow), (exp, _exp), (silu, _silu)):
        overload(function, jit_options={"error_model": "numpy"}, strict=False)(chosen)
