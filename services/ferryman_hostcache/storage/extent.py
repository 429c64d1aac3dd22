"""The extent format, bytes in and out. Little-endian; offsets in bytes.

head   0 magic "FERRYEXT"  8 version u32  12 header bytes u32  16 units u32  20 keys u32
      24 generation u64  32 file bytes u64  40 manifest digest [16]  56 key id [16]  72 zeros
      112 seal [16]
entry  0 page key [16]  16 kind u8  17 zeros [3]  20 page index u32  24 generation u64
      32 unit bytes u64  40 offset u64  48 xxh3-128 of the unit [16]  64 seal [16]
      80 alive u8  81 zeros
keys  16 bytes each: the chain from its first page to the last that has a unit here

Seals are tags under a key that only host-caches of this cluster have, over the manifest digest and:
an entry's over its first 64 bytes, the head's over the head, all entries with their seals, and the
keys. No seal covers `alive`, where zero means no: dropping a unit punches that byte and the unit's
bytes. The key id names the key; it proves nothing.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from ferryman.cache.keys import KEY_BYTES
from ferryman.cache.manifest import Kind
from ferryman.security.cluster_key import TAG_BYTES, MacKey
from ferryman.tiers.extents import ENTRY_BYTES, HEAD_BYTES, DropUnit, aligned, header_bytes
from ferryman.tiers.storage_values import BlobRange, ExtentPlan, Flaw, FoundExtent
from ferryman.tiers.values import StoredUnit

MAGIC, VERSION = b"FERRYEXT", 2
MAX_HEADER_BYTES = 64 << 20
MAX_GENERATION = 1 << 62
EXTENT_SUFFIX = ".extent"

_HEAD = struct.Struct("<8sIIIIQQ16s16s")
_ENTRY = struct.Struct("<16sB3xIQQQ16s")
_HEAD_SEAL = HEAD_BYTES - TAG_BYTES
_SEALED_ENTRY = _ENTRY.size + TAG_BYTES
_ALIVE = b"\x01"
_KINDS = {Kind.FULL: 1, Kind.WINDOW: 2, Kind.RECURRENT: 3}
_KIND_OF = {number: kind for kind, number in _KINDS.items()}


class BadExtent(Exception):
    """A blob that is no extent, or not the one that was written under its name."""


class ForeignExtent(BadExtent):
    """An extent, as it seems, of another cluster or another version."""


@dataclass(frozen=True, slots=True)
class ExtentSeals:
    """Makes the seals of one model's units; the model is named by its manifest's digest."""

    key: MacKey
    manifest_digest: str

    def seal(self, what: bytes, *parts: bytes) -> bytes:
        return self.key.tag(what, bytes.fromhex(self.manifest_digest), *parts)

    @property
    def key_id(self) -> bytes:
        return key_id_of(self.key)


def key_id_of(key: MacKey) -> bytes:
    """A name of the key that does not reveal the key."""
    return key.tag(b"key id")


def extent_name(generation: int) -> str:
    """The name of an extent's blob."""
    return f"{generation:016x}{EXTENT_SUFFIX}"


def generation_of(name: str) -> int:
    """The generation in a blob's name; BadExtent for another name."""
    digits = name.removesuffix(EXTENT_SUFFIX)
    try:
        generation = int(digits, 16)
    except ValueError:
        raise BadExtent("its name is no number") from None
    if len(digits) != 16 or not 0 < generation < MAX_GENERATION:
        raise BadExtent("its number is none that was ever given")
    return generation


def entry_offset(index: int) -> int:
    """The offset of the entry of the `index`-th unit."""
    return HEAD_BYTES + index * ENTRY_BYTES


def flag_offset(index: int) -> int:
    """The offset of the byte that tells whether that unit is alive."""
    return entry_offset(index) + _SEALED_ENTRY


def dead_ranges(work: DropUnit) -> tuple[BlobRange, ...]:
    """The ranges to fill with zeros to drop a unit. The flag comes first, so that the unit is
    dropped even if the next write fails."""
    return (flag_offset(work.index), 1), (work.offset, aligned(work.num_bytes))


