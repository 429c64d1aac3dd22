"""Bytes in and out of slots: for hand-offs, for the host arena, for checksums.

All of them treat a slot as one blob. A reader must wait until the step that wrote the slot has an
outcome; a writer must be the slot's only holder (`cache/slots.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotPart
from ferryman.engine.memory.copy_stream import PASSED, CopyFence, CopySide
from ferryman.engine.memory.pinned_pieces import PinnedPairs, TakePiece, pinned_or_plain
from ferryman.engine.memory.slabs import Slabs
from ferryman.errors import CorruptState, InvalidRequest

Bytes = NDArray[np.uint8]

DIGEST_BYTES = 16
# Hashing in one piece is faster, as long as the copied bytes are still in the processor's cache.
ONE_PIECE_BYTES = 512 * 1024
PIECE_BYTES = 256 * 1024
LANDING_BYTES = 4 << 20
"""Bytes that are written from pinned memory at once: a frame."""

Landed = Callable[[memoryview], object]
"""Gets bytes that were written, where no other process can change them; it may use them until it
returns."""


def digest_of(content: bytes | memoryview) -> bytes:
    """The xxh3-128 of a unit's bytes. Releases the GIL."""
    return xxhash.xxh3_128_digest(content)


def copied(target: memoryview, source: memoryview) -> bytes:
    """Copies `source` to `target`, of the same size; returns the digest of the copied bytes."""
    arrived, sent = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if len(arrived) <= ONE_PIECE_BYTES:
        np.copyto(arrived, sent)
        return digest_of(target)
    digest = xxhash.xxh3_128()
    _copy_hashed(arrived, sent, digest)
    return digest.digest()


def _copy_hashed(target: Bytes, source: Bytes, digest: xxhash.xxh3_128) -> None:
    """Copies and hashes piece by piece."""
    for begin in range(0, len(target), PIECE_BYTES):
        piece = target[begin : begin + PIECE_BYTES]
        np.copyto(piece, source[begin : begin + PIECE_BYTES])
        digest.update(piece.data)


def ignored(_: memoryview) -> None:
    """Drops written bytes that nobody hashes."""


def stored(transfer: Transfer, kind: Kind, slot: int, arena: memoryview) -> bytes:
    """Copies a slot into `arena`, of its size, piece by piece; returns the digest."""
    target, digest = np.frombuffer(arena, np.uint8), xxhash.xxh3_128()

    def take(_: int, offset: int, piece: memoryview) -> None:
        source = np.frombuffer(piece, np.uint8)
        _copy_hashed(target[offset : offset + len(source)], source, digest)

    transfer.read_parts([SlotPart(kind, slot, 0, len(target))], take)
    return digest.digest()


class Transfer(Protocol):
    """Device slots as host bytes."""

    @property
    def is_in_place(self) -> bool:
        """Whether a read is no copy. Otherwise every call copies and waits: not for an event
        loop."""
        ...

    def read(self, kind: Kind, slot: int) -> memoryview:
        """The slot's bytes: in place on the host, else a copy in memory of its own."""
        ...

    def read_parts(self, parts: Sequence[SlotPart], take: TakePiece) -> None:
        """Passes the bytes of `parts` to `take`, in their order, without memory of a slot's
        size."""
        ...

    def write(
        self,
        kind: Kind,
        slot: int,
        offset: int,
        content: bytes | memoryview,
        landed: Landed = ignored,
    ) -> None:
        """Puts received bytes at `offset` of the slot, and passes what it wrote to `landed`: the
        memory of `content` may change meanwhile. Raises InvalidRequest if they do not fit."""
        ...

    def digest(self, kind: Kind, slot: int) -> bytes: ...

    def store_unit(self, kind: Kind, slot: int, arena: memoryview) -> bytes:
        """Copies the slot into `arena`, a view of exactly its size; returns its digest."""
        ...

    def load_unit(self, kind: Kind, slot: int, arena: memoryview, digest: bytes) -> None:
        """Copies `arena` into the slot. Raises CorruptState if the bytes are not `digest`'s."""
        ...


class HostSlots(Protocol):
    """Slots that lie in host memory."""

    def bytes_of(self, kind: Kind, slot: int) -> memoryview: ...


class HostTransfer:
    """Slots in host memory are read and written in place."""

    is_in_place = True

    def __init__(self, slots: HostSlots) -> None:
        self._slots = slots

    def read(self, kind: Kind, slot: int) -> memoryview:
        return self._slots.bytes_of(kind, slot)

    def read_parts(self, parts: Sequence[SlotPart], take: TakePiece) -> None:
        for number, part in enumerate(parts):
            take(number, 0, self.read(part.kind, part.slot)[part.begin : part.end])

    def write(
        self,
        kind: Kind,
        slot: int,
        offset: int,
        content: bytes | memoryview,
        landed: Landed = ignored,
    ) -> None:
        target = self._slots.bytes_of(kind, slot)
        check_fits(kind, offset, len(content), len(target))
        written = target[offset : offset + len(content)]
        written[:] = content
        landed(written)

    def digest(self, kind: Kind, slot: int) -> bytes:
        return digest_of(self._slots.bytes_of(kind, slot))

    def store_unit(self, kind: Kind, slot: int, arena: memoryview) -> bytes:
        source = self._slots.bytes_of(kind, slot)
        check_size(kind, len(arena), len(source))
        return copied(arena, source)

    def load_unit(self, kind: Kind, slot: int, arena: memoryview, digest: bytes) -> None:
        target = self._slots.bytes_of(kind, slot)
        check_size(kind, len(arena), len(target))
        check_digest(kind, slot, copied(target, arena), digest)


