"""The prefix tree: a trie of pages, one node a page, every node found by its key.

Full pages are evicted leaf first, so the pages present on any key chain are a prefix of it: how
deep a chain matches is found by bisection, and a hold on the deepest node protects its whole path.
Window and recurrent slots may leave inner nodes, which stand on.

The tree decides; whoever owns the pools executes: it stores handles and never touches a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ferryman.cache.eviction import EvictionOrder, IsFree
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.node import Node
from ferryman.cache.slots import SlotHandle


@dataclass(frozen=True, slots=True)
class Branch:
    """What a request offers to the tree.

    `keys` name all pages from the root on. `units[kind]` maps the index of a page to the slot that
    holds it; a recurrent slot stands at the page that ends at its position. Full units run without
    a hole from the first page that is not the tree's own to the last.
    """

    keys: Sequence[PageKey]
    units: Mapping[Kind, Mapping[int, SlotHandle]]


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of a branch: slots the tree keeps, and (page, canonical slot) for duplicates.

    `dropped` are snapshots that the tree no longer holds, because their path has too many.
    """

    adopted: tuple[SlotHandle, ...]
    duplicates: tuple[tuple[int, SlotHandle, SlotHandle], ...]
    node: Node
    dropped: tuple[SlotHandle, ...] = ()


class CacheChange(NamedTuple):
    """One unit that came into the tree or left it."""

    kind: Kind
    key: PageKey
    is_stored: bool


