"""From the device to the host tier: what a write policy asks for is copied, one group at a time.

Slots are leased only while they are copied. What waits for its turn may be evicted meanwhile, and
is counted as lost: eviction never waits for the host.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ferryman.cache.branch import CacheChange
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.slots import Holder, Role
from ferryman.schedule.events import CachedUnit
from ferryman.tiers.write_policy import Backups, UnitKey, WritePolicy
from ferryman.wire.host_client import UnitSource
from ferryman.wire.rpc import NO_TAGS, CallTags

if TYPE_CHECKING:  # torch: the simulator runs this without any
    from ferryman.engine.assembly import Engine

MAX_WAITING = 256


@dataclass(frozen=True, slots=True)
class BackupStatistics:
    """Groups that wait, and units since the start: lost are those evicted before they could be
    written, dropped those for which too many groups waited; these may come again."""

    num_waiting: int
    full_units: int
    window_units: int
    recurrent_units: int
    num_bytes: int
    num_lost: int
    num_dropped: int


class HostWrites(Protocol):
    """What is asked of the host-cache's client."""

    @property
    def node_id(self) -> str: ...

    @property
    def num_attaches(self) -> int: ...

    async def store(
        self, keys: Sequence[PageKey], units: Sequence[UnitSource], *, tags: CallTags = NO_TAGS
    ) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Group:
    """Units on one path from the root that are to be written together."""

    units: tuple[UnitKey, ...]
    tags: CallTags


class DeviceBackup:
    """Writes units of this worker's tree to the host tier. `freed` is called after each copy."""

    def __init__(
        self, engine: Engine, client: HostWrites, policy: WritePolicy, freed: Callable[[], None]
    ) -> None:
        self._scheduler, self._store_unit = engine.scheduler, engine.transfer.store_unit
        self._manifest, self._client, self.freed = engine.manifest, client, freed
        self._books = Backups(policy)
        self._waiting: deque[_Group] = deque()
        self._work = asyncio.Event()
        self._turn = asyncio.Lock()
        self._num_attaches = client.num_attaches
        self.written_units: Counter[Kind] = Counter()
        self.num_lost = self.num_dropped = 0

    def statistics(self) -> BackupStatistics:
        written = self.written_units
        return BackupStatistics(
            num_waiting=len(self._waiting),
            full_units=written[Kind.FULL],
            window_units=written[Kind.WINDOW],
            recurrent_units=written[Kind.RECURRENT],
            num_bytes=sum(
                self._manifest.layout(kind).slot_bytes * n for kind, n in written.items()
            ),
            num_lost=self.num_lost,
            num_dropped=self.num_dropped,
        )

    # What happens on the device.

    def added(self, units: Iterable[UnitKey], tags: CallTags) -> None:
        """Units came into the tree, all on one path."""
        self._enqueue(self._books.added(units), tags)

    def hit(self, units: Iterable[UnitKey], tags: CallTags) -> None:
        """A plan reuses units, all on one path."""
        self._enqueue(self._books.hit(units), tags)

    def came_from_host(self, units: Iterable[UnitKey]) -> None:
        self._books.written(units)

    def changed(self, changes: Iterable[CacheChange]) -> None:
        """Hears what came into the tree and what left it, in order."""
        last = {(each.kind, key): each.is_stored for each in changes for key in each.keys}
        self.num_lost += self._books.gone(name for name, is_here in last.items() if not is_here)

    def relieve(self) -> None:
        """Writes ahead what would be evicted next, if the policy says so.

        With a full page goes all that stands on it, so all of it is written together.
        """
        tree = self._scheduler.residence.tree
        for kind in self._manifest.kinds:
            coldest = ((kind, key) for key in self._scheduler.next_to_evict(kind))
            for unit in self._books.pressed(self._scheduler.free_share(kind), coldest):
                key = unit[1]
                beside = [(each, key) for each in tree.kinds_of(key)] if kind is Kind.FULL else []
                self._enqueue((unit, *self._books.start(beside)), NO_TAGS)

    def keep(self, keys: Sequence[PageKey], tags: CallTags) -> None:
        """The chain's deepest resume set shall be written in its turn, whatever the policy."""
        self._enqueue(self._books.start(self._resume_set(keys)), tags)

    async def keep_now(self, keys: Sequence[PageKey], tags: CallTags) -> None:
        """As `keep`, before everything that waits; returns when it is written, or cannot be."""
        units = self._resume_set(keys)
        self._books.start(units)
        await self._write(_Group(units, tags))

    def _resume_set(self, keys: Sequence[PageKey]) -> tuple[UnitKey, ...]:
        return tuple((unit.kind, unit.key) for unit in self._scheduler.resume_units(keys))

    def _enqueue(self, units: tuple[UnitKey, ...], tags: CallTags) -> None:
        if not units:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._books.failed(units)
            self.num_dropped += len(units)
            return
        self._waiting.append(_Group(units, tags))
        self._work.set()

    # Writing.

    async def run(self) -> None:
        """Writes what waits, for ever."""
        while True:
            await self.write_waiting()
            self._work.clear()
            await self._work.wait()

    async def write_waiting(self) -> None:
        """Writes all that waits, one group after the other."""
        while self._waiting:
            await self._write(self._waiting.popleft())

    async def _write(self, group: _Group) -> None:
        async with self._turn:
            self._note_new_host()
            units = self._to_write(group)
            if not units:
                return
            path = self._path(units)
            stored = await self._copied(path, units, group.tags)
            if stored is not None and stored < len(units):
                # Others have stored some, or what these stand on was given up there: offer it all.
                units = self._scheduler.chain_units(path)
                stored = await self._copied(path, units, group.tags)
            names = [_name(unit) for unit in units]
            (self._books.failed if stored is None else self._books.written)(names)

    def _note_new_host(self) -> None:
        """After another attachment it may be another host-cache, and empty."""
        if self._num_attaches != self._client.num_attaches:
            self._num_attaches = self._client.num_attaches
            self._books.all_lost()

    def _to_write(self, group: _Group) -> tuple[CachedUnit, ...]:
        """What of a group is still here and not written, and the pages that it stands on."""
        tree = self._scheduler.residence.tree
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
        found = [
            CachedUnit(kind, tree.node(key).depth - 1, key, tree.slot(kind, key))
            for kind, key in names
        ]
        return tuple(sorted(found, key=lambda unit: (unit.page_index, unit.kind)))

    def _path(self, units: Sequence[CachedUnit]) -> tuple[PageKey, ...]:
        """All keys up to the deepest of the units."""
        return self._scheduler.residence.tree.chain(units[-1].key)

    async def _copied(
        self, path: Sequence[PageKey], units: Sequence[CachedUnit], tags: CallTags
    ) -> int | None:
        """How many of them became visible in the host tier; leased as long as it takes. None when
        nobody could be told of them."""
        handles = [unit.handle for unit in units]
        holder = Holder(Role.STORE, tags.request_id or "written ahead")
        self._scheduler.lease(handles, holder)
        try:
            sources = [
                UnitSource(u.kind, u.page_index, partial(self._store_unit, u.kind, u.handle.slot))
                for u in units
            ]
            stored = await self._client.store(path, sources, tags=tags)
        except BaseException:
            self._books.failed(map(_name, units))
            raise
        finally:
            self._scheduler.release(handles, holder)
            self.freed()
        if stored == len(units):
            self.written_units.update(unit.kind for unit in units)
        return stored


def _name(unit: CachedUnit) -> UnitKey:
    return unit.kind, unit.key
