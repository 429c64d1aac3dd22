"""The prefix tree's values: its pages, and what goes in and comes out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle

# Shared by all pages outside any window: one dictionary for each would dominate insertion's cost.
NO_POINTS: Mapping[PageKey, TreeNode] = {}


class TreeNode:
    """One page. `depth` counts the pages up to and including it. The tree finds its slots by `key`.

    `guards` counts its own holds and its guarded children: above 0 the page cannot be evicted.
    `uses` counts the requests that resumed here; `credit` ranks its snapshot for eviction. `points`
    are the resume points, by key, whose window contains this page. `pinned_until` is above 0 while
    a caller's pin is on it. `parent` is None once the page left the tree.
    """

    __slots__ = (
        "children",
        "credit",
        "depth",
        "guards",
        "holds",
        "key",
        "last_use",
        "parent",
        "pinned_until",
        "points",
        "uses",
    )

    def __init__(
        self, key: PageKey, parent: TreeNode | None, children: int, last_use: float
    ) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.children = children
        self.holds = 0
        self.guards = 0
        self.last_use = last_use
        self.uses = 0
        self.credit = 0.0
        self.pinned_until = 0.0
        self.points: Mapping[PageKey, TreeNode] = NO_POINTS

    def path_up(self, num_pages: int) -> Iterator[TreeNode]:
        """This page and those before it, deepest first, at most `num_pages` of them."""
        node = self
        while num_pages and node.parent is not None:
            yield node
            node, num_pages = node.parent, num_pages - 1


@dataclass(frozen=True, slots=True)
class Branch:
    """The pages and slots that a request offers to the tree.

    `keys` name all pages from the root on. `units[kind]` maps the index of a page to the slot that
    holds it; a recurrent slot belongs to the page that ends at its position. Full units cover
    without a gap all pages from the first one that the tree lacks to the last.
    """

    keys: Sequence[PageKey]
    units: Mapping[Kind, Mapping[int, SlotHandle]]


@dataclass(frozen=True, slots=True)
class Inserted:
    """The result of an insertion: slots the tree keeps, and (page, own, canonical) for duplicates.

    `dropped` are snapshots that the tree gave up, because their path has too many.
    """

    adopted: tuple[SlotHandle, ...]
    duplicates: tuple[tuple[int, SlotHandle, SlotHandle], ...]
    dropped: tuple[SlotHandle, ...] = ()


class TreeChange(NamedTuple):
    """Units of one kind that entered the tree together (`is_stored`), or left it."""

    kind: Kind
    keys: tuple[PageKey, ...]
    is_stored: bool