class PrefixTree:
    """Pages by key. `path_kind` is the kind every node must hold (None: a node may be bare).

    `window_pages` are those that a window reaches back from a page's end. A path from the root to
    a leaf keeps at most `path_snapshots` (0: as many as there are slots for).
    """

    def __init__(
        self, kinds: Sequence[Kind], *, window_pages: int = 0, path_snapshots: int = 0
    ) -> None:
        self.kinds = tuple(kinds)
        self._path_kind = Kind.FULL if Kind.FULL in kinds else None
        self._root = Node(b"", None, 0.0)
        self._nodes: dict[PageKey, Node] = {}
        self._order = EvictionOrder(kinds, window_pages)
        self._path_snapshots = path_snapshots
        self._num_guarded = 0
        self._changes: list[CacheChange] = []

    @classmethod
    def of(cls, manifest: StateManifest, path_snapshots: int = 0) -> PrefixTree:
        """A tree for one model's state."""
        window_pages = -(-max(0, manifest.window_len - 1) // manifest.page_size)
        return cls(manifest.kinds, window_pages=window_pages, path_snapshots=path_snapshots)

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, key: PageKey) -> Node:
        """Raises KeyError when the page is not here."""
        return self._nodes[key]

    # Matching: no side effects.

    def match_depth(self, keys: Sequence[PageKey]) -> int:
        """How many of the first pages of `keys` are here, in O(log pages)."""
        nodes, low, high = self._nodes, 0, len(keys)
        if high and keys[high - 1] in nodes:
            return high
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in nodes:
                low = middle + 1
            else:
                high = middle
        return low

    def snapshot_depths(self, keys: Sequence[PageKey], depth: int) -> Iterator[int]:
        """Depths up to `depth`, deepest first, at which a recurrent snapshot is held."""
        node = self._nodes[keys[depth - 1]] if depth else self._root
        while node.depth:
            if Kind.RECURRENT in node.slots:
                yield node.depth
            assert node.parent is not None, "every node but the root has a parent"
            node = node.parent

    def has(self, kind: Kind, key: PageKey) -> bool:
        node = self._nodes.get(key)
        return node is not None and kind in node.slots

    def slot(self, kind: Kind, key: PageKey) -> SlotHandle:
        """Raises KeyError when that unit is not here."""
        return self._nodes[key].slots[kind]

    def chain(self, key: PageKey) -> tuple[PageKey, ...]:
        """The keys of all pages up to and with this one. Raises KeyError when it is not here."""
        node, keys = self._nodes[key], []
        while node.depth:
            keys.append(node.key)
            assert node.parent is not None, "every node but the root has a parent"
            node = node.parent
        return tuple(reversed(keys))

    def path_slots(self, kind: Kind, key: PageKey, first_page: int) -> list[SlotHandle]:
        """Slots of pages first_page.. up to the page named, in order. Raises KeyError on a hole."""
        node, slots = self._nodes[key], []
        while node.depth > first_page:
            slots.append(node.slots[kind])
            assert node.parent is not None, "every node but the root has a parent"
            node = node.parent
        slots.reverse()
        return slots

    # Holding: a hold on a node protects its whole path from eviction.

    def hold(self, key: PageKey, now: float) -> None:
        node = self._nodes[key]
        node.holds += 1
        self._guard(node, 1)
        self._order.used(node, now)

    def release(self, key: PageKey) -> None:
        node = self._nodes[key]
        assert node.holds > 0, f"page {key.hex()} is released more often than held"
        node.holds -= 1
        self._guard(node, -1)
        self._order.offer(node)

    def _guard(self, held: Node, change: int) -> None:
        """A page is guarded by its own holds and by its guarded children."""
        node: Node | None = held
        while node is not None and node.depth:
            was_guarded = node.guards > 0
            node.guards += change
            if was_guarded == (node.guards > 0):
                return
            self._num_guarded += change
            node = node.parent

    def touch(self, key: PageKey, now: float) -> None:
        """Notes a use, so that the page, its snapshot and its window are evicted later."""
        self._order.used(self._nodes[key], now)

    # Growing.

    def insert(self, branch: Branch, now: float) -> Inserted:
        """Adds what is new of a branch. Where a page exists the tree keeps its own slot."""
        adopted: list[SlotHandle] = []
        duplicates: list[tuple[int, SlotHandle, SlotHandle]] = []
        offered = (page for pages in branch.units.values() for page in pages)
        first = min(self.match_depth(branch.keys), min(offered, default=0))
        if self._path_kind is None:  # bare pages lead to the first unit
            first = min(first, self.match_depth(branch.keys))
        node = self._nodes[branch.keys[first - 1]] if first else self._root
        changed: list[Node] = []
        for page in range(first, len(branch.keys)):
            node = self._child(node, branch.keys[page], now)
            before = len(adopted)
            for kind, units in branch.units.items():
                if page in units:
                    self._settle(node, page, kind, units[page], adopted, duplicates)
            if len(adopted) > before and len(node.slots) > (self._path_kind in node.slots):
                changed.append(node)
        node.last_use = max(node.last_use, now)
        if not changed or changed[-1] is not node:
            changed.append(node)
        for each in changed:
            self._order.settled(each)
        return Inserted(tuple(adopted), tuple(duplicates), node, self._thin_out(changed))

    def _child(self, parent: Node, key: PageKey, now: float) -> Node:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, parent, now)
            parent.children += 1
            if parent.children > 1:
                self._order.forked(parent)
        return node

    def _settle(
        self,
        node: Node,
        page: int,
        kind: Kind,
        handle: SlotHandle,
        adopted: list[SlotHandle],
        duplicates: list[tuple[int, SlotHandle, SlotHandle]],
    ) -> None:
        canonical = node.slots.get(kind)
        if canonical is None:
            node.slots[kind] = handle
            adopted.append(handle)
            self._changes.append(CacheChange(kind, node.key, True))
            self._order.came(kind, node)
        elif canonical != handle:
            duplicates.append((page, handle, canonical))

    def _thin_out(self, changed: Sequence[Node]) -> tuple[SlotHandle, ...]:
        """Gives up snapshots of paths that have too many since these nodes changed."""
        dropped: list[SlotHandle] = []
        for node in changed if self._path_snapshots else ():
            if Kind.RECURRENT in node.slots:
                least = self._order.least_of_path(node, self._path_snapshots)
                dropped += self._drop(Kind.RECURRENT, least) if least else []
        return tuple(dropped)

    # Evicting.

    def evict(self, kind: Kind, num_slots: int, is_only_tree: IsFree) -> list[SlotHandle]:
        """Gives up slots until `num_slots` of `kind` become free, what is worth least first.

        Returns all slots the tree no longer holds, of every kind: dropping a page drops all of it.
        Fewer come back when everything else is held. `is_only_tree` says whether the tree is the
        only holder; other slots would not become free and are left alone.
        """
        chosen, _ = self._order.choose({kind: num_slots}, is_only_tree)
        return self._give_up(chosen)

    def try_evict(self, lacks: Mapping[Kind, int], is_only_tree: IsFree) -> list[SlotHandle] | None:
        """As `evict`, for all kinds at once; None, and nothing is given up, unless all can be met.

        An upper bound answers most of what cannot be met without looking at any page.
        """
        for kind, lack in lacks.items():
            guarded = self._num_guarded if kind is Kind.FULL else 0
            if lack > self._order.size(kind) - guarded:
                return None
        chosen, is_enough = self._order.choose(lacks, is_only_tree)
        if not is_enough:
            return None
        return self._give_up(chosen)

    def _give_up(self, chosen: Sequence[tuple[Kind, Node]]) -> list[SlotHandle]:
        dropped: list[SlotHandle] = []
        for kind, node in chosen:
            self._order.passed_over(kind, node)
            dropped += self._drop(kind, node)
        return dropped

    def next_to_evict(self, kind: Kind, is_only_tree: IsFree) -> Iterator[PageKey]:
        """Keys in the order in which `evict` would give them up. Changes nothing.

        The tree must not change while this is read.
        """
        return (node.key for node in self._order.nodes(kind, is_only_tree))

    def _drop(self, kind: Kind, node: Node) -> list[SlotHandle]:
        if kind is self._path_kind:
            return self._remove(node)
        self._order.goes(kind, node)
        handle = node.slots.pop(kind)
        self._changes.append(CacheChange(kind, node.key, False))
        self._prune(node)
        return [handle]

    def _remove(self, node: Node) -> list[SlotHandle]:
        for kind in node.slots:
            self._order.goes(kind, node)
        dropped = list(node.slots.values())
        self._changes += [CacheChange(kind, node.key, False) for kind in node.slots]
        node.slots.clear()
        del self._nodes[node.key]
        parent = node.parent
        assert parent is not None, "the root is never removed"
        parent.children -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        self._order.offer(parent)
        return dropped

    def _prune(self, node: Node) -> None:
        """Removes bare leaves, which only trees without full pages have."""
        while self._path_kind is None and node.depth and not (node.slots or node.children):
            if node.holds:
                break
            parent = node.parent
            self._remove(node)
            assert parent is not None, "the root is never removed"
            node = parent

    def drop(self, kind: Kind, key: PageKey) -> list[SlotHandle]:
        """Gives up one unit whatever it is worth, and with a page all that stands on it.

        For what proved corrupt. Nobody may hold a page of it. Raises KeyError if it is not here.
        """
        node = self._nodes[key]
        if kind is not self._path_kind:
            return self._drop(kind, node)
        return [slot for page in reversed(self._subtree(node)) for slot in self._remove(page)]

    def _subtree(self, top: Node) -> list[Node]:
        """All pages from `top` on, parents first. Walks the whole tree: this is rare."""
        found = {id(top): top}
        for node in sorted(self._nodes.values(), key=lambda node: node.depth):
            if id(node.parent) in found:
                found[id(node)] = node
        assert not any(node.holds for node in found.values()), "a page that is held is dropped"
        return list(found.values())

    def drain_changes(self) -> tuple[CacheChange, ...]:
        """What came and went since the last call, in order."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def units(self) -> Iterator[tuple[Kind, PageKey]]:
        """Everything held, parents before children: what a snapshot of the cache lists."""
        for node in sorted(self._nodes.values(), key=lambda node: (node.depth, node.key)):
            for kind in node.slots:
                yield kind, node.key

    def handles(self) -> Iterator[SlotHandle]:
        for node in self._nodes.values():
            yield from node.slots.values()

    def check_integrity(self) -> None:
        """Raises AssertionError unless parents, children, depths and slots agree."""
        children: dict[int, int] = {}
        guarded: dict[int, int] = {}
        for node in self._nodes.values():
            assert node.parent is not None, "a node without a parent is in the dictionary"
            parent = node.parent
            assert parent is self._root or self._nodes.get(parent.key) is parent, "orphan page"
            assert node.depth == parent.depth + 1, "depth does not follow the parent"
            assert self._path_kind is None or self._path_kind in node.slots, "a page without a slot"
            guarded[id(parent)] = guarded.get(id(parent), 0) + (node.guards > 0)
            children[id(parent)] = children.get(id(parent), 0) + 1
        for node in (self._root, *self._nodes.values()):
            assert node.children == children.get(id(node), 0), "children are miscounted"
        for node in self._nodes.values():
            assert node.guards == node.holds + guarded.get(id(node), 0), "guards are miscounted"
        assert self._num_guarded == sum(node.guards > 0 for node in self._nodes.values())
