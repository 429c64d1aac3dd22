"""The prefix tree's values: its pages, what goes in and comes out of it, and the pins on it.

A pin keeps a snapshot, or a page where there is none, that a caller asked to keep for a time
(Anthropic's `ttl`). It orders, it does not hold: what is pinned is evicted after all that is not,
and when nothing else is left, so no request ever waits for one. An owner pins so many at once, all
owners together twice as many; for one more the oldest pin ends.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle

Owner = bytes
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


class Pins:
    """The pins of a tree, of which an owner has `most`. `pin` and `expire` return the nodes whose
    rank among those to be evicted has changed."""

    def __init__(self, most: int) -> None:
        self._most = most
        # By key, the oldest first; of all owners, and of each.
        self._owner_of: OrderedDict[PageKey, Owner] = OrderedDict()
        self._nodes: dict[Owner, OrderedDict[PageKey, TreeNode]] = {}
        self._ends: list[tuple[float, int, TreeNode]] = []
        self._ticket = count()

    def __len__(self) -> int:
        return len(self._owner_of)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._owner_of

    def pin(self, node: TreeNode, until: float, owner: Owner) -> tuple[TreeNode, ...]:
        """Pins a node up to this time, or longer if it is pinned longer already."""
        if self._most <= 0:
            return ()
        until = max(until, node.pinned_until)
        self.unpin(node)
        released = self._with_room(owner)
        node.pinned_until = until
        self._owner_of[node.key] = owner
        self._nodes.setdefault(owner, OrderedDict())[node.key] = node
        heapq.heappush(self._ends, (until, next(self._ticket), node))
        return (node, *released)

    def _with_room(self, owner: Owner) -> list[TreeNode]:
        """Ends the oldest pins, of this owner or of all, until there is room for one more."""
        released = list[TreeNode]()
        while len(of_owner := self._nodes.get(owner, OrderedDict())) >= self._most:
            released.append(next(iter(of_owner.values())))
            self.unpin(released[-1])
        while len(self) >= 2 * self._most:
            key, oldest = next(iter(self._owner_of.items()))
            released.append(self._nodes[oldest][key])
            self.unpin(released[-1])
        return released

    def unpin(self, node: TreeNode) -> bool:
        """Ends the pin of a node; False if it has none."""
        owner = self._owner_of.pop(node.key, None)
        if owner is None:
            return False
        node.pinned_until = 0.0
        del self._nodes[owner][node.key]
        if not self._nodes[owner]:
            del self._nodes[owner]
        return True

    def expire(self, now: float) -> tuple[TreeNode, ...]:
        """Ends the pins whose time is over."""
        expired = list[TreeNode]()
        while self._ends and self._ends[0][0] <= now:
            _, _, node = heapq.heappop(self._ends)
            # It may have been pinned longer since, or have left the tree.
            if node.key in self and 0.0 < node.pinned_until <= now:
                self.unpin(node)
                expired.append(node)
        if len(self._ends) > 4 * len(self) + 64:  # most are of pins that were renewed
            held = [node for of_owner in self._nodes.values() for node in of_owner.values()]
            self._ends = [(node.pinned_until, next(self._ticket), node) for node in held]
            heapq.heapify(self._ends)
        return tuple(expired)
