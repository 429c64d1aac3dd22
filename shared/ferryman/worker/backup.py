"""Copies the units that a write policy selects from the device to the host tier, group by group.

Slots are leased only while they are copied. A waiting unit may be evicted meanwhile and is then
counted as lost: eviction never waits for the host. A copy takes a piece after each step that draws
tokens (`StepPace`), unless somebody waits for it, or units that are next to be evicted do.

Other servers say offload, save or write back.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.node import TreeChange, TreeNode
from ferryman.cache.slots import Holder, Role
from ferryman.cache.tree import PrefixTree
from ferryman.schedule.events import CachedUnit
from ferryman.schedule.scheduler import Scheduler
from ferryman.tiers.write_policy import PendingBackups, UnitKey, WritePolicy
from ferryman.wire.grpc.rpc import NO_TAGS, CallTags
from ferryman.wire.hostcache.arena_copy import UnitSource
from ferryman.wire.hostcache.copy_pace import CopyPace, StepPace

# Copies the bytes of a slot to a place in the arena; returns their digest.
StoreUnit = Callable[[Kind, int, memoryview], bytes]

MAX_WAITING = 256

EVICTED_SOON = 32
"""Slots of a kind, free or with units that are written, below which a copy waits for no step; in a
small pool an eighth of it. A prompt of 512 tokens takes as many pages of 16. Nor does it if there
are fewer of them than units that wait: the next prompt may be as long."""


@dataclass(frozen=True, slots=True)
class BackupStatistics:
    """Groups that wait, and units since the start. Lost units were evicted before they could be
    written. Dropped units belong to a group that found too many groups waiting; they may come
    again."""

    num_waiting: int
    full_units: int
    window_units: int
    recurrent_units: int
    num_bytes: int
    num_lost: int
    num_dropped: int


class HostWrites(Protocol):
    """The calls of the host-cache's client that a backup needs."""

    @property
    def node_id(self) -> str: ...

    @property
    def num_attaches(self) -> int: ...

    @property
    def num_times_usable(self) -> int: ...

    async def store(
        self,
        keys: Sequence[PageKey],
        units: Sequence[UnitSource],
        *,
        tags: CallTags = NO_TAGS,
        pace: CopyPace = ...,
    ) -> int | None: ...

    def drop_chain(self, first: PageKey) -> None: ...


@dataclass(frozen=True)
class _Group:
    """Units on one path from the root, to be written together."""

    units: tuple[UnitKey, ...]
    tags: CallTags

    @cached_property
    def counts(self) -> Counter[Kind]:
        """The units of each kind."""
        return Counter(kind for kind, _ in self.units)


class OwedBackups:
    """Units of a worker's tree that were due to a host-cache that was away, or is gone.

    A prompt may be computed before its worker has attached, or after its host-cache died and before
    the worker learnt of it; a busy one may not answer in time. Nothing else would offer that state
    again before its next use. Each unit is taken once for a host-cache, so nothing is offered for
    ever.
    """

    def __init__(self) -> None:
        self._units: set[UnitKey] = set()
        self._taken: set[UnitKey] = set()

    def add(self, units: Iterable[UnitKey]) -> None:
        """Units could not be written."""
        self._units.update(unit for unit in units if unit not in self._taken)

    def begin_anew(self, units: Iterable[UnitKey]) -> None:
        """There is another host-cache; the one before had these units, or was to have them."""
        self._units |= self._taken.union(units)
        self._taken = set()

    def on_removed(self, units: Iterable[UnitKey]) -> None:
        """The units left the tree."""
        gone = set(units)
        self._units -= gone
        self._taken -= gone

    def take(self, tree: PrefixTree) -> list[tuple[UnitKey, ...]]:
        """All that is in the tree, once, in groups of one path each. The path that was used last
        comes last, so that a small host keeps it."""
        owed, self._units = self._units, set()
        self._taken |= owed
        ends = (tree.node(key) for key in {key for kind, key in owed if tree.has(kind, key)})
        paths, seen = list[list[TreeNode]](), set[PageKey]()
        for end in sorted(ends, key=lambda node: -node.depth):
            if end.key not in seen:
                paths.append(list(_until(end, seen)))
                seen.update(node.key for node in paths[-1])
        paths.sort(key=lambda path: path[0].last_use)
        return [
            tuple(unit for node in path for unit in _units_of(tree, node) if unit in owed)
            for path in paths
        ]


def _until(end: TreeNode, seen: set[PageKey]) -> Iterator[TreeNode]:
    """A page and those before it, deepest first, up to one that is seen."""
    for node in end.path_up(end.depth):
        if node.key in seen:
            return
        yield node


def _units_of(tree: PrefixTree, node: TreeNode) -> Iterator[UnitKey]:
    return ((kind, node.key) for kind in tree.kinds_of(node.key))


