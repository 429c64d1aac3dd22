"""Triton if it is installed; without it CPU tensors still take their own path.

A kernel is compiled at its first launch and not when its module is imported; under
TRITON_INTERPRET=1 it is given to the interpreter instead. Triton is imported then, too: a worker on
the CPU would hold its 70 MB for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

__all__ = [
    "Kernel",
    "KernelPart",
    "aligned",
    "cdiv",
    "dot_type",
    "laid_out",
    "next_power_of_two",
    "shared_bytes",
    "tl",
    "warps_of_row",
    "wide_type",
    "with_whole_rows",
]


class _Language:
    """`triton.language`, imported when something in it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("triton.language"), name)


if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = _Language()


class KernelPart:
    """A function in Triton's language that kernels call by its name in their module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.function.__name__} is called by kernels alone")


class Kernel:
    """A function in Triton's language: `kernel[grid](...)` launches it.

    Triton compiles it anew where an integer becomes 1 or a multiple of 16, but for those that are
    in `any_of`: a count of rows in there never decides how a row is computed.
    """

    def __init__(self, function: Callable[..., None], any_of: tuple[str, ...] = ()) -> None:
        self._function = function
        self.any_of = any_of
        self.__doc__ = function.__doc__

    @classmethod
    def for_any(cls, *names: str) -> Callable[[Callable[..., None]], Kernel]:
        """A kernel that is compiled once for all values of the integers `names`."""
        return lambda function: cls(function, names)

    @cached_property
    def function(self) -> Callable[..., None]:
        """The function as Triton reads it. Raises RuntimeError without Triton."""
        try:
            language = import_module("triton.language")
        except ModuleNotFoundError:
            raise RuntimeError("tensors on a CUDA device need the package triton") from None
        # Triton looks a kernel's names up in its module, and knows its language by the module.
        names = self._function.__globals__
        names["tl"] = language
        for name, value in list(names.items()):
            if isinstance(value, KernelPart):
                value.function.__globals__["tl"] = language  # it may be another module's
                names[name] = import_module("triton").jit(value.function)
        return self._function

    @cached_property
    def compiled(self) -> Any:
        return import_module("triton").jit(self.function, do_not_specialize=list(self.any_of))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compiled[grid]


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


HOPPER_SHARED_BYTES = 227 * 1024


@cache
def shared_bytes(device: torch.device) -> int:
    """The shared memory that a block may have on a card; as on Hopper where there is none, because
    kernels are compiled and interpreted for it."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def warps_of_row(block: int) -> int:
    """The warps of a program that computes a whole row in a block of so many numbers."""
    return min(16, max(1, block // 512))


def wide_type(dtype: torch.dtype) -> Any:
    """The dtype in which a kernel computes on `dtype`: `wide_dtype` as a type of Triton."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def dot_type(operand: torch.Tensor) -> Any:
    """The type of the operands of `tl.dot`. The interpreter (CPU tensors) has no bfloat16."""
    narrow = operand.device.type == "cuda" and operand.dtype == torch.bfloat16
    return tl.bfloat16 if narrow else tl.float32


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it, without gaps and `aligned`, as a new tensor lies."""
    return aligned(x.contiguous())


def with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """x [rows, length], or a copy of it, with the numbers of a row side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it from a multiple of 16 bytes on: a kernel is compiled anew for other
    addresses."""
    if x.storage_offset() * x.itemsize % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
