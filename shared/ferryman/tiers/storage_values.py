"""What the storage tier is asked, what it answers, and what it wants others to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.tiers.values import UnitForgotten, UnitStored


@dataclass(frozen=True, slots=True)
class StorageUnit:
    """One unit on disk: the `index`-th of the extent whose number is `generation`.

    `digest` is the xxh3-128 of its bytes, taken where they left the device.
    """

    kind: Kind
    page_index: int
    key: PageKey
    num_bytes: int
    digest: bytes
    generation: int
    index: int
    offset: int


@dataclass(frozen=True, slots=True)
class ExtentPlan:
    """An extent to be written: its units lie at their offsets, `keys` reach as far as they do."""

    generation: int
    keys: Sequence[PageKey]
    units: tuple[StorageUnit, ...]
    file_bytes: int
    num_asked: int


@dataclass(frozen=True, slots=True)
class FoundExtent:
    """An extent that was found on disk: `units` are those alive, `num_bytes` what they take."""

    generation: int
    manifest_digest: str
    keys: Sequence[PageKey]
    units: tuple[StorageUnit, ...]
    header_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """`capacity_bytes` are for all files together, headers included."""

    capacity_bytes: int
    lease_seconds: float = 30.0
    max_leases: int = 4096


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """What became of an offer: `num_asked` of its units were not here yet, `num_stored` are now.

    Fewer are stored where room for the largest smaller resume point was all there was, and none
    where the folder failed or is left alone for a while.
    """

    num_asked: int
    num_stored: int
    num_bytes: int

    @property
    def is_truncated(self) -> bool:
        return self.num_stored < self.num_asked


NOTHING_STORED = StoredGroup(0, 0, 0)


class Flaw(StrEnum):
    """What proved a stored unit to be other bytes than those asked for."""

    LENGTH = "length"
    SEAL = "seal"
    OTHER_UNIT = "other_unit"
    DIGEST = "digest"


@dataclass(frozen=True, slots=True)
class UnitCorrupt:
    """A unit on disk is not what was written; it is dropped, and `num_dropped` with it."""

    kind: Kind
    key: PageKey
    flaw: Flaw
    num_dropped: int


@dataclass(frozen=True, slots=True)
class FilesCorrupt:
    """So many files in the folder were once whole and are not what was written; they are gone."""

    num_files: int


@dataclass(frozen=True, slots=True)
class StorageFailed:
    """The folder did not do what it was asked; `error` is the name of an errno."""

    operation: str
    error: str


@dataclass(frozen=True, slots=True)
class StorageRests:
    """After so many failures in a row the folder is left alone for `seconds`: all is a miss."""

    num_failures: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StoringTruncated:
    """Bytes were short even after eviction: so many units of a group were stored."""

    num_asked: int
    num_stored: int


StorageEffect = (
    UnitStored
    | UnitForgotten
    | UnitCorrupt
    | FilesCorrupt
    | StorageFailed
    | StorageRests
    | StoringTruncated
)


@dataclass(frozen=True, slots=True)
class StorageKindStatistics:
    """Units and payload bytes of one kind on disk, and counts of units since the start: truncated
    are those that a group was stored without, because there was no room."""

    num_units: int = 0
    num_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0
    num_truncated: int = 0


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """`used_bytes` are those on disk, headers included; `foreign_bytes` of them other models'."""

    kinds: Mapping[Kind, StorageKindStatistics]
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
