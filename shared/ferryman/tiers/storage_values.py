"""Requests, answers and effects of the storage tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.tiers.values import EvictionRefused, StoredUnit, UnitCounts, UnitForgotten, UnitStored


@dataclass(frozen=True, slots=True)
class OfferedUnit:
    """A unit to be stored. `memory` must not change until `store` has returned; `digest` is the
    xxh3-128 of its bytes, and bytes with another digest are not stored."""

    kind: Kind
    page_index: int
    memory: memoryview
    digest: bytes


@dataclass(frozen=True, slots=True)
class UnitRead:
    """A leased unit and the memory for its bytes, which only gets verified bytes."""

    unit: StoredUnit
    memory: memoryview


@dataclass(frozen=True, slots=True)
class ExtentPlan:
    """An extent to be written: its units lie at their offsets, `keys` reach to the last unit's
    page."""

    generation: int
    keys: Sequence[PageKey]
    units: tuple[StoredUnit, ...]
    file_bytes: int
    num_asked: int


@dataclass(frozen=True, slots=True)
class FoundExtent:
    """An extent found on disk: `units` are those alive, `num_bytes` the bytes of header and units,
    `file_bytes` the length of its blob, holes included."""

    generation: int
    manifest_digest: str
    keys: Sequence[PageKey]
    units: tuple[StoredUnit, ...]
    header_bytes: int
    num_bytes: int
    file_bytes: int


BlobRange = tuple[int, int]  # offset and number of bytes


@dataclass(frozen=True, slots=True)
class BlobPart:
    """Bytes to be put into a blob at `offset`. `digest` is their xxh3-128."""

    offset: int
    memory: memoryview
    digest: bytes


@dataclass(frozen=True, slots=True)
class BlobStatistics:
    """Blobs, their bytes without punched holes, and how many unfinished blobs of a former owner
    were removed when the blob store was opened."""

    num_blobs: int
    used_bytes: int
    num_unfinished: int


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """`capacity_bytes` bounds all files together, headers included."""

    capacity_bytes: int
    lease_seconds: float = 30.0
    max_leases: int = 4096


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """The result of an offer: `num_asked` of its units were not stored before, `num_stored` are
    now.

    Fewer are stored if only a smaller resume point got room, and none if the folder failed or is
    suspended.
    """

    num_asked: int
    num_stored: int
    num_bytes: int

    @property
    def is_truncated(self) -> bool:
        return self.num_stored < self.num_asked


NOTHING_STORED = StoredGroup(0, 0, 0)


class Flaw(StrEnum):
    """The check that showed that a stored unit is not the one asked for."""

    LENGTH = "length"
    SEAL = "seal"
    OTHER_UNIT = "other_unit"
    DIGEST = "digest"


@dataclass(frozen=True, slots=True)
class UnitCorrupt:
    """A unit on disk differs from the one written; it is dropped, and `num_dropped` with it."""

    kind: Kind
    key: PageKey
    flaw: Flaw
    num_dropped: int


@dataclass(frozen=True, slots=True)
class FilesCorrupt:
    """Files in the folder that were complete once and have changed since; they are removed."""

    num_files: int


@dataclass(frozen=True, slots=True)
class StorageFailed:
    """An operation on the folder failed; `error` is the name of an errno."""

    operation: str
    error: str


@dataclass(frozen=True, slots=True)
class StorageSuspended:
    """After `num_failures` failures in a row the folder is not used for `seconds`: every read
    misses."""

    num_failures: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreTruncated:
    """Bytes were short even after eviction: `num_stored` of the group's `num_asked` units were
    stored."""

    num_asked: int
    num_stored: int


# Effects of a tier. The host tier has only the first three.
TierEffect = (
    UnitStored
    | UnitForgotten
    | EvictionRefused
    | UnitCorrupt
    | FilesCorrupt
    | StorageFailed
    | StorageSuspended
    | StoreTruncated
)


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """`used_bytes` are the bytes on disk with headers; `foreign_bytes` the part of other models."""

    kinds: Mapping[Kind, UnitCounts]
    capacity_bytes: int = 0
    used_bytes: int = 0
    foreign_bytes: int = 0
    num_extents: int = 0
    num_leases: int = 0
    num_truncated: int = 0
    num_failures: int = 0
    num_removed_at_start: int = 0
    num_in_flight: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    written_seconds: float = 0.0
    is_resting: bool = False
