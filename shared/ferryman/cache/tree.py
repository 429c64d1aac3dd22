"""The prefix tree: a trie of pages, one node a page, every node found by its key.

Full pages are evicted leaf first, so the present pages of any key chain are a prefix of it.
Therefore bisection finds how deep a chain matches, and a hold on the deepest node protects its
whole path. Window and recurrent slots may be dropped from inner nodes; the node stays.

The tree stores handles and decides; it never touches a pool. The owner of the pools carries out its
decisions.

Others call it a radix tree or prefix cache; with one page a node nothing is ever split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ferryman.cache.eviction import EvictionOrder, IsFree
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.node import Branch, Inserted, Owner, Pins, TreeChange, TreeNode
from ferryman.cache.resume import resume_set
from ferryman.cache.slots import SlotHandle

# Of one owner, where every page's end is a point to resume at.
MAX_PINNED_PATHS = 8


class PrefixTree:
    """Pages by key. `path_kind` is the kind that every node must hold (None: a node may be bare).

    `window_pages` is the length of the window before a page's end. A path from the root to a leaf
    keeps at most `path_snapshots` (0: no bound but the number of slots).
    """

    def __init__(
        self, kinds: Sequence[Kind], *, window_pages: int = 0, path_snapshots: int = 0
    ) -> None:
        self.kinds = tuple(kinds)
        self._path_kind = Kind.FULL if Kind.FULL in kinds else None
        self._root = TreeNode(b"", None, 0, 0.0)
        self._nodes: dict[PageKey, TreeNode] = {}
        self._slots: dict[Kind, dict[PageKey, SlotHandle]] = {kind: {} for kind in kinds}
        self._snapshots = self._slots.get(Kind.RECURRENT, {})
        self._order = EvictionOrder(self._slots, window_pages)
        self._path_snapshots = path_snapshots
        self._pins = Pins(path_snapshots if Kind.RECURRENT in kinds else MAX_PINNED_PATHS)
        self._num_guarded = 0
        self._changes: list[TreeChange] = []

    @classmethod
    def of(cls, manifest: StateManifest, path_snapshots: int = 0) -> PrefixTree:
        """A tree for one model's state."""
        deep = (manifest.window_len + 1) * manifest.page_size  # a page end with its whole window
        window_pages = resume_set(manifest, deep).window.num_pages
        return cls(manifest.kinds, window_pages=window_pages, path_snapshots=path_snapshots)

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, key: PageKey) -> TreeNode:
        """The node of a page. Raises KeyError when the page is not here."""
        return self._nodes[key]

    # Matching: no side effects.

    def match_depth(self, keys: Sequence[PageKey]) -> int:
        """The number of first pages of `keys` that are cached, in O(log pages)."""
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
        snapshots = self._snapshots
        for page in range(depth - 1, -1, -1):
            if keys[page] in snapshots:
                yield page + 1

    def has(self, kind: Kind, key: PageKey) -> bool:
        return key in self._slots.get(kind, ())

    def slot(self, kind: Kind, key: PageKey) -> SlotHandle:
        """The slot of one unit. Raises KeyError when it is not here."""
        return self._slots[kind][key]

    def slots_of(self, kind: Kind, keys: Sequence[PageKey]) -> list[SlotHandle]:
        """The slots of these units. Raises KeyError when one is not here."""
        slots = self._slots[kind]
        return [slots[key] for key in keys]

    def kinds_of(self, key: PageKey) -> tuple[Kind, ...]:
        """The kinds of the page's units."""
        return tuple(kind for kind in self.kinds if key in self._slots[kind])

    def chain(self, key: PageKey) -> tuple[PageKey, ...]:
        """The keys of all pages up to and with this one. Raises KeyError when it is not here."""
        node = self._nodes[key]
        return tuple(page.key for page in node.path_up(node.depth))[::-1]

    # Holding: a hold on a node protects its whole path from eviction.

    def hold(self, key: PageKey, now: float) -> None:
        node = self._nodes[key]
        node.holds += 1
        self._guard(node, 1)
        self._order.on_use(node, now)

    def release(self, key: PageKey) -> None:
        node = self._nodes[key]
        assert node.holds > 0, f"page {key.hex()} is released more often than held"
        node.holds -= 1
        self._guard(node, -1)
        self._order.offer(node)
        self._prune(node)

    def _guard(self, held: TreeNode, change: int) -> None:
        """Updates `guards` upwards: its own holds and its guarded children guard a page."""
        node: TreeNode | None = held
        while node is not None and node.depth:
            was_guarded = node.guards > 0
            node.guards += change
            if was_guarded == (node.guards > 0):
                return
            self._num_guarded += change
            node = node.parent

    def touch(self, key: PageKey, now: float) -> None:
        """Notes a use, so that the page, its snapshot and its window are evicted later."""
        self._order.on_use(self._nodes[key], now)

    # Pins: callers' wishes to keep something for a time.

    def pin(self, keys: Sequence[PageKey], until: float, owner: Owner, now: float) -> None:
        """Pins the deepest point at which a prompt with these pages can resume, up to a time: it is
        evicted after all that is not pinned. Does nothing if the tree has no such point."""
        self._expire_pins(now)
        depth = self.match_depth(keys)
        if Kind.RECURRENT in self._slots:
            depth = next(self.snapshot_depths(keys, depth), 0)
        if depth:
            for node in self._pins.pin(self._nodes[keys[depth - 1]], until, owner):
                self._order.on_pin(node)

    def _expire_pins(self, now: float) -> None:
        for node in self._pins.expire(now) if self._pins else ():
            self._order.on_pin(node)

    # Growing.

    def insert(self, branch: Branch, now: float) -> Inserted:
        """Adds the new units of a branch. A unit that the tree already has keeps its slot."""
        self._expire_pins(now)
        end = self._grow(branch.keys, now)
        adopted: list[SlotHandle] = []
        duplicates: list[tuple[int, SlotHandle, SlotHandle]] = []
        new_keys: dict[Kind, tuple[PageKey, ...]] = {}
        for kind, units in branch.units.items():
            new = self._fill(kind, branch.keys, units, duplicates)
            adopted += new.values()
            new_keys[kind] = tuple(new)
            if new:
                self._changes.append(TreeChange(kind, new_keys[kind], True))
        points = [self._nodes[key] for key in new_keys.get(Kind.RECURRENT, ())]
        windows = [self._nodes[key] for key in new_keys.get(Kind.WINDOW, ())]
        self._order.on_insert(points, windows, end)
        dropped = self._thin_out(branch.keys) if points else ()
        return Inserted(tuple(adopted), tuple(duplicates), dropped)

    def _grow(self, keys: Sequence[PageKey], now: float) -> TreeNode:
        """Adds the pages that are missing, as one run. Returns the last page of the path."""
        matched = self.match_depth(keys)
        node = self._nodes[keys[matched - 1]] if matched else self._root
        if matched < len(keys):
            fork, run, new_keys = node, [], keys[matched:]
            for key in new_keys:
                node = TreeNode(key, node, 1, now)
                run.append(node)
            node.children = 0
            self._nodes.update(zip(new_keys, run, strict=True))
            fork.children += 1
            self._order.on_fork(fork)
        node.last_use = max(node.last_use, now)
        return node

    def _fill(
        self,
        kind: Kind,
        keys: Sequence[PageKey],
        units: Mapping[int, SlotHandle],
        duplicates: list[tuple[int, SlotHandle, SlotHandle]],
    ) -> dict[PageKey, SlotHandle]:
        """Stores the slots of one kind for pages that have none, and returns those by key.

        Slots that differ from the one the tree holds are appended to `duplicates`.
        """
        slots = self._slots[kind]
        new = {keys[page]: handle for page, handle in units.items() if keys[page] not in slots}
        if len(new) < len(units):
            pairs = [(page, handle, slots.get(keys[page])) for page, handle in units.items()]
            duplicates += [
                (p, handle, held) for p, handle, held in pairs if held and held != handle
            ]
        slots.update(new)
        return new

    def _thin_out(self, keys: Sequence[PageKey]) -> tuple[SlotHandle, ...]:
        """Gives up snapshots of a path that has too many."""
        most, snapshots = self._path_snapshots, self._snapshots
        held = [self._nodes[key] for key in keys if key in snapshots] if most else []
        dropped: list[SlotHandle] = []
        for _ in range(len(held) - most):
            least = self._order.pop_least(held)
            dropped += self._drop(Kind.RECURRENT, least)
        return tuple(dropped)

    # Evicting.

    def evict(self, kind: Kind, num_slots: int, is_only_tree: IsFree) -> list[SlotHandle]:
        """Gives up slots until `num_slots` of `kind` become free; the least valuable go first.

        Returns all slots the tree no longer holds, of every kind: dropping a page drops all its
        units. Returns fewer when all other units are held. `is_only_tree` says whether the tree is
        the only holder of a slot; other slots would not become free and stay.
        """
        chosen, _ = self._order.choose({kind: num_slots}, is_only_tree)
        return self._evict_units(chosen)

    def try_evict(self, lacks: Mapping[Kind, int], is_only_tree: IsFree) -> list[SlotHandle] | None:
        """Does what `evict` does for all kinds at once; None and no change if not all can be met.

        An upper bound is checked first, so most demands that cannot be met look at no page.
        """
        for kind, lack in lacks.items():
            guarded = self._num_guarded if kind is Kind.FULL else 0
            if lack > len(self._slots[kind]) - guarded:
                return None
        chosen, is_enough = self._order.choose(lacks, is_only_tree)
        if not is_enough:
            return None
        return self._evict_units(chosen)

    def _evict_units(self, chosen: Sequence[tuple[Kind, TreeNode]]) -> list[SlotHandle]:
        dropped: list[SlotHandle] = []
        for kind, node in chosen:
            self._order.on_evict(kind, node)
            dropped += self._drop(kind, node)
        return dropped

    def next_to_evict(self, kind: Kind, is_only_tree: IsFree) -> Iterator[PageKey]:
        """Keys in the order in which `evict` would give them up. Changes nothing.

        The tree must not change while this is read.
        """
        return (node.key for node in self._order.nodes(kind, is_only_tree))

    def _drop(self, kind: Kind, node: TreeNode) -> list[SlotHandle]:
        if kind is self._path_kind:
            return self._remove(node)
        handle = self._remove_unit(kind, node)
        self._prune(node)
        return [handle]

    def _remove_unit(self, kind: Kind, node: TreeNode) -> SlotHandle:
        handle = self._slots[kind].pop(node.key)
        if kind is Kind.RECURRENT and self._pins.unpin(node):
            self._order.on_pin(node)
        self._order.on_remove(kind, node)
        self._changes.append(TreeChange(kind, (node.key,), False))
        return handle

    def _remove(self, node: TreeNode) -> list[SlotHandle]:
        """Removes a leaf with all its units."""
        key = node.key
        dropped = [self._remove_unit(kind, node) for kind in self.kinds if key in self._slots[kind]]
        self._pins.unpin(node)
        del self._nodes[key]
        parent, node.parent = node.parent, None
        assert parent is not None, "the root is never removed"
        parent.children -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        self._order.offer(parent)
        return dropped

    def _prune(self, node: TreeNode) -> None:
        """Removes bare leaves, which only trees without full pages have."""
        while self._path_kind is None and node.parent and not (node.children or node.holds):
            if self.kinds_of(node.key):
                break
            parent = node.parent
            self._remove(node)
            node = parent

    def drop(self, kind: Kind, key: PageKey) -> list[SlotHandle]:
        """Gives up one unit regardless of its value; for a full page, also all pages after it.

        Used for units that proved corrupt. No page that is removed may be held. Raises KeyError if
        the unit is not here.
        """
        if kind is not self._path_kind:
            return self._drop(kind, self._nodes[key])
        return self.drop_chain(key)

    def drop_chain(self, key: PageKey) -> list[SlotHandle]:
        """Gives up all units of a page and of all pages after it.

        No page that is removed may be held. Raises KeyError if the page is not here.
        """
        pages = self._subtree(self._nodes[key])
        return [slot for page in reversed(pages) for slot in self._remove(page)]

    def _subtree(self, top: TreeNode) -> list[TreeNode]:
        """All pages from `top` on, parents first. Walks the whole tree: this is rare."""
        pages = {id(top): top}
        for node in sorted(self._nodes.values(), key=lambda node: node.depth):
            if id(node.parent) in pages:
                pages[id(node)] = node
        assert not any(node.holds for node in pages.values()), "a page that is held is dropped"
        return list(pages.values())

    def drain_changes(self) -> tuple[TreeChange, ...]:
        """The units that entered or left the tree since the last call, in order."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def units(self) -> Iterator[tuple[Kind, PageKey]]:
        """Every unit of the tree, parents before children: the content of a published cache
        listing."""
        for node in sorted(self._nodes.values(), key=lambda node: (node.depth, node.key)):
            for kind in self.kinds_of(node.key):
                yield kind, node.key

    def handles(self) -> Iterator[SlotHandle]:
        for slots in self._slots.values():
            yield from slots.values()

    def holds(self) -> Counter[PageKey]:
        """The number of holds of each page that is held itself. Walks the whole tree."""
        return Counter({key: node.holds for key, node in self._nodes.items() if node.holds})

    def check_integrity(self) -> None:
        """Raises AssertionError unless parents, children, depths and slots agree."""
        for kind, slots in self._slots.items():
            assert slots.keys() <= self._nodes.keys(), "a slot without a page"
            assert kind is not self._path_kind or len(slots) == len(self), "a page without a slot"
        children: dict[int, int] = {}
        guarded: dict[int, int] = {}
        for node in self._nodes.values():
            assert node.parent is not None, "a node without a parent is in the dictionary"
            parent = node.parent
            assert parent is self._root or self._nodes.get(parent.key) is parent, "orphan page"
            assert node.depth == parent.depth + 1, "depth does not follow the parent"
            guarded[id(parent)] = guarded.get(id(parent), 0) + (node.guards > 0)
            children[id(parent)] = children.get(id(parent), 0) + 1
        for node in (self._root, *self._nodes.values()):
            assert node.children == children.get(id(node), 0), "children are miscounted"
        for node in self._nodes.values():
            assert node.guards == node.holds + guarded.get(id(node), 0), "guards are miscounted"
        pinned = {node.key for node in self._nodes.values() if node.pinned_until}
        assert len(self._pins) == len(pinned), "a pin without a page, or a page without its pin"
        assert all(key in self._pins for key in pinned), "a page of another pin"
        assert self._num_guarded == sum(node.guards > 0 for node in self._nodes.values())
        self._order.check_integrity(self._nodes.values())
