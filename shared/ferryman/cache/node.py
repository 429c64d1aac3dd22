"""One page of the prefix tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ferryman.cache.keys import PageKey

# Shared by all pages outside any window: a dictionary each would be what insertion spends most on.
NO_POINTS: Mapping[PageKey, Node] = {}


class Node:
    """One page: `depth` pages lead up to and include it; the tree knows its slots by its key.

    `guards` counts its own holds and the children that are guarded: above 0 its page cannot go.
    `uses` counts who resumed here; `credit` ranks its snapshot for eviction. `points` are the
    resume points, by key, whose window this page lies in. `parent` is None once it left the tree.
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
        "points",
        "uses",
    )

    def __init__(self, key: PageKey, parent: Node | None, children: int, last_use: float) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.children = children
        self.holds = 0
        self.guards = 0
        self.last_use = last_use
        self.uses = 0
        self.credit = 0.0
        self.points: Mapping[PageKey, Node] = NO_POINTS

    def up(self, num_pages: int) -> Iterator[Node]:
        """This page and those before it, deepest first, at most `num_pages` of them."""
        node = self
        while num_pages and node.parent is not None:
            yield node
            node, num_pages = node.parent, num_pages - 1
