"""Bytes in and out of slots: for hand-offs, for the host arena, for checksums.

To all of them a slot is one blob. What reads a slot may do so only once the step that wrote it has
an outcome; what writes one may do so because nobody else holds it (`cache/slots.py`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import xxhash

from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState, InvalidRequest

DIGEST_BYTES = 16
# Hashing in one go is faster than in pieces, as long as what was copied is still in the cache.
ONE_PIECE_BYTES = 512 * 1024
PIECE_BYTES = 256 * 1024


def digest_of(content: bytes | memoryview) -> bytes:
    """The xxh3-128 of a unit's bytes; other threads run meanwhile."""
    return xxhash.xxh3_128_digest(content)


def copied(target: memoryview, source: memoryview) -> bytes:
    """Copies `source` to `target`, of the same size; the digest of what has arrived.

    Each piece is hashed while it is still in the processor's cache, so memory is read once; other
    threads run meanwhile. Measured (2 MiB of L2): 9.5 MB in pieces of 256 KiB 14 GB/s, copied whole
    and then hashed 12, memcpy alone 17; 512 KiB in one piece 17.
    """
    arrived, sent = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if len(arrived) <= ONE_PIECE_BYTES:
        np.copyto(arrived, sent)
        return digest_of(target)
    digest = xxhash.xxh3_128()
    for begin in range(0, len(arrived), PIECE_BYTES):
        piece = arrived[begin : begin + PIECE_BYTES]
        np.copyto(piece, sent[begin : begin + PIECE_BYTES])
        digest.update(piece.data)
    return digest.digest()


class Transfer(Protocol):
    """Device slots as host bytes."""

    def read(self, kind: Kind, slot: int) -> memoryview:
        """The slot's bytes: in place on the host, a copy from an accelerator."""
        ...

    def write(self, kind: Kind, slot: int, offset: int, content: bytes | memoryview) -> None:
        """Puts received bytes at `offset` of the slot. Raises InvalidRequest if they do not fit."""
        ...

    def digest(self, kind: Kind, slot: int) -> bytes: ...

    def store_unit(self, kind: Kind, slot: int, arena: memoryview) -> bytes:
        """Copies the slot into `arena`, a view of just its size, and says its digest."""
        ...

    def load_unit(self, kind: Kind, slot: int, arena: memoryview, digest: bytes) -> None:
        """Copies `arena` into the slot. Raises CorruptState if the bytes are not `digest`'s."""
        ...


class HostSlots(Protocol):
    """Slots that lie in host memory."""

    def bytes_of(self, kind: Kind, slot: int) -> memoryview: ...


class HostTransfer:
    """Slots in host memory are read and written in place."""

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


def check_digest(kind: Kind, slot: int, found: bytes, expected: bytes) -> None:
    if found != expected:
        raise CorruptState(
            f"{kind} slot {slot}: bytes with digest {found.hex()} came where "
            f"{expected.hex()} was written"
        )
