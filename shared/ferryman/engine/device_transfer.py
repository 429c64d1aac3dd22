"""Bytes in and out of slots that lie on an accelerator: the same words, by copying."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.copy_side import PASSED, CopySide, Fence
from ferryman.engine.slabs import Slabs
from ferryman.engine.transfer import (
    HostTransfer,
    Transfer,
    check_digest,
    check_fits,
    check_size,
    copied,
    digest_of,
)


def transfer_of(slabs: Slabs, side: CopySide) -> Transfer:
    """The transfer that suits where the slabs lie."""
    on_host = all(tensor.device.type == "cpu" for tensor in slabs.tensors.values())
    return HostTransfer(slabs) if on_host else DeviceTransfer(slabs, side)


class DeviceTransfer:
    """Each call waits for its copy, but for loads: those end with the fence of their run.

    Call it where the caller's queue has the right order; load from one thread only.
    """

    def __init__(self, slabs: Slabs, side: CopySide) -> None:
        self._slabs = slabs
        self._staging = Staging(slabs, side)

    def read(self, kind: Kind, slot: int) -> memoryview:
        return self._slot(kind, slot).cpu().numpy().data

    def write(self, kind: Kind, slot: int, offset: int, content: bytes | memoryview) -> None:
        target = self._slot(kind, slot)
        check_fits(kind, offset, len(content), target.numel())
        target[offset : offset + len(content)].copy_(_as_tensor(content))

    def digest(self, kind: Kind, slot: int) -> bytes:
        return digest_of(self.read(kind, slot))

    def store_unit(self, kind: Kind, slot: int, arena: memoryview) -> bytes:
        source = self._slot(kind, slot)
        check_size(kind, len(arena), source.numel())
        _as_tensor(arena).copy_(source)
        return digest_of(arena)

    def load_unit(self, kind: Kind, slot: int, arena: memoryview, digest: bytes) -> None:
        """Verified in pinned memory: bytes that are not `digest`'s never leave the host."""
        target = self._slot(kind, slot)
        check_size(kind, len(arena), target.numel())
        staged = self._staging.free_buffer()[: target.numel()]
        check_digest(kind, slot, copied(staged.numpy().data, arena), digest)
        target.copy_(staged, non_blocking=True)
        self._staging.sent()

    def _slot(self, kind: Kind, slot: int) -> Tensor:
        slab = self._slabs.tensors[kind]
        if not 0 <= slot < slab.shape[0]:
            raise IndexError(f"the {kind} slab has no slot {slot} of {slab.shape[0]}")
        return slab[slot]


class Staging:
    """Two pinned buffers of a slot's size: one is filled while the other is on its way."""

    def __init__(self, slabs: Slabs, side: CopySide) -> None:
        tensors = slabs.tensors.values()
        self._num_bytes = max(tensor.shape[1] for tensor in tensors)
        self._is_pinned = any(tensor.is_cuda for tensor in tensors)
        self._side = side
        self._buffers: list[Tensor] = []
        self._fences: list[Fence] = [PASSED, PASSED]
        self._turn = 0

    def free_buffer(self) -> Tensor:
        """The buffer whose turn it is; waits for what was sent from it."""
        if not self._buffers:
            self._buffers = [self._allocate() for _ in self._fences]
        self._fences[self._turn].finish()
        return self._buffers[self._turn]

    def sent(self) -> None:
        """The copy from the buffer is queued; the other one is next."""
        self._fences[self._turn] = self._side.begin().end()
        self._turn = 1 - self._turn

    def _allocate(self) -> Tensor:
        return torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)


def _as_tensor(content: bytes | memoryview) -> Tensor:
    """The bytes as a tensor in place; torch warns of read-only ones, so those are copied."""
    writable = content if isinstance(content, memoryview) and not content.readonly else None
    return torch.frombuffer(writable or bytearray(content), dtype=torch.uint8)
