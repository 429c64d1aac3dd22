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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.node import NO_POINTS, Node
from ferryman.cache.slots import SlotHandle

_FULL, _WINDOW, _RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT

USELESS = -1.0

IsFree = Callable[[SlotHandle], bool]
SlotsByKey = Mapping[Kind, Mapping[PageKey, SlotHandle]]
_Entry = tuple[float, int, Node]


class EvictionOrder:
    """Ranks what a tree holds: its `slots`, read here and never written.

    `window_pages` lie before a resume point (0: windows do not count). The tree says what came,
    went and was used; nodes are otherwise left alone.
    """

    def __init__(self, slots: SlotsByKey, window_pages: int) -> None:
        self._slots = slots
        self._snapshots = slots.get(_RECURRENT, {})
        self._windows = slots.get(_WINDOW, {})
        self._window_pages = window_pages if _WINDOW in slots else 0
        self._has_points = self._window_pages > 0 and _RECURRENT in slots
        self._heaps: dict[Kind, list[_Entry]] = {kind: [] for kind in slots}
        self._ticket = count()
        self._clock = 0.0

    # Ranks.

    def _rank(self, kind: Kind, node: Node) -> float:
        if kind is _RECURRENT:
            return node.credit
        if kind is _WINDOW and self._has_points and not node.points:
            return USELESS
        return node.last_use

    def _is_candidate(self, kind: Kind, node: Node) -> bool:
        if kind is _FULL and (node.children or node.holds):
            return False
        return node.parent is not None and node.key in self._slots[kind]

    def _is_live(self, kind: Kind, entry: _Entry) -> bool:
        node = entry[2]
        return self._is_candidate(kind, node) and entry[0] == self._rank(kind, node)

    def offer(self, node: Node) -> None:
        """Makes known what of a node may be evicted, as of now; older entries are stale."""
        only = (node,)
        for kind in self._slots:
            if self._is_candidate(kind, node):
                self._push(kind, only)

    def _push(self, kind: Kind, nodes: Iterable[Node]) -> None:
        heap, rank, ticket = self._heaps[kind], self._rank, self._ticket
        for node in nodes:
            heapq.heappush(heap, (rank(kind, node), next(ticket), node))
        if len(heap) > 4 * len(self._slots[kind]) + 64:
            heap[:] = [entry for entry in heap if self._is_live(kind, entry)]
            heapq.heapify(heap)

    # What the tree tells.

    def came(self, points: Sequence[Node], windows: Sequence[Node], end: Node) -> None:
        """A path up to `end` is complete; these snapshots and window pages are new on it."""
        for point in points:
            if point is not end:
                self._settled(point)
        self._settled(end)
        # A page in the window of a point was pushed with it; a full page is no leaf yet.
        if others := [page for page in windows if not page.points]:
            self._push(_WINDOW, others)

    def _settled(self, node: Node) -> None:
        """All that comes with this node and the pages before it is there."""
        if node.key in self._snapshots:
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
        self._settled(node)

    def forked(self, node: Node) -> None:
        """One branch more goes on from here."""
        if node.children > 1 and node.key in self._snapshots:
            self._settled(node)

    def passed_over(self, kind: Kind, node: Node) -> None:
        """This unit is given up for being worth least: what comes from now on is worth more."""
        if kind is _RECURRENT:
            self._clock = max(self._clock, node.credit)

    def went(self, kind: Kind, node: Node) -> None:
        """A unit left the tree."""
        if kind is _RECURRENT:
            self._let_go(node)
        elif kind is _WINDOW and node.points:
            for point in list(node.points.values()):
                self._let_go(point)
                point.credit = USELESS
                self._push(_RECURRENT, (point,))

    # Snapshots and their windows.

    def _appraise(self, point: Node) -> None:
        point.credit = USELESS
        if self._has_points and not self._claim_window(point):
            return
        pages = point.depth - self._depth_below(point)
        point.credit = self._clock + pages * (max(1, point.children) + point.uses)

    def _depth_below(self, point: Node) -> int:
        """The depth of the next snapshot before this one: where one would resume without it."""
        node, snapshots = point.parent, self._snapshots
        while node is not None and node.depth and node.key not in snapshots:
            node = node.parent
        return node.depth if node is not None else 0

    def _claim_window(self, point: Node) -> bool:
        """Notes on each page of its window that this point needs it; False when one is lacking."""
        if point.key in point.points:
            return True
        pages = []
        for page in point.up(self._window_pages):
            if page.key not in self._windows:
                return False
            pages.append(page)
        only = {point.key: point}  # shared by all pages that no other point needs
        new = [page for page in pages if not page.points]
        for page in pages:
            page.points = {**page.points, **only} if page.points else only
        self._push(_WINDOW, new)
        return True

    def _let_go(self, point: Node) -> None:
        """A resume point is one no more: pages that served it alone serve nothing."""
        for page in point.up(self._window_pages if self._has_points else 0):
            if point.key not in page.points:
                continue
            rest = {key: other for key, other in page.points.items() if other is not point}
            page.points = rest or NO_POINTS
            if not rest and page.key in self._windows:
                self._push(_WINDOW, (page,))

    def pop_least(self, path: list[Node]) -> Node:
        """Takes out of the points of a path, in order, the one to give up; never the newest.

        Forks stay as long as there is another. What it saved is now saved by the next one behind.
        """
        least = min(path[:-1], key=lambda node: (node.children > 1, node.credit, node.depth))
        place = path.index(least)
        behind, below = path[place + 1], path[place - 1].depth if place else 0
        if behind.credit != USELESS:
            behind.credit += least.depth - below
            self._push(_RECURRENT, (behind,))
        del path[place]
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
            if not is_free(self._slots[kind][node.key]):
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
            slots = self._slots[kind]
            missing = lacks[kind] - sum(key in slots and is_free(slots[key]) for key in going)
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
