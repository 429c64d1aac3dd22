"""The order of eviction: each cached unit has a number, and the least is evicted first.

A snapshot's number is that of GreedyDual-Size with frequency (Cao and Irani, 1997; Cherkasova,
1998), which joins value and recency:

    credit = clock + value        the clock rises to the credit of what was evicted
    value  = seconds saved / bytes, and these are pages saved × a constant of the pool

A snapshot saves the pages between the next shallower snapshot and itself, once for each branch
below it and once for each use so far. All pages of a pool save the same, so the number of a page is
the time of its last use. A unit that serves no resume point any more (a window page without its
snapshot, a snapshot without its window) is evicted before all others; one that a caller pinned
(`Pins`) after all others. Reading the order changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.node import NO_POINTS, TreeNode
from ferryman.cache.slots import SlotHandle

_FULL, _WINDOW, _RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT

USELESS = -1.0
PINNED = 1e12  # above every credit, and every time in seconds

IsFree = Callable[[SlotHandle], bool]
SlotsByKey = Mapping[Kind, Mapping[PageKey, SlotHandle]]
_Entry = tuple[float, int, TreeNode]


class EvictionOrder:
    """Ranks the units of a tree. `slots` are the tree's own, which this class reads and never
    writes.

    `window_pages` lie before a resume point (0: windows do not count). The tree reports every
    insertion, removal and use.
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

    def _rank(self, kind: Kind, node: TreeNode) -> float:
        if kind is _RECURRENT:
            is_pinned = node.pinned_until > 0.0 and node.credit != USELESS
            return node.credit + PINNED if is_pinned else node.credit
        if kind is _WINDOW and self._has_points:
            if not node.points:
                return USELESS
            is_pinned = any(point.pinned_until > 0.0 for point in node.points.values())
        else:
            is_pinned = node.pinned_until > 0.0
        return node.last_use + PINNED if is_pinned else node.last_use

    def _is_candidate(self, kind: Kind, node: TreeNode) -> bool:
        if kind is _FULL and (node.children or node.holds):
            return False
        return node.parent is not None and node.key in self._slots[kind]

    def _is_live(self, kind: Kind, entry: _Entry) -> bool:
        node = entry[2]
        return self._is_candidate(kind, node) and entry[0] == self._rank(kind, node)

    def offer(self, node: TreeNode) -> None:
        """Queues the units of a node that may be evicted, with their present rank.

        Older entries of the node become stale.
        """
        only = (node,)
        for kind in self._slots:
            if self._is_candidate(kind, node):
                self._push(kind, only)

    def _push(self, kind: Kind, nodes: Iterable[TreeNode]) -> None:
        heap, rank, ticket = self._heaps[kind], self._rank, self._ticket
        for node in nodes:
            heapq.heappush(heap, (rank(kind, node), next(ticket), node))
        if len(heap) > 4 * len(self._slots[kind]) + 64:
            heap[:] = [entry for entry in heap if self._is_live(kind, entry)]
            heapq.heapify(heap)

    # Events of the tree.

    def on_insert(
        self, points: Sequence[TreeNode], windows: Sequence[TreeNode], end: TreeNode
    ) -> None:
        """A path up to `end` is complete; these snapshots and window pages are new on it."""
        for point in points:
            if point is not end:
                self._current(point)
        self._current(end)
        # A page in the window of a point was queued with the point. A full page is no leaf yet.
        if others := [page for page in windows if not page.points]:
            self._push(_WINDOW, others)

    def _current(self, node: TreeNode) -> None:
        """Ranks and queues a node whose own units and window are complete."""
        if node.key in self._snapshots:
            self._score(node)
        self.offer(node)

    def on_use(self, node: TreeNode, now: float) -> None:
        """A request resumes at the end of this page: the page and its window are used."""
        if now <= node.last_use:
            return
        node.uses += 1
        for page in (node, *node.path_up(self._window_pages)):
            if now > page.last_use:
                page.last_use = now
                if page is not node:
                    self.offer(page)
        self._current(node)

    def on_fork(self, node: TreeNode) -> None:
        """This node got one more child."""
        if node.children > 1 and node.key in self._snapshots:
            self._current(node)

    def on_pin(self, node: TreeNode) -> None:
        """A pin on this node began or ended: its own units and its window have another rank."""
        self.offer(node)
        if self._has_points:
            held = [page for page in node.path_up(self._window_pages) if page.key in self._windows]
            self._push(_WINDOW, held)

    def on_evict(self, kind: Kind, node: TreeNode) -> None:
        """This unit is evicted as the least: the clock rises, so later snapshots rank higher."""
        if kind is _RECURRENT:
            self._clock = max(self._clock, node.credit)

    def on_remove(self, kind: Kind, node: TreeNode) -> None:
        """A unit left the tree."""
        if kind is _RECURRENT:
            self._release_window(node)
        elif kind is _WINDOW and node.points:
            for point in list(node.points.values()):
                self._release_window(point)
                point.credit = USELESS
                self._push(_RECURRENT, (point,))

    # Snapshots and their windows.

    def _score(self, point: TreeNode) -> None:
        point.credit = USELESS
        if self._has_points and not self._claim_window(point):
            return
        pages = point.depth - self._depth_below(point)
        point.credit = self._clock + pages * (max(1, point.children) + point.uses)

    def _depth_below(self, point: TreeNode) -> int:
        """The depth of the next shallower snapshot: requests would resume there without this."""
        node, snapshots = point.parent, self._snapshots
        while node is not None and node.depth and node.key not in snapshots:
            node = node.parent
        return node.depth if node is not None else 0

    def _claim_window(self, point: TreeNode) -> bool:
        """Adds this point to each page of its window; False, and adds nothing, when a page is
        missing."""
        if point.key in point.points:
            return True
        pages = []
        for page in point.path_up(self._window_pages):
            if page.key not in self._windows:
                return False
            pages.append(page)
        only = {point.key: point}  # shared by all pages that no other point needs
        # A pin of this point is one of its window, too: pages of other points have another rank.
        changed = pages if point.pinned_until else [page for page in pages if not page.points]
        for page in pages:
            page.points = {**page.points, **only} if page.points else only
        self._push(_WINDOW, changed)
        return True

    def _release_window(self, point: TreeNode) -> None:
        """Removes a resume point from its window: pages that served it alone become useless."""
        for page in point.path_up(self._window_pages if self._has_points else 0):
            if point.key not in page.points:
                continue
            rest = {key: other for key, other in page.points.items() if other is not point}
            page.points = rest or NO_POINTS
            if (not rest or point.pinned_until) and page.key in self._windows:
                self._push(_WINDOW, (page,))

    def pop_least(self, path: list[TreeNode]) -> TreeNode:
        """Takes the point to give up out of `path`, the points of one path in order. Never the
        newest.

        Forks are given up last, but for points that are pinned. The next deeper point now saves the
        pages of the removed one too.
        """
        least = min(path[:-1], key=_thinning_rank)
        place = path.index(least)
        deeper, below = path[place + 1], path[place - 1].depth if place else 0
        if deeper.credit != USELESS:
            deeper.credit += least.depth - below
            self._push(_RECURRENT, (deeper,))
        del path[place]
        return least

    def check_integrity(self, nodes: Collection[TreeNode]) -> None:
        """Raises AssertionError unless the order finds all units that may be evicted."""
        for kind, heap in self._heaps.items():
            live = {entry[2].key for entry in heap if self._is_live(kind, entry)}
            candidates = (node for node in nodes if self._is_candidate(kind, node))
            assert all(node.key in live for node in candidates), (
                f"no eviction finds a unit of {kind}"
            )

    # Reading the order.

    def nodes(self, kind: Kind, is_free: IsFree) -> Iterator[TreeNode]:
        """The nodes whose unit of `kind` is evicted next, in order.

        A page counts as a leaf once all its children were yielded. The tree must not change while
        this is read. Stale entries at the top of the heap are dropped.
        """
        heap = self._heaps[kind]
        while heap and not self._is_live(kind, heap[0]):
            heapq.heappop(heap)
        ahead: list[tuple[float, int, TreeNode, int]] = []
        _push_heap_entry(heap, 0, ahead)
        gone: dict[PageKey, int] = {}
        named: set[PageKey] = set()
        while ahead:
            rank, ticket, node, index = heapq.heappop(ahead)
            if index >= 0:
                _push_heap_entry(heap, 2 * index + 1, ahead)
                _push_heap_entry(heap, 2 * index + 2, ahead)
                if node.key in named or not self._is_live(kind, (rank, ticket, node)):
                    continue
            if not is_free(self._slots[kind][node.key]):
                continue
            named.add(node.key)
            yield node
            # A page is a leaf once all its children are gone; it has a rank of its own then.
            parent = node.parent
            if kind is _FULL and parent is not None and parent.depth:
                gone[parent.key] = gone.get(parent.key, 0) + 1
                if gone[parent.key] == parent.children and not parent.holds:
                    last_use = max(parent.last_use, node.last_use)
                    last_use += PINNED if parent.pinned_until else 0.0
                    heapq.heappush(ahead, (last_use, next(self._ticket), parent, -1))

    def choose(
        self, lacks: Mapping[Kind, int], is_free: IsFree
    ) -> tuple[list[tuple[Kind, TreeNode]], bool]:
        """The units to give up so that `lacks` slots become free, and whether they are enough.

        Evicting a full page frees the other units of its node too, so full pages are chosen first.
        """
        chosen: list[tuple[Kind, TreeNode]] = []
        going: dict[PageKey, TreeNode] = {}
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


def _thinning_rank(node: TreeNode) -> tuple[bool, bool, float, int]:
    return node.pinned_until > 0.0, node.children > 1, node.credit, node.depth


def _push_heap_entry(
    heap: list[_Entry], index: int, ahead: list[tuple[float, int, TreeNode, int]]
) -> None:
    if index < len(heap):
        heapq.heappush(ahead, (*heap[index], index))