class DeviceBackup:
    """Writes units of this worker's tree to the host tier, each by `store_unit`. `freed` is called
    after each copy. `pace` is this object's alone."""

    def __init__(
        self,
        scheduler: Scheduler,
        store_unit: StoreUnit,
        client: HostWrites,
        policy: WritePolicy,
        freed: Callable[[], None],
        pace: StepPace,
    ) -> None:
        self._scheduler, self._store_unit = scheduler, store_unit
        self._manifest, self._client, self.freed = scheduler.manifest, client, freed
        self._books = PendingBackups(policy)
        self._waiting: deque[_Group] = deque()
        # The offers to a new host-cache wait behind all that is new.
        self._owed, self._backlog = OwedBackups(), deque[_Group]()
        self._work = asyncio.Event()
        self._turn = asyncio.Lock()
        self._pace, self._under_way = pace, Counter[Kind]()
        self._num_attaches, self._num_times_usable = client.num_attaches, client.num_times_usable
        self._dropped: set[PageKey] = set()
        self.written_units: Counter[Kind] = Counter()
        self.num_lost = self.num_dropped = 0

    def statistics(self) -> BackupStatistics:
        written = self.written_units
        return BackupStatistics(
            num_waiting=len(self._waiting) + len(self._backlog),
            full_units=written[Kind.FULL],
            window_units=written[Kind.WINDOW],
            recurrent_units=written[Kind.RECURRENT],
            num_bytes=sum(
                self._manifest.layout(kind).slot_bytes * n for kind, n in written.items()
            ),
            num_lost=self.num_lost,
            num_dropped=self.num_dropped,
        )

    # Events on the device.

    def added(self, units: Iterable[UnitKey], tags: CallTags) -> None:
        """Units came into the tree, all on one path."""
        self._enqueue(self._books.on_added(units), tags)

    def hit(self, units: Iterable[UnitKey], tags: CallTags) -> None:
        """A plan reuses units, all on one path."""
        self._enqueue(self._books.on_hit(units), tags)

    def came_from_host(self, units: Iterable[UnitKey]) -> None:
        self._books.mark_written(units)

    def changed(self, changes: Iterable[TreeChange]) -> None:
        """Records the units that left the tree. A unit may come and leave in one call: its last
        change counts."""
        last = {(change.kind, key): change.is_stored for change in changes for key in change.keys}
        removed = [name for name, is_here in last.items() if not is_here]
        self.num_lost += self._books.on_removed(removed)
        self._owed.on_removed(removed)

    def stepped(self, num_ended: int, *, is_drawing: bool) -> None:
        """So many steps that draw tokens have ended, and one runs now, or none. Copies made here
        take the cores of the steps."""
        is_bound = is_drawing and not self._is_urgent()
        self._pace.stepped(num_ended, self._waiting_bytes() if is_bound else 0, is_drawing=is_bound)

    def hurry(self) -> None:
        """Copies wait for no step from now on: the worker drains."""
        self._pace.hurry()

    def _waiting_bytes(self) -> int:
        """The bytes of what is new. An offer to a new host takes its time."""
        counts = [(self._manifest.layout(kind).slot_bytes, kind) for kind in self._manifest.kinds]
        return sum(size * group.counts[kind] for group in self._waiting for size, kind in counts)

    def _is_urgent(self) -> bool:
        """Whether slots are wanted, or may soon be, that a copy has leased, or whose units wait for
        one."""
        if not (self._turn.locked() or self._waiting or self._backlog):
            return False
        return self._scheduler.lacks_slots or any(map(self._is_short, self._manifest.kinds))

    def _is_short(self, kind: Kind) -> bool:
        pool = self._scheduler.allocator.pools[kind]
        num_due = self._under_way[kind] + sum(group.counts[kind] for group in self._waiting)
        num_wanted = max(min(EVICTED_SOON, pool.num_slots // 8), num_due) - pool.num_free
        if num_wanted <= 0:
            return False
        coldest = list(islice(self._scheduler.next_to_evict(kind), num_wanted))
        is_due = (self._books.is_on_its_way((kind, key)) for key in coldest)
        return len(coldest) < num_wanted or any(is_due)

    def chain_dropped(self, first: PageKey) -> None:
        """Makes the lower tiers drop the chain too: at once, so that the next request does not load
        it, and again after a copy that is running, which may write some of it there."""
        self._client.drop_chain(first)
        if self._turn.locked():
            self._dropped.add(first)

    def relieve(self) -> None:
        """Writes the next units to evict ahead, if the policy wants it.

        Evicting a full page drops all units that depend on it, so they are written together.
        """
        tree = self._scheduler.allocator.tree
        for kind in self._manifest.kinds:
            coldest = ((kind, key) for key in self._scheduler.next_to_evict(kind))
            for unit in self._books.on_pressure(self._scheduler.free_share(kind), coldest):
                key = unit[1]
                siblings = (
                    [(other_kind, key) for other_kind in tree.kinds_of(key)]
                    if kind is Kind.FULL
                    else []
                )
                self._enqueue((unit, *self._books.start(siblings)), NO_TAGS)

    def keep(self, keys: Sequence[PageKey], tags: CallTags) -> None:
        """Queues the chain's deepest resume set to be written, under any policy."""
        self._enqueue(self._books.start(self._resume_set(keys)), tags)

    async def keep_now(self, keys: Sequence[PageKey], tags: CallTags) -> None:
        """Does as `keep`, before everything that waits; returns when the units are written, or
        cannot be."""
        units = self._resume_set(keys)
        self._books.start(units)
        with self._pace.hurried():  # also the copy that has the turn now
            await self._write(_Group(units, tags))

    def _resume_set(self, keys: Sequence[PageKey]) -> tuple[UnitKey, ...]:
        return tuple((unit.kind, unit.key) for unit in self._scheduler.resume_units(keys))

    def _enqueue(self, units: tuple[UnitKey, ...], tags: CallTags) -> None:
        if not units:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._failed(units)
            self.num_dropped += len(units)
            return
        self._waiting.append(_Group(units, tags))
        self._work.set()

    # Writing.

    def host_usable(self) -> None:
        """The worker has attached, or its host-cache answers again: it is offered what was due
        before."""
        self._work.set()

    async def run(self) -> None:
        """Writes waiting groups, for ever."""
        while True:
            await self.write_waiting()
            self._work.clear()
            await self._work.wait()

    async def write_waiting(self) -> None:
        """Writes all waiting groups, one after the other, and then what a new host is owed."""
        self._pace.begin()
        async with self._turn:
            self._note_new_host()
        while waiting := self._waiting or self._backlog:
            await self._write(waiting.popleft())

    async def _write(self, group: _Group) -> None:
        async with self._turn:
            self._note_new_host()
            self._under_way = group.counts
            await self._pace.turn()
            if units := self._to_write(group):
                await self._write_units(units, group.tags)
            self._under_way = Counter()

    async def _write_units(self, units: Sequence[CachedUnit], tags: CallTags) -> None:
        self._dropped.clear()  # chains dropped from here on may have units in this copy
        path = self._path(units)
        stored = await self._copied(path, units, tags)
        if stored is not None and stored < len(units):
            # Other workers have stored some, or the host tier dropped the pages below: offer the
            # whole chain.
            units = self._scheduler.chain_units(path)
            stored = await self._copied(path, units, tags)
        names = [_name(unit) for unit in units]
        (self._failed if stored is None else self._books.mark_written)(names)

    def _failed(self, units: Sequence[UnitKey]) -> None:
        """Units are not written: they are tried again when they are used, or by a new host."""
        self._books.on_failed(units)
        self._owed.add(units)

    def _note_new_host(self) -> None:
        """After a new attachment the host-cache may be another one, and empty. It is offered once
        what was due, whether or not the one before had it. One that answers again is offered once
        what it did not answer."""
        if self._num_attaches != self._client.num_attaches:
            self._num_attaches = self._client.num_attaches
            self._owed.begin_anew(self._books.forget_all())
            self._backlog.clear()
        elif self._num_times_usable == self._client.num_times_usable:
            return
        self._num_times_usable = self._client.num_times_usable
        for units in self._owed.take(self._scheduler.allocator.tree):
            self._books.start(units)
            self._backlog.append(_Group(units, NO_TAGS))

    def _to_write(self, group: _Group) -> tuple[CachedUnit, ...]:
        """The units of a group that are still here and not written, and the pages that they
        depend on."""
        tree = self._scheduler.allocator.tree
        names = {n for n in group.units if tree.has(*n) and not self._books.is_written(n)}
        if not names:
            return ()
        node = max((tree.node(key) for _, key in names), key=lambda node: node.depth)
        while tree.has(Kind.FULL, node.key):
            name = Kind.FULL, node.key
            if name not in names and self._books.is_written(name):
                break
            names.add(name)
            assert node.parent is not None, "every node but the root has a parent"
            node = node.parent
        units = [
            CachedUnit(kind, tree.node(key).depth - 1, key, tree.slot(kind, key))
            for kind, key in names
        ]
        return tuple(sorted(units, key=lambda unit: (unit.page_index, unit.kind)))

    def _path(self, units: Sequence[CachedUnit]) -> tuple[PageKey, ...]:
        """All keys up to the deepest of the units."""
        return self._scheduler.allocator.tree.chain(units[-1].key)

    async def _copied(
        self, path: Sequence[PageKey], units: Sequence[CachedUnit], tags: CallTags
    ) -> int | None:
        """The number of units that became visible in the host tier, leased during the copy. None
        when the host-cache could not be reached."""
        handles = [unit.handle for unit in units]
        holder = Holder(Role.STORE, tags.request_id or "written ahead")
        self._scheduler.lease(handles, holder)
        try:
            sources = [
                UnitSource(u.kind, u.page_index, partial(self._store_unit, u.kind, u.handle.slot))
                for u in units
            ]
            stored = await self._client.store(path, sources, tags=tags, pace=self._pace)
        except BaseException:
            self._failed([_name(unit) for unit in units])
            raise
        finally:
            self._scheduler.release(handles, holder)
            self.freed()
            if path[0] in self._dropped:
                self._client.drop_chain(path[0])
        if stored == len(units):
            self.written_units.update(unit.kind for unit in units)
        return stored


def _name(unit: CachedUnit) -> UnitKey:
    return unit.kind, unit.key
