"""Bytes in and out of slots: for hand-offs, for the host arena, for checksums.

All of them treat a slot as one blob. A reader must wait until the step that wrote the slot has an
outcome; a writer must be the slot's only holder (`cache/slots.py`).
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.memory.copy_stream import PASSED, CopyFence, CopySide
from ferryman.engine.memory.slabs import Slabs
from ferryman.errors import CorruptState, InvalidRequest

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

DIGEST_BYTES = 16
# Hashing in one piece is faster, as long as the copied bytes are still in the processor's cache.
ONE_PIECE_BYTES = 512 * 1024
PIECE_BYTES = 256 * 1024
READ_BYTES = 256 << 20
"""Host memory that reads of one kind's slots keep, or two slots if those are larger."""
LANDING_BYTES = 4 << 20
"""Bytes that are written from pinned memory, or stored by it, at once."""


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


class Transfer(Protocol):
    """Device slots as host bytes."""

    @property
    def is_in_place(self) -> bool:
        """Whether a read is no copy. Otherwise every call copies and waits: not for an event
        loop."""
        ...

    def read(self, kind: Kind, slot: int) -> memoryview:
        """The slot's bytes: in place on the host, a copy from an accelerator."""
        ...

    def write(self, kind: Kind, slot: int, offset: int, content: bytes | memoryview) -> None:
        """Puts received bytes at `offset` of the slot. Raises InvalidRequest if they do not fit."""
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

    def write(self, kind: Kind, slot: int, offset: int, content: bytes | memoryview) -> None:
        target = self._slots.bytes_of(kind, slot)
        check_fits(kind, offset, len(content), len(target))
        target[offset : offset + len(content)] = content

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
    """Each call waits for its copy, except loads: they end with the fence of their run.

    All others run on a stream of their own, during steps and loads: the step that wrote a slot is
    over when it is read. Load from one thread only.
    """

    is_in_place = False

    def __init__(self, slabs: Slabs, side: CopySide, own_side: CopySide) -> None:
        self._slabs = slabs
        self._staging = Staging(slabs, side)
        self._own_side = own_side
        self._leaving = LeavingPieces(own_side, self._staging.is_pinned)
        self._storing, self._writing = threading.Lock(), threading.Lock()
        self._reads = {
            kind: ReadBuffers(tensor.shape[1], tensor.is_cuda)
            for kind, tensor in slabs.tensors.items()
        }
        self._landing = torch.empty(0, dtype=torch.uint8)

    def read(self, kind: Kind, slot: int) -> memoryview:
        source = self._slot(kind, slot)
        content = self._reads[kind].lent()
        self._copy(torch.from_numpy(content), source)
        return content.data

    def write(self, kind: Kind, slot: int, offset: int, content: bytes | memoryview) -> None:
        target = self._slot(kind, slot)
        check_fits(kind, offset, len(content), target.numel())
        target = target[offset : offset + len(content)]
        arrived = np.frombuffer(content, np.uint8)
        with self._writing:
            if not len(self._landing):
                self._landing = pinned_or_plain(LANDING_BYTES, is_pinned=target.is_cuda)
            for begin in range(0, len(arrived), LANDING_BYTES):
                piece = arrived[begin : begin + LANDING_BYTES]
                np.copyto(self._landing[: len(piece)].numpy(), piece)
                self._copy(target[begin : begin + len(piece)], self._landing[: len(piece)])

    def digest(self, kind: Kind, slot: int) -> bytes:
        return digest_of(self.read(kind, slot))

    def store_unit(self, kind: Kind, slot: int, arena: memoryview) -> bytes:
        source = self._slot(kind, slot)
        check_size(kind, len(arena), source.numel())
        with self._storing:
            return self._leaving.copied(arena, source)

    def load_unit(self, kind: Kind, slot: int, arena: memoryview, digest: bytes) -> None:
        """Verified in pinned memory: bytes with another digest never leave the host."""
        target = self._slot(kind, slot)
        check_size(kind, len(arena), target.numel())
        staged = self._staging.free_buffer()[: target.numel()]
        check_digest(kind, slot, copied(staged.numpy().data, arena), digest)
        target.copy_(staged, non_blocking=True)
        self._staging.sent()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with self._own_side.entered():
            run = self._own_side.begin()
            target.copy_(source, non_blocking=True)
            run.end().finish()

    def _slot(self, kind: Kind, slot: int) -> Tensor:
        slab = self._slabs.tensors[kind]
        if not 0 <= slot < slab.shape[0]:
            raise IndexError(f"the {kind} slab has no slot {slot} of {slab.shape[0]}")
        return slab[slot]


