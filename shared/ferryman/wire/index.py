"""The index of the host and storage tiers: which node holds which units. Hints, never bytes.

Whoever acts on a hint asks the holder. An index that is away is an index that knows nothing:
lookups are misses and are counted, never errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.units import Tier
from ferryman.wire.subjects import check_name


@dataclass(frozen=True, slots=True)
class NodeLife:
    """One life of one node's host-cache. What an earlier life announced is void.

    `address` is where its gRPC server is reached, empty while that is not known; two lives are the
    same life wherever they are reached.
    """

    node_id: str
    epoch: int
    address: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_name(self.node_id, "node id")

    @property
    def owner(self) -> str:
        return f"{self.node_id}#{self.epoch}"


@dataclass(frozen=True, slots=True)
class IndexedUnit:
    """A unit that a node holds; a recurrent one is named by the page that ends at its position."""

    kind: Kind
    key: PageKey
    num_bytes: int
    digest: bytes
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """How much of a chain, in pages, a node can make usable: the longest prefix with a resume set.

    `usable_pages` counts what its host and storage tiers hold together, `host_pages` what the host
    tier alone holds; the first is never less than the second.
    """

    node: NodeLife
    usable_pages: int
    host_pages: int


@dataclass(frozen=True, slots=True)
class ResumeShape:
    """What of a model decides how far a chain of keys is usable."""

    page_size: int
    window_len: int
    kinds: frozenset[Kind]

    @classmethod
    def of(cls, manifest: StateManifest) -> ResumeShape:
        return cls(manifest.page_size, manifest.window_len, frozenset(manifest.kinds))

    def window_pages(self, depth: int) -> range:
        """The pages that meet the window before the end of page `depth` - 1."""
        first = max(0, depth * self.page_size - self.window_len + 1) // self.page_size
        return range(first, depth)


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """Counts since the start. `num_failures` counts calls that were not answered."""

    num_hits: int = 0
    num_misses: int = 0
    num_misses_away: int = 0
    num_waiting: int = 0
    num_dropped: int = 0
    num_failures: int = 0
    is_away: bool = False


class PrefixIndex(Protocol):
    """What both indexes can do; `tests/wire/test_index.py` holds both to it."""

    async def announce(self, node: NodeLife, ttl_seconds: float) -> bool:
        """This life is alive, until `ttl_seconds` after the last such word.

        False when the index had no such word, or is away: whatever else it was told may be gone
        with it, and has to be said anew.
        """
        ...

    async def withdraw(self, node: NodeLife) -> None:
        """This life ends: what it announced is void at once."""
        ...

    async def commit(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[IndexedUnit]
    ) -> None:
        """`node` holds all of a group. `root` is the key of the chain's first page."""
        ...

    async def forget(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[tuple[Kind, PageKey]]
    ) -> None:
        """`node` holds these no longer."""
        ...

    async def usable_pages(
        self, chain: Sequence[PageKey], shape: ResumeShape
    ) -> Mapping[str, Holding]:
        """By node id: the longest prefix of the chain of which it holds a resume set.

        Nodes that hold nothing usable, or are not known to live, are left out.
        """
        ...

    async def digests(
        self, node: NodeLife, root: PageKey, units: Sequence[tuple[Kind, PageKey]]
    ) -> Mapping[tuple[Kind, PageKey], frozenset[bytes]]:
        """What `node` said that these units hash to, in whichever tier it holds them.

        Units of which it said nothing are left out.
        """
        ...

    def statistics(self) -> IndexStatistics: ...


def usable_depth(chain_len: int, shape: ResumeShape, held: Mapping[Kind, set[int]]) -> int:
    """The deepest page end at which a resume set is held; `held` has page indexes by kind.

    Plain and slow: the definition that the script in Redis has to agree with.
    """
    nothing: set[int] = set()
    full, window = held.get(Kind.FULL, nothing), held.get(Kind.WINDOW, nothing)
    recurrent = held.get(Kind.RECURRENT, nothing)
    for depth in range(chain_len, 0, -1):
        has_full = Kind.FULL not in shape.kinds or full.issuperset(range(depth))
        has_window = Kind.WINDOW not in shape.kinds or window.issuperset(shape.window_pages(depth))
        has_snapshot = Kind.RECURRENT not in shape.kinds or depth - 1 in recurrent
        if has_full and has_window and has_snapshot:
            return depth
    return 0
