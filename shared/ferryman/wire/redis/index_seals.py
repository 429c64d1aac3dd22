"""Records and entries in Redis, with tags that only processes of the cluster can make.

    node record   <epoch> <tag> <address> [<folder>]    over node, epoch, address, folder
    entry         <bytes>,<digest>,<generation>,<tag>   over owner, tier, kind, page key, the rest

Any client of Redis can write there. A record or entry without a tag of this cluster counts as
absent. An entry's tag names the life that wrote it, so entries of an earlier life are void for a
later one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.resume import resume_set
from ferryman.cache.units import Tier
from ferryman.errors import InvalidRequest
from ferryman.security.cluster_key import ClusterKey, MacKey, Purpose
from ferryman.wire.redis.index import IndexedUnit, NodeLife, NodePrefix

log = logging.getLogger(__name__)

NOTHING = "-"  # stands for an absent entry
TIERS = (Tier.HOST, Tier.STORAGE)  # in the order in which the scripts list them


class ForgedEntry(ValueError):
    """A record or entry in Redis was not written by a process of this cluster."""


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """The place of an entry: its owner, tier and unit."""

    owner: str
    tier: Tier
    kind: Kind
    key: PageKey


class IndexSeals:
    """Writes and reads records and entries of one cluster."""

    def __init__(self, key: ClusterKey) -> None:
        self._nodes: MacKey = key.subkey(Purpose.NODE_RECORD)
        self._entries: MacKey = key.subkey(Purpose.INDEX_ENTRY)

    def record_of(self, node: NodeLife) -> str:
        words = f"{node.epoch} {self._nodes.tag(*_said_by(node)).hex()} {node.address}"
        return f"{words} {node.folder}" if node.folder else words

    def node_in(self, node_id: str, record: str) -> NodeLife:
        """Inverse of `record_of`. Raises ForgedEntry."""
        epoch, _, rest = record.partition(" ")
        tag, _, places = rest.partition(" ")
        address, _, folder = places.partition(" ")
        try:
            node, sealed = NodeLife(node_id, int(epoch), address, folder), bytes.fromhex(tag)
        except (ValueError, InvalidRequest) as error:
            raise ForgedEntry(f"no record of a node: {error}") from error
        if not self._nodes.verifies(sealed, *_said_by(node)):
            raise ForgedEntry(f"a record of {node_id} without this cluster's tag")
        return node

    def entry_of(self, place: EntryPlace, unit: IndexedUnit) -> str:
        tag = self._entries.tag(*_said_of(place, unit.num_bytes, unit.generation), unit.digest)
        return f"{unit.num_bytes},{unit.digest.hex()},{unit.generation},{tag.hex()}"

    def digest_in(self, place: EntryPlace, entry: str) -> bytes:
        """The digest of the unit by the entry in this place. Raises ForgedEntry."""
        return self.unit_in(place, entry).digest

    def unit_in(self, place: EntryPlace, entry: str) -> IndexedUnit:
        """The unit that the entry in this place names. Raises ForgedEntry."""
        try:
            size, digest, generation, tag = entry.split(",")
            sealed_fields = _said_of(place, int(size), int(generation))
            hashed, sealed = bytes.fromhex(digest), bytes.fromhex(tag)
        except ValueError as error:
            raise ForgedEntry(f"no entry: {error}") from error
        if not self._entries.verifies(sealed, *sealed_fields, hashed):
            raise ForgedEntry(f"an entry of {place.owner} without this cluster's tag")
        return IndexedUnit(place.kind, place.key, int(size), hashed, int(generation))


class SealedEntries:
    """Reads the answers of the Redis scripts. Drops and counts entries that no process of this
    cluster wrote."""

    def __init__(self, seals: IndexSeals) -> None:
        self._seals = seals
        self.num_forged = 0

    def node(self, node_id: str, record: object) -> NodeLife | None:
        """None without a record, or for a record that no node of this cluster wrote."""
        try:
            return self._seals.node_in(node_id, str(record)) if record else None
        except ForgedEntry as error:
            self._note_forged(error)
            return None

    def digests(
        self, node: NodeLife, unit: tuple[Kind, PageKey], entries: Sequence[str]
    ) -> frozenset[bytes]:
        """The digests that `node` announced for a unit; `entries` are in the order of TIERS."""
        digests: set[bytes] = set()
        for tier, entry in zip(TIERS, entries, strict=True):
            try:
                if entry != NOTHING:
                    digests.add(self._seals.digest_in(EntryPlace(node.owner, tier, *unit), entry))
            except ForgedEntry as error:
                self._note_forged(error)
        return frozenset(digests)

    def stored(self, node: NodeLife, unit: tuple[Kind, PageKey], entry: str) -> IndexedUnit | None:
        """The unit that `node` announced of its storage; None if it did not."""
        try:
            place = EntryPlace(node.owner, Tier.STORAGE, *unit)
            return self._seals.unit_in(place, entry) if entry != NOTHING else None
        except ForgedEntry as error:
            self._note_forged(error)
            return None

    def holding(
        self,
        announced: NodePrefix,
        chain: Sequence[PageKey],
        shape: ResumeShape,
        ends: Sequence[str],
    ) -> dict[str, NodePrefix]:
        """The prefix that a node really announced, by its id; less, or nothing, if entries are
        forged. `ends` are the entries at the end of its usable pages, and of its host pages.

        Pages before an end need no check: a node that has the last full page of a chain had all.
        """
        usable, host = chain[: announced.usable_pages], chain[: announced.host_pages]
        if not self._has_end(announced.node, usable, shape, ends[0], TIERS):
            return {}
        has_host = bool(host) and self._has_end(announced.node, host, shape, ends[1], (Tier.HOST,))
        return {announced.node.node_id: announced if has_host else replace(announced, host_pages=0)}

    def _has_end(
        self,
        node: NodeLife,
        chain: Sequence[PageKey],
        shape: ResumeShape,
        end: str,
        tiers: Sequence[Tier],
    ) -> bool:
        """Whether it holds the end of a resume set there: each kind's unit, in one of `tiers`."""
        entries = end.split(" ")
        for i, kind in enumerate(sorted(shape.kinds)):
            both = entries[i * len(TIERS) :][: len(TIERS)]
            mine = [
                entry if tier in tiers else NOTHING for tier, entry in zip(TIERS, both, strict=True)
            ]
            digests = self.digests(node, (kind, chain[-1]), mine)
            if not digests and _is_needed(kind, shape, len(chain)):
                return False
        return True

    def _note_forged(self, error: ForgedEntry) -> None:
        self.num_forged += 1
        if self.num_forged == 1:  # every lookup meets it again
            log.warning("the index holds what no process of this cluster wrote: %s", error)


def _is_needed(kind: Kind, shape: ResumeShape, depth: int) -> bool:
    """Whether the resume set at `depth` needs a unit of this kind: a window of one token needs no
    page."""
    window = resume_set(shape, depth * shape.page_size).window
    return kind is not Kind.WINDOW or window.num_pages > 0


def _said_by(node: NodeLife) -> tuple[bytes, ...]:
    sealed_fields = node.owner.encode(), node.address.encode()
    return (*sealed_fields, node.folder.encode()) if node.folder else sealed_fields


def _said_of(place: EntryPlace, num_bytes: int, generation: int) -> tuple[bytes, ...]:
    words = f"{place.owner} {place.tier.value} {place.kind.value} {num_bytes} {generation}"
    return words.encode(), place.key