def arena_view(arena: memoryview, offset: int, num_bytes: int) -> memoryview:
    """The unit's part of the arena. Raises CorruptState if it lies outside."""
    if offset < 0 or offset + num_bytes > len(arena):
        raise CorruptState(
            f"bytes [{offset}, {offset + num_bytes}) lie outside the arena of {len(arena)} bytes"
        )
    return arena[offset : offset + num_bytes]


def check_fits(kind: Kind, offset: int, num_bytes: int, slot_bytes: int) -> None:
    if offset < 0 or offset + num_bytes > slot_bytes:
        raise InvalidRequest(
            f"bytes [{offset}, {offset + num_bytes}) do not fit a {kind} slot of {slot_bytes} bytes"
        )


def check_size(kind: Kind, num_bytes: int, slot_bytes: int) -> None:
    if num_bytes != slot_bytes:
        raise CorruptState(f"a unit of {num_bytes} bytes is no {kind} slot of {slot_bytes} bytes")


def check_digest(kind: Kind, slot: int, digest: bytes, expected: bytes) -> None:
    if digest != expected:
        raise CorruptState(
            f"{kind} slot {slot}: bytes with digest {digest.hex()} came where "
            f"{expected.hex()} was written"
        )


def transfer_of(slabs: Slabs, side: CopySide, own_side: CopySide) -> Transfer:
    """The transfer for slabs on the host, or on an accelerator: loads run on `side`, all else on
    `own_side`."""
    on_host = all(tensor.device.type == "cpu" for tensor in slabs.tensors.values())
    return HostTransfer(slabs) if on_host else DeviceTransfer(slabs, side, own_side)


class DeviceTransfer:
    """Each call waits for its copies, except loads: they end with the fence of their run. No call
    takes memory of a slot's size but `read`.

    All others run on a stream of their own, during steps and loads: the step that wrote a slot is
    over when it is read. Load from one thread only.
    """

    is_in_place = False

    def __init__(self, slabs: Slabs, side: CopySide, own_side: CopySide) -> None:
        self._slabs = slabs
        self._staging = Staging(slabs, side)
        self._own_side = own_side
        self._leaving = PinnedPairs(own_side, is_pinned=self._staging.is_pinned)
        self._writing = threading.Lock()
        self._landing = torch.empty(0, dtype=torch.uint8)

    def read(self, kind: Kind, slot: int) -> memoryview:
        source = self._slot(kind, slot)
        content = np.empty(source.numel(), np.uint8)

        def take(_: int, offset: int, piece: memoryview) -> None:
            content[offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)

        self._leaving.read([source], take)
        return content.data

    def read_parts(self, parts: Sequence[SlotPart], take: TakePiece) -> None:
        sources = [self._slot(part.kind, part.slot)[part.begin : part.end] for part in parts]
        self._leaving.read(sources, take)

    def write(
        self,
        kind: Kind,
        slot: int,
        offset: int,
        content: bytes | memoryview,
        landed: Landed = ignored,
    ) -> None:
        target = self._slot(kind, slot)
        check_fits(kind, offset, len(content), target.numel())
        target = target[offset : offset + len(content)]
        arrived = np.frombuffer(content, np.uint8)
        with self._writing:
            if not len(self._landing):
                self._landing = pinned_or_plain(LANDING_BYTES, is_pinned=target.is_cuda)
            for begin in range(0, len(arrived), LANDING_BYTES):
                piece = arrived[begin : begin + LANDING_BYTES]
                self._land(target[begin : begin + len(piece)], piece, landed)

    def _land(self, target: Tensor, arrived: Bytes, landed: Landed) -> None:
        """The copy into pinned memory is the one protection against a writer that changes lent
        memory: the card and `landed` get the same bytes, at the same time."""
        piece = self._landing[: len(arrived)]
        np.copyto(piece.numpy(), arrived)
        with self._own_side.entered():
            run = self._own_side.begin()
            target.copy_(piece, non_blocking=True)
            fence = run.end()
        try:
            landed(piece.numpy().data)
        finally:
            fence.finish()

    def digest(self, kind: Kind, slot: int) -> bytes:
        digest, source = xxhash.xxh3_128(), self._slot(kind, slot)
        self._leaving.read([source], lambda _number, _offset, piece: digest.update(piece))
        return digest.digest()

    def store_unit(self, kind: Kind, slot: int, arena: memoryview) -> bytes:
        check_size(kind, len(arena), self._slot(kind, slot).numel())
        return stored(self, kind, slot, arena)

    def load_unit(self, kind: Kind, slot: int, arena: memoryview, digest: bytes) -> None:
        """Verified in pinned memory: bytes with another digest never leave the host."""
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
    """Two buffers of a slot's size, pinned if the machine can: one is filled while the other one
    is copied from."""

    def __init__(self, slabs: Slabs, side: CopySide) -> None:
        tensors = slabs.tensors.values()
        self._num_bytes = max(tensor.shape[1] for tensor in tensors)
        self.is_pinned = any(tensor.is_cuda for tensor in tensors)
        self._side = side
        self._buffers: list[Tensor] = []
        self._fences: list[CopyFence] = [PASSED, PASSED]
        self._turn = 0

    def free_buffer(self) -> Tensor:
        """The next buffer; waits for the last copy from it."""
        if not self._buffers:
            self._buffers = [self._allocate() for _ in self._fences]
        self._fences[self._turn].finish()
        return self._buffers[self._turn]

    def sent(self) -> None:
        """The copy from the buffer is queued; the other one is next."""
        self._fences[self._turn] = self._side.begin().end()
        self._turn = 1 - self._turn

    def _allocate(self) -> Tensor:
        return pinned_or_plain(self._num_bytes, is_pinned=self.is_pinned)
