"""Bytes in and out of slots that lie on an accelerator: the same words, by copying."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.slabs import Slabs
from ferryman.engine.transfer import (
    HostTransfer,
    Transfer,
    check_digest,
    check_fits,
    check_size,
    digest_of,
)


def transfer_of(slabs: Slabs) -> Transfer:
    """The transfer that suits where the slabs lie."""
    on_host = all(tensor.device.type == "cpu" for tensor in slabs.tensors.values())
    return HostTransfer(slabs) if on_host else DeviceTransfer(slabs)


class DeviceTransfer:
    """Each call waits for its copy. Call it on the forward stream, whose order it then takes."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs

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
        target = self._slot(kind, slot)
        check_size(kind, len(arena), target.numel())
        target.copy_(_as_tensor(arena))
        check_digest(kind, slot, digest_of(arena), digest)

    def _slot(self, kind: Kind, slot: int) -> Tensor:
        slab = self._slabs.tensors[kind]
        if not 0 <= slot < slab.shape[0]:
            raise IndexError(f"the {kind} slab has no slot {slot} of {slab.shape[0]}")
        return slab[slot]


def _as_tensor(content: bytes | memoryview) -> Tensor:
    """The bytes as a tensor in place; torch warns of read-only ones, so those are copied."""
    writable = content if isinstance(content, memoryview) and not content.readonly else None
    return torch.frombuffer(writable or bytearray(content), dtype=torch.uint8)
