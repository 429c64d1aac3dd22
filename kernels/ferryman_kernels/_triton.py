"""Triton if it is installed; without it CPU tensors still take their own path.

A kernel is compiled at its first launch and not when its module is imported; under
TRITON_INTERPRET=1 it is given to the interpreter instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None
    tl = None

__all__ = [
    "Kernel",
    "cdiv",
    "dot_type",
    "next_power_of_two",
    "tl",
    "wide_type",
]


class Kernel:
    """A function in Triton's language: `kernel[grid](...)` launches it."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    @cached_property
    def compiled(self) -> Any:
        if triton is None:
            raise RuntimeError("tensors on a CUDA device need the package triton")
        return triton.jit(self.function)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compiled[grid]


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def wide_type(dtype: torch.dtype) -> Any:
    """The dtype in which a kernel computes on `dtype`: `wide_dtype` as a type of Triton."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def dot_type(operand: torch.Tensor) -> Any:
    """The type of the operands of `tl.dot`. The interpreter (CPU tensors) has no bfloat16."""
    narrow = operand.is_cuda and operand.dtype == torch.bfloat16
    return tl.bfloat16 if narrow else tl.float32