class ReadBuffers:
    """Memory of the host for the bytes of slots, which a card fills by itself.

    A buffer comes back when nothing holds its bytes any more. One that nobody has is lent again;
    beyond READ_BYTES of them a read has memory of its own, which is slower to fill.
    """

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self._num_bytes, self._is_pinned = num_bytes, is_pinned
        self._free: list[Tensor] = []
        self._num_left = max(2, READ_BYTES // max(1, num_bytes))
        self._counting = threading.Lock()

    def lent(self) -> NDArray[np.uint8]:
        with self._counting:
            if self._free:
                buffer = self._free.pop()
            elif self._num_left and (taken := self._taken()) is not None:
                buffer = taken
            else:
                return np.empty(self._num_bytes, np.uint8)
        # Every view of the bytes holds the array, so its end is that of the last reader.
        content: NDArray[np.uint8] = buffer.numpy().view()
        weakref.finalize(content, self._free.append, buffer)
        return content

    def _taken(self) -> Tensor | None:
        """One buffer more; None from when on the machine pins no more memory."""
        try:
            buffer = _host_memory(self._num_bytes, is_pinned=self._is_pinned)
        except RuntimeError as error:
            _say_unpinned(self._num_bytes, error)
            self._num_left = 0
            return None
        self._num_left -= 1
        return buffer


def pinned_or_plain(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Memory of the host, not pinned if the machine pins no more: copies are slower then."""
    try:
        return _host_memory(num_bytes, is_pinned=is_pinned)
    except RuntimeError as error:
        _say_unpinned(num_bytes, error)
        return _host_memory(num_bytes, is_pinned=False)


def _say_unpinned(num_bytes: int, error: RuntimeError) -> None:
    log.warning("no pinned memory of %d bytes, so copies are slower: %s", num_bytes, error)


def _host_memory(num_bytes: int, *, is_pinned: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


class LeavingPieces:
    """Two pieces of pinned memory, through which a slot leaves a card for the arena: one is copied
    on and hashed while the card fills the other.

    The arena itself is not pinned. That would take 0.4 s a GB, in which a process can map no
    memory, and all of the arena's memory before any of it is used (H200's host).
    """

    def __init__(self, side: CopySide, is_pinned: bool) -> None:
        self._side, self._is_pinned = side, is_pinned
        self._pieces: list[Tensor] = []

    def copied(self, arena: memoryview, source: Tensor) -> bytes:
        """Copies all of `source`, a slot's bytes; returns their digest. One caller at a time."""
        if not self._pieces:
            self._pieces = [
                pinned_or_plain(LANDING_BYTES, is_pinned=self._is_pinned) for _ in range(2)
            ]
        target, digest = np.frombuffer(arena, np.uint8), xxhash.xxh3_128()
        parts = source.split(LANDING_BYTES)  # type: ignore[no-untyped-call]
        filling = self._fill(0, parts[0])
        for number, part in enumerate(parts):
            begin, end = number * LANDING_BYTES, number * LANDING_BYTES + len(part)
            filled, piece = filling, self._pieces[number % 2]
            if number + 1 < len(parts):
                filling = self._fill(number + 1, parts[number + 1])
            filled.finish()
            _copy_hashed(target[begin:end], piece.numpy()[: len(part)], digest)
        return digest.digest()

    def _fill(self, number: int, part: Tensor) -> CopyFence:
        with self._side.entered():
            run = self._side.begin()
            self._pieces[number % 2][: len(part)].copy_(part, non_blocking=True)
            return run.end()


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
