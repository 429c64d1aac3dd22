"""Pins: snapshots and pages that callers asked to keep for a time (Anthropic's `ttl`).

A pin orders, it does not hold: what is pinned is evicted after all that is not, and when nothing
else is left, so no request ever waits for one. An owner pins so many at once, all owners together
twice as many; for one more the oldest pin ends.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import count

from ferryman.cache.keys import PageKey
from ferryman.cache.node import TreeNode

Owner = bytes


class Pins:
    """The pins of a tree, of which an owner has `most`. All calls return the nodes whose rank among
    those to be evicted has changed."""

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

    def unpin(self, node: TreeNode) -> None:
        """Ends the pin of a node, if it has one."""
        owner = self._owner_of.pop(node.key, None)
        if owner is None:
            return
        node.pinned_until = 0.0
        del self._nodes[owner][node.key]
        if not self._nodes[owner]:
            del self._nodes[owner]

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
