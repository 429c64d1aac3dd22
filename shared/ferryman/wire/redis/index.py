"""The index of the host and storage tiers: the nodes that hold each unit. Hints, never bytes.

Before using a hint a caller asks the holder. An index that is away counts as empty: lookups are
misses and are counted, never errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.units import Tier
from ferryman.wire.nats.subjects import check_name


@dataclass(frozen=True, slots=True)
class NodeLife:
    """One life of one node's host-cache. Announcements of an earlier life are void.

    `address` is its gRPC server's, empty while that is not known. `folder` is the node id of the
    bucket's folder that it owns, empty if it has none; of such a folder its name there (see
    `bucket_folders`). Neither counts in comparisons.
    """

    node_id: str
    epoch: int
    address: str = field(default="", compare=False)
    folder: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_name(self.node_id, "node id")

    @property
    def owner(self) -> str:
        return f"{self.node_id}#{self.epoch}"


@dataclass(frozen=True, slots=True)
class IndexedUnit:
    """A unit that a node holds; a recurrent unit is named by the page that ends at its position."""

    kind: Kind
    key: PageKey
    num_bytes: int
    digest: bytes
    generation: int = 0


@dataclass(frozen=True, slots=True)
class NodePrefix:
    """The part of a chain, in pages, that a node can make usable: the longest with a resume set.

    `usable_pages` counts its host and storage tiers together, `host_pages` the host tier alone; the
    first is never less than the second. `shared_pages`: how much another folder of its bucket has.
    """

    node: NodeLife
    usable_pages: int
    host_pages: int
    shared_pages: int = 0


class FolderClaim(StrEnum):
    """The answer to the claim on a folder: the index had it, had it not, or has a later term's."""

    KNOWN = "known"
    NEW = "new"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """Counts since the start. `num_failures` counts calls without an answer, `num_forged` entries
    in the index that no process of this cluster wrote, `num_refused` the logins and commands of
    anybody that Redis has refused since its own start."""

    num_hits: int = 0
    num_misses: int = 0
    num_misses_away: int = 0
    num_waiting: int = 0
    num_dropped: int = 0
    num_failures: int = 0
    num_forged: int = 0
    num_refused: int = 0
    is_away: bool = False


class PrefixIndex(Protocol):
    """The interface of both indexes; `tests/wire/test_index.py` tests both."""

    async def announce(self, node: NodeLife, ttl_seconds: float) -> bool:
        """Announces that this life is alive, until `ttl_seconds` after the last such call.

        False when the index did not have it, or is away: the other announcements may be lost too,
        and must be repeated.
        """
        ...

    async def withdraw(self, node: NodeLife) -> None:
        """Ends this life: its announcements are void at once."""
        ...

    async def claim(self, folder: NodeLife, ttl_seconds: float) -> FolderClaim:
        """Announces the owner of a folder, like a node; its epoch is the owner's term.

        The claim of a later term stays. NEW also when the index is away.
        """
        ...

    async def commit(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[IndexedUnit]
    ) -> None:
        """Announces that `node` holds a whole group. `root` is the key of the chain's first
        page."""
        ...

    async def forget(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[tuple[Kind, PageKey]]
    ) -> None:
        """Announces that `node` holds these units no longer."""
        ...

    async def usable_pages(
        self, chain: Sequence[PageKey], shape: ResumeShape
    ) -> Mapping[str, NodePrefix]:
        """The longest prefix of the chain whose resume set a node holds, by node id.

        Nodes without a usable prefix, or not known to live, are left out. A folder of a bucket is
        an owner like a node, without an address.
        """
        ...

    async def digests(
        self, node: NodeLife, root: PageKey, units: Sequence[tuple[Kind, PageKey]]
    ) -> Mapping[tuple[Kind, PageKey], frozenset[bytes]]:
        """The digests of these units that `node` announced, from any tier.

        Units that it did not announce are left out.
        """
        ...

    async def stored_units(
        self, node: NodeLife, root: PageKey, units: Sequence[tuple[Kind, PageKey]]
    ) -> Mapping[tuple[Kind, PageKey], IndexedUnit]:
        """The units among these that `node` announced of its storage tier."""
        ...

    def statistics(self) -> IndexStatistics: ...
