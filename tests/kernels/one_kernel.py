"""The compiled kernels that launches would take on a card.

Triton compiles a kernel for the types of its arguments, for addresses and integers that are
multiples of 16, for integers of 1, and for its constants. Launches of one compiled kernel run the
same instructions: then nothing else than a program's own numbers decides the bits of its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from ferryman_kernels._triton import Kernel

CompiledFor = tuple[object, ...]


@contextmanager
def noted_kernels() -> Iterator[set[CompiledFor]]:
    """The kernels that a card would have compiled by the end of the block; launches are run."""
    seen: set[CompiledFor] = set()
    launched = Kernel.__getitem__

    def launcher(kernel: Kernel, grid: tuple[int, ...]) -> Any:
        def launch(*args: object, **constants: object) -> None:
            function = kernel.function
            names = function.__code__.co_varnames
            of_args = [
                _specialised(value, name in kernel.any_of)
                for name, value in zip(names, args, strict=False)
            ]
            seen.add((function.__name__, *of_args, *sorted(map(repr, constants.items()))))
            launched(kernel, grid)(*args, **constants)

        return launch

    with patch.object(Kernel, "__getitem__", launcher):
        yield seen


def _specialised(value: object, is_any: bool) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return "integer" if is_any else "1" if value == 1 else value % 16 == 0
    return type(value)
