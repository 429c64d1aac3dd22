"""The order of eviction: one number for each cached unit, and the least goes first.

A snapshot's number is that of GreedyDual-Size with frequency (Cao and Irani, 1997; Cherkasova,
1998), which joins value and recency:

    credit = clock + value        the clock rises to the credit of what was evicted
    value  = seconds saved / bytes, and these are pages saved × a constant of the pool

The pages it saves are those behind the next snapshot before it, for each branch that goes on from
it and each use so far. All pages of a pool are worth the same, so theirs is the time of their last
use. What serves no resume point any more (a window page without its snapshot, a snapshot without
its window) goes first of all. Reading the order changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.node import NO_POINTS, Node
from ferryman.cache.slots import SlotHandle

_FULL, _WINDOW, _RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT

USELESS = -1.0

IsFree = Callable[[SlotHandle], bool]
_Entry = tuple[float, int, Node]


class EvictionOrder:
    """Ranks what a tree holds. `window_pages` lie before a resume point (0: windows do not count).

    The tree says what came, went and was used; nodes are otherwise left alone.
    """

    def __init__(self, kinds: Sequence[Kind], window_pages: int) -> None:
        self._leaf_first = _FULL in kinds
        self._window_pages = window_pages if _WINDOW in kinds else 0
        self._has_points = self._window_pages > 0 and _RECURRENT in kinds
        self._heaps: dict[Kind, list[_Entry]] = {kind: [] for kind in kinds}
        self._sizes = dict.fromkeys(kinds, 0)
        self._ticket = count()
        self._clock = 0.0

    def size(self, kind: Kind) -> int:
        """Units of a kind that the tree holds."""
        return self._sizes[kind]

    # Ranks.

    def _rank(self, kind: Kind, node: Node) -> float:
        if kind is _RECURRENT:
            return node.credit
        if kind is _WINDOW and self._has_points and not node.points:
            return USELESS
        return node.last_use

    def _is_candidate(self, kind: Kind, node: Node) -> bool:
        if kind not in node.slots:
            return False
        return kind is not _FULL or (node.children == 0 and node.holds == 0)

    def _is_live(self, kind: Kind, entry: _Entry) -> bool:
        node = entry[2]
        return self._is_candidate(kind, node) and entry[0] == self._rank(kind, node)

    def offer(self, node: Node) -> None:
        """Makes known what of a node may be evicted, as of now; older entries are stale."""
        for kind in node.slots:
            if self._is_candidate(kind, node):
                self._push(kind, node)

    def _push(self, kind: Kind, node: Node) -> None:
        heap = self._heaps[kind]
        heapq.heappush(heap, (self._rank(kind, node), next(self._ticket), node))
        if len(heap) > 4 * self._sizes[kind] + 64:
            heap[:] = [entry for entry in heap if self._is_live(kind, entry)]
            heapq.heapify(heap)

    # What the tree tells.

    def came(self, kind: Kind, node: Node) -> None:
        """A unit was put into `node.slots`; `settled` follows when its path is complete."""
        self._sizes[kind] += 1

    def settled(self, node: Node) -> None:
        """All that comes with this node and the pages before it is there."""
        if _RECURRENT in node.slots:
            self._appraise(node)
        self.offer(node)

    def used(self, node: Node, now: float) -> None:
        """Somebody resumes at the end of this page: it and its window are wanted."""
        if now <= node.last_use:
            return
        node.uses += 1
        for page in (node, *node.up(self._window_pages)):
            if now > page.last_use:
                page.last_use = now
                if page is not node:
                    self.offer(page)
        self.settled(node)

    def forked(self, node: Node) -> None:
        """One branch more goes on from here."""
        if node.children > 1 and _RECURRENT in node.slots:
            self.settled(node)

    def passed_over(self, kind: Kind, node: Node) -> None:
        """This unit is given up for being worth least: what comes from now on is worth more."""
        if kind is _RECURRENT:
            self._clock = max(self._clock, node.credit)

    def goes(self, kind: Kind, node: Node) -> None:
        """A unit leaves the tree; to be called while it is still in `node.slots`."""
        self._sizes[kind] -= 1
        if kind is _RECURRENT:
            self._let_go(node)
        elif kind is _WINDOW and node.points:
            for point in list(node.points.values()):
                self._let_go(point)
                point.credit = USELESS
                self._push(_RECURRENT, point)

    # Snapshots and their windows.

    def _appraise(self, point: Node) -> None:
        point.credit = USELESS
        if self._has_points and not self._claim_window(point):
            return
        pages = point.depth - self._depth_below(point)
        point.credit = self._clock + pages * (max(1, point.children) + point.uses)

    def _depth_below(self, point: Node) -> int:
        """The depth of the next snapshot before this one: where one would resume without it."""
        node = point.parent
        while node is not None and node.depth and _RECURRENT not in node.slots:
            node = node.parent
        return node.depth if node is not None else 0

    def _claim_window(self, point: Node) -> bool:
        """Notes on each page of its window that this point needs it; False when one is lacking."""
        pages = list(point.up(self._window_pages))
        if not all(_WINDOW in page.slots for page in pages):
            return False
        for page in pages:
            is_new = not page.points
            page.points = {**page.points, point.key: point}
            if is_new:
                self._push(_WINDOW, page)
        return True

    def _let_go(self, point: Node) -> None:
        """A resume point is one no more: pages that served it alone serve nothing."""
        for page in point.up(self._window_pages if self._has_points else 0):
            if point.key not in page.points:
                continue
            rest = {key: other for key, other in page.points.items() if other is not point}
            page.points = rest or NO_POINTS
            if not rest and _WINDOW in page.slots:
                self._push(_WINDOW, page)

    def least_of_path(self, newest: Node, most: int) -> Node | None:
        """The snapshot to give up when the path up to `newest` has more than `most`.

        Forks stay as long as there is another. What it saved is now saved by the next one behind.
        """
        held = [node for node in newest.up(newest.depth) if _RECURRENT in node.slots]
        if len(held) <= most:
            return None
        least = min(held[1:], key=lambda node: (node.children > 1, node.credit, node.depth))
        behind = held[held.index(least) - 1]
        if behind.credit != USELESS:
            behind.credit += least.depth - self._depth_below(least)
            self._push(_RECURRENT, behind)
        return least

    # Reading the order.

    def nodes(self, kind: Kind, is_free: IsFree) -> Iterator[Node]:
        """Whose unit goes next, in order; a page becomes a leaf when its last child was named.

        Nothing may come, go or be used while this is read. Stale entries on top are dropped.
        """
        heap = self._heaps[kind]
        while heap and not self._is_live(kind, heap[0]):
            heapq.heappop(heap)
        ahead: list[tuple[float, int, Node, int]] = []
        _look(heap, 0, ahead)
        gone: dict[PageKey, int] = {}
        named: set[PageKey] = set()
        while ahead:
            rank, ticket, node, index = heapq.heappop(ahead)
            if index >= 0:
                _look(heap, 2 * index + 1, ahead)
                _look(heap, 2 * index + 2, ahead)
                if node.key in named or not self._is_live(kind, (rank, ticket, node)):
                    continue
            if not is_free(node.slots[kind]):
                continue
            named.add(node.key)
            yield node
            parent = node.parent
            if kind is _FULL and parent is not None and parent.depth:
                gone[parent.key] = gone.get(parent.key, 0) + 1
                if gone[parent.key] == parent.children and not parent.holds:
                    last_use = max(parent.last_use, node.last_use)
                    heapq.heappush(ahead, (last_use, next(self._ticket), parent, -1))

    def choose(
        self, lacks: Mapping[Kind, int], is_free: IsFree
    ) -> tuple[list[tuple[Kind, Node]], bool]:
        """What to give up so that `lacks` slots become free, and whether that is enough.

        A full page takes along whatever else its node holds, so full pages are chosen first.
        """
        chosen: list[tuple[Kind, Node]] = []
        going: dict[PageKey, Node] = {}
        is_enough = True
        for kind in sorted(lacks, key=lambda kind: kind is not _FULL):
            missing = lacks[kind] - sum(
                kind in node.slots and is_free(node.slots[kind]) for node in going.values()
            )
            for node in self.nodes(kind, is_free) if missing > 0 else ():
                if node.key not in going:
                    chosen.append((kind, node))
                    missing -= 1
                    if missing == 0:
                        break
            is_enough = is_enough and missing <= 0
            if kind is _FULL:
                going = {node.key: node for _, node in chosen}
        return chosen, is_enough


def _look(heap: list[_Entry], index: int, ahead: list[tuple[float, int, Node, int]]) -> None:
    if index < len(heap):
        heapq.heappush(ahead, (*heap[index], index))
