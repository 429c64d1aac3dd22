"""The extent format, bytes in and out. Little-endian; offsets in bytes.

head   0 magic "FERRYEXT"  8 version u32  12 header bytes u32  16 units u32  20 keys u32
      24 generation u64  32 file bytes u64  40 manifest digest [16]  56 zeros  112 seal [16]
entry  0 page key [16]  16 kind u8  17 zeros [3]  20 page index u32  24 generation u64
      32 unit bytes u64  40 offset u64  48 xxh3-128 of the unit [16]  64 seal [16]
      80 alive u8  81 zeros
keys  16 bytes each: the chain from its first page to the last that has a unit here

Seals are blake2b, keyed with the manifest digest: an entry's over its first 64 bytes, the head's
over the head, all entries with their seals, and the keys. `alive` is in none of them, so dropping
a unit is the writing of one byte.
"""

from __future__ import annotations

import hashlib
import struct

from ferryman.cache.keys import KEY_BYTES
from ferryman.cache.manifest import Kind
from ferryman.tiers.extents import ENTRY_BYTES, HEAD_BYTES, aligned, header_bytes
from ferryman.tiers.storage_values import ExtentPlan, Flaw, FoundExtent, StorageUnit

MAGIC, VERSION = b"FERRYEXT", 1
MAX_HEADER_BYTES = 64 << 20

_HEAD = struct.Struct("<8sIIIIQQ16s")
_ENTRY = struct.Struct("<16sB3xIQQQ16s")
_SEAL_BYTES = 16
_HEAD_SEAL = HEAD_BYTES - _SEAL_BYTES
_SEALED_ENTRY = _ENTRY.size + _SEAL_BYTES
_ALIVE, _DEAD = b"\x01", b"\x00"
_KINDS = {Kind.FULL: 1, Kind.WINDOW: 2, Kind.RECURRENT: 3}
_KIND_OF = {number: kind for kind, number in _KINDS.items()}

DEAD_FLAG = _DEAD


class BadExtent(Exception):
    """A file that is no extent, or not the one that was written under its name."""


def entry_offset(index: int) -> int:
    """Where the entry of the `index`-th unit begins."""
    return HEAD_BYTES + index * ENTRY_BYTES


def flag_offset(index: int) -> int:
    """The byte that says whether that unit is alive."""
    return entry_offset(index) + _SEALED_ENTRY


def header_to_bytes(plan: ExtentPlan, manifest_digest: str) -> bytes:
    """All of an extent before its first unit, every unit alive."""
    key = bytes.fromhex(manifest_digest)
    length = header_bytes(len(plan.units), len(plan.keys))
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        length,
        len(plan.units),
        len(plan.keys),
        plan.generation,
        plan.file_bytes,
        key,
    ).ljust(_HEAD_SEAL, b"\x00")
    sealed = [_entry_to_bytes(unit, key) for unit in plan.units]
    entries = b"".join((entry + _ALIVE).ljust(ENTRY_BYTES, b"\x00") for entry in sealed)
    keys = b"".join(plan.keys)
    seal = _seal(b"extent", key, head, *sealed, keys)
    return (head + seal + entries + keys).ljust(length, b"\x00")


def _entry_to_bytes(unit: StorageUnit, key: bytes) -> bytes:
    """An entry with its seal, without its flag."""
    body = _ENTRY.pack(
        unit.key,
        _KINDS[unit.kind],
        unit.page_index,
        unit.generation,
        unit.num_bytes,
        unit.offset,
        unit.digest,
    )
    return body + _seal(b"unit", key, body)


def _seal(what: bytes, key: bytes, *parts: bytes) -> bytes:
    seal = hashlib.blake2b(key=key, digest_size=_SEAL_BYTES, person=what)
    for part in parts:
        seal.update(part)
    return seal.digest()


def flaw_of_entry(
    entry: bytes | memoryview, unit: StorageUnit, manifest_digest: str
) -> Flaw | None:
    """What keeps the bytes behind an entry from being those of `unit`, the digest aside."""
    raw, key = bytes(entry), bytes.fromhex(manifest_digest)
    body, seal = raw[: _ENTRY.size], raw[_ENTRY.size : _SEALED_ENTRY]
    if len(raw) < ENTRY_BYTES:
        return Flaw.LENGTH
    if seal != _seal(b"unit", key, body):
        return Flaw.SEAL
    is_alive = raw[_SEALED_ENTRY:][:1] == _ALIVE
    return (
        None if is_alive and raw[:_SEALED_ENTRY] == _entry_to_bytes(unit, key) else Flaw.OTHER_UNIT
    )


def header_length(head: bytes) -> int:
    """How long the header is that begins so; BadExtent when it is none."""
    if len(head) < HEAD_BYTES:
        raise BadExtent("shorter than a head")
    magic, version, length, num_units, num_keys, *_ = _HEAD.unpack_from(head)
    if (magic, version) != (MAGIC, VERSION):
        raise BadExtent("another format")
    if length != header_bytes(num_units, num_keys) or length > MAX_HEADER_BYTES:
        raise BadExtent("lengths do not fit")
    return int(length)


def header_from_bytes(header: bytes, *, generation: int, file_bytes: int) -> FoundExtent:
    """The extent that a file named `generation`, of so many bytes, holds. Raises BadExtent."""
    length = header_length(header)
    if len(header) < length:
        raise BadExtent("shorter than its header")
    _, _, _, num_units, num_keys, written, size, key = _HEAD.unpack_from(header)
    entries = [header[entry_offset(i) : entry_offset(i + 1)] for i in range(num_units)]
    chain = header[entry_offset(num_units) :][: KEY_BYTES * num_keys]
    sealed = (entry[:_SEALED_ENTRY] for entry in entries)
    if header[_HEAD_SEAL:HEAD_BYTES] != _seal(b"extent", key, header[:_HEAD_SEAL], *sealed, chain):
        raise BadExtent("the seal is broken")
    if (written, size) != (generation, file_bytes):
        raise BadExtent("another name or another length than were written")
    alive = [
        _unit_from_bytes(entry, index)
        for index, entry in enumerate(entries)
        if entry[_SEALED_ENTRY : _SEALED_ENTRY + 1] == _ALIVE
    ]
    return FoundExtent(
        generation=generation,
        manifest_digest=key.hex(),
        keys=tuple(chain[i : i + KEY_BYTES] for i in range(0, len(chain), KEY_BYTES)),
        units=tuple(alive),
        header_bytes=length,
        num_bytes=length + sum(aligned(unit.num_bytes) for unit in alive),
    )


def _unit_from_bytes(entry: bytes, index: int) -> StorageUnit:
    key, kind, page_index, generation, num_bytes, offset, digest = _ENTRY.unpack_from(entry)
    return StorageUnit(
        kind=_KIND_OF[kind],
        page_index=page_index,
        key=key,
        num_bytes=num_bytes,
        digest=digest,
        generation=generation,
        index=index,
        offset=offset,
    )
