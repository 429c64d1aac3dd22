"""Memory beside which a page lies that no process may touch: a loop that leaves it ends the tests.

A loop is told addresses, and what it reads behind the end of a tensor is mostly memory that is
there.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_NOBODY = 0
_LIBC = ctypes.CDLL(None, use_errno=True)


class Fences:
    """Makes tensors that end at such a page, or begin behind one."""

    def __init__(self, *, at_end: bool) -> None:
        self.at_end = at_end

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        if not size:
            return torch.zeros(shape, dtype=dtype)
        inner = -(-size // _PAGE) * _PAGE
        memory = mmap.mmap(-1, inner + 2 * _PAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for fence in (first, first + _PAGE + inner):
            assert _LIBC.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(_PAGE), _NOBODY) == 0
        start = _PAGE + (inner - size if self.at_end else 0)
        flat = torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start)
        return flat.view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor with its strides; between its elements lies what is no number."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((count - 1) * step for count, step in steps)
        flat = self.empty((last + 1,), tensor.dtype)
        flat.fill_(torch.nan if tensor.is_floating_point() else -1)
        view = flat.as_strided(tensor.shape, tensor.stride())
        view.copy_(tensor)
        return view

    @contextmanager
    def around_results(self) -> Iterator[None]:
        """Within it new tensors have fences, too, and are full of what is no number."""

        def empty(*shape: Any, dtype: torch.dtype = torch.float32, **_: Any) -> Tensor:
            sizes = shape if not shape or isinstance(shape[0], int) else tuple(shape[0])
            made = self.empty(tuple(sizes), dtype)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        def new_empty(own: Tensor, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
            return empty(shape, dtype=dtype or own.dtype)

        with patch.object(torch, "empty", empty), patch.object(Tensor, "new_empty", new_empty):
            yield
