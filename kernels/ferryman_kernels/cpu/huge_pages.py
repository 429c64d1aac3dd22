"""Memory of a processor in huge pages, for what every step reads: weights and state.

At one request a step reads each weight once, from memory that no cache holds. In pages of 4 KiB the
processor looks up every page, and reads ahead to its end alone; in pages of 2 MiB (transparent huge
pages of Linux) it reads faster. Where there are none, memory is the same in small ones.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from math import prod
from threading import Lock

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 * 1024 * 1024
REGION_BYTES = 64 * 1024 * 1024
"""Weights smaller than a huge page share one, so many are cut from one region."""
_LINE_BYTES = 64


def huge_memory(num_bytes: int) -> memoryview:
    """So many bytes of zeros, at least one, that begin with a huge page. Pages are made as they are
    first written."""
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(region)
    begin = -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    return memoryview(region)[begin : begin + num_bytes]


def _advise(region: mmap.mmap) -> None:
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel built without them
        return


class WeightMemory:
    """Cuts weights from regions, one after another. A region lives as long as a weight in it, so a
    part of it is never given twice."""

    def __init__(self, region_bytes: int = REGION_BYTES) -> None:
        self._region_bytes = region_bytes
        self._free = memoryview(b"")
        self._cutting = Lock()  # layers are loaded by several threads

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A weight of zeros that begins with a line of the caches, in a storage of its own."""
        if not prod(shape):
            return torch.zeros(*shape, dtype=dtype)
        return torch.frombuffer(self._cut(prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)

    def _cut(self, num_bytes: int) -> memoryview:
        with self._cutting:
            if num_bytes > len(self._free):
                self._free = huge_memory(max(num_bytes, self._region_bytes))
            part = self._free[:num_bytes]
            self._free = self._free[-(-num_bytes // _LINE_BYTES) * _LINE_BYTES :]
            return part


_memory: ContextVar[WeightMemory | None] = ContextVar("weight_memory", default=None)


@contextmanager
def regions_of_one_model() -> Iterator[None]:
    """Weights that are made in the block, in this context or a copy of it, share no region with
    others: a model that is dropped gives all its regions back."""
    token = _memory.set(WeightMemory())
    try:
        yield
    finally:
        _memory.reset(token)


@cache
def _memory_of_process() -> WeightMemory:
    """For weights that belong to no model."""
    return WeightMemory()


def weight_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight of zeros for products to read; on a processor in huge pages."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    return (_memory.get() or _memory_of_process()).zeros(shape, dtype)