def header_to_bytes(plan: ExtentPlan, seals: ExtentSeals) -> bytes:
    """All bytes of an extent before its first unit; every unit is alive."""
    length = header_bytes(len(plan.units), len(plan.keys))
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        length,
        len(plan.units),
        len(plan.keys),
        plan.generation,
        plan.file_bytes,
        bytes.fromhex(seals.manifest_digest),
        seals.key_id,
    ).ljust(_HEAD_SEAL, b"\x00")
    sealed = [_entry_to_bytes(unit, seals) for unit in plan.units]
    entries = b"".join((entry + _ALIVE).ljust(ENTRY_BYTES, b"\x00") for entry in sealed)
    keys = b"".join(plan.keys)
    seal = seals.seal(b"extent", head, *sealed, keys)
    return (head + seal + entries + keys).ljust(length, b"\x00")


def _entry_to_bytes(unit: StoredUnit, seals: ExtentSeals) -> bytes:
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
    return body + seals.seal(b"unit", body)


def flaw_of_entry(entry: bytes | memoryview, unit: StoredUnit, seals: ExtentSeals) -> Flaw | None:
    """The flaw that an entry shows: why the bytes are not those of `unit`. Does not check the
    digest."""
    raw = bytes(entry)
    body, seal = raw[: _ENTRY.size], raw[_ENTRY.size : _SEALED_ENTRY]
    if len(raw) < ENTRY_BYTES:
        return Flaw.LENGTH
    if not hmac.compare_digest(seal, seals.seal(b"unit", body)):
        return Flaw.SEAL
    is_alive = raw[_SEALED_ENTRY:][:1] == _ALIVE
    is_it = raw[:_SEALED_ENTRY] == _entry_to_bytes(unit, seals)
    return None if is_alive and is_it else Flaw.OTHER_UNIT


def header_length(head: bytes) -> int:
    """The length of the header that begins with `head`; BadExtent if it is no header, ForeignExtent
    if it has another version."""
    if len(head) < HEAD_BYTES:
        raise BadExtent("shorter than a head")
    magic, version, length, num_units, num_keys, *_ = _HEAD.unpack_from(head)
    if magic != MAGIC:
        raise BadExtent("another format")
    if version != VERSION:
        raise ForeignExtent("another version")
    if length != header_bytes(num_units, num_keys) or length > MAX_HEADER_BYTES:
        raise BadExtent("lengths do not fit")
    return int(length)


def file_bytes_in(head: bytes) -> int:
    """The length of the blob as written in a head; valid once the seal is verified."""
    return int(_HEAD.unpack_from(head)[6])


def header_from_bytes(
    header: bytes, key: MacKey, *, generation: int, file_bytes: int
) -> FoundExtent:
    """The extent in a blob of this generation and size. Raises BadExtent, or its subclass
    ForeignExtent if the blob does not even claim to be sealed with this key."""
    length = header_length(header)
    if len(header) < length:
        raise BadExtent("shorter than its header")
    _, _, _, num_units, num_keys, written, size, digest, key_id = _HEAD.unpack_from(header)
    if key_id != key_id_of(key):
        raise ForeignExtent("sealed with the key of another cluster")
    seals = ExtentSeals(key, digest.hex())
    entries = [header[entry_offset(i) : entry_offset(i + 1)] for i in range(num_units)]
    chain = header[entry_offset(num_units) :][: KEY_BYTES * num_keys]
    sealed = (entry[:_SEALED_ENTRY] for entry in entries)
    seal = seals.seal(b"extent", header[:_HEAD_SEAL], *sealed, chain)
    if not hmac.compare_digest(header[_HEAD_SEAL:HEAD_BYTES], seal):
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
        manifest_digest=seals.manifest_digest,
        keys=tuple(chain[i : i + KEY_BYTES] for i in range(0, len(chain), KEY_BYTES)),
        units=tuple(alive),
        header_bytes=length,
        num_bytes=length + sum(aligned(unit.num_bytes) for unit in alive),
        file_bytes=file_bytes,
    )


def _unit_from_bytes(entry: bytes, index: int) -> StoredUnit:
    key, kind, page_index, generation, num_bytes, offset, digest = _ENTRY.unpack_from(entry)
    return StoredUnit(
        kind=_KIND_OF[kind],
        page_index=page_index,
        key=key,
        num_bytes=num_bytes,
        digest=digest,
        generation=generation,
        index=index,
        offset=offset,
    )
