"""The transfers of one prefetch: finds the holders of units, and reads the bytes into reserved
room.

A source that fails, is slow or sends other bytes than it stored is a miss of its units, which are
then tried at the next source.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.units import Tier
from ferryman.errors import FerrymanError
from ferryman.runtime.logs import Tail
from ferryman.tiers.prefetch import PrefetchSource, in_order
from ferryman.tiers.prefetch_values import OWN_STORAGE, PrefetchRequest, Traffic, UnitOrigin
from ferryman.tiers.storage_values import UnitRead
from ferryman.tiers.values import ReservedUnit, UnitName
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.unit_seals import NotOfThisCluster
from ferryman.wire.redis.index import NodeLife, NodePrefix, PrefixIndex
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.peers import FetchOrder, PeerClient
from ferryman_hostcache.shared_folders import FolderView, SharedFolders
from ferryman_hostcache.storage.factory import StorageTier

log = logging.getLogger(__name__)

# Units read at once. When the time is over, the units that have arrived count.
BATCH_UNITS = 16


@dataclass(frozen=True, slots=True)
class PrefetchTiers:
    """The sources of a prefetch. At most `max_peers` nodes are asked for their units. `folders` are
    other nodes' folders in the bucket of this node's storage, if it is in a bucket."""

    storage: StorageTier
    index: PrefixIndex
    peers: PeerClient
    max_peers: int
    folders: SharedFolders | None = None


class PrefetchIO:
    """Progress of the transfers: digests and origins by unit, and traffic."""

    def __init__(
        self,
        host: HostCache,
        tiers: PrefetchTiers,
        tags: CallTags,
        lease_id: str,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._host, self._tiers, self._tags, self._lease_id = host, tiers, tags, lease_id
        self._clock = clock
        self._nodes: dict[str, NodeLife] = {}
        self._views: dict[str, FolderView] = {}
        self._rooms: dict[UnitName, memoryview] = {}
        self._keys: Sequence[PageKey] = ()
        self.digests: dict[UnitName, bytes] = {}
        self.origins: dict[UnitName, UnitOrigin] = {}
        self.traffic: dict[Tier, Traffic] = {}
        self._indexed_digests: Mapping[tuple[Kind, PageKey], frozenset[bytes]] = {}
        self.num_failed = self.num_corrupt = self.num_mismatched = self.num_forged = 0

    # Lookups.

    async def sources(self, ask: PrefetchRequest) -> list[PrefetchSource]:
        """Storage first, then other nodes' folders and the peers that the index names, deepest
        first."""
        keys = ask.keys[: ask.max_pages]
        stored = self._tiers.storage.lookup(keys)
        own_storage = PrefetchSource(Tier.STORAGE, "", stored.pages)
        have = max(ask.have_pages, self._host.store.usable_pages(keys))
        prefixes = await self._named_by_index(keys)
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(self._in_folder(folder, keys))
                for folder in self._folders(prefixes, max(have, stored.usable_pages))
            ]
            asking += [
                group.create_task(self._held_by(node, keys))
                for node in self._holders(prefixes, have)
            ]
        return [own_storage, *(source for task in asking for source in task.result())]

    async def _in_folder(self, folder: NodeLife, keys: Sequence[PageKey]) -> list[PrefetchSource]:
        """One source, or none if the folder has nothing of the chain."""
        assert self._tiers.folders, "without a bucket there are no folders to ask"
        view = await self._tiers.folders.lookup(folder, keys, self._host.store.manifest)
        self._views[folder.node_id] = view
        return [PrefetchSource(Tier.STORAGE, folder.node_id, view.pages)] if view.units else []

    async def _held_by(self, node: NodeLife, keys: Sequence[PageKey]) -> list[PrefetchSource]:
        """One source, or none from a peer that does not answer."""
        try:
            pages = await self._tiers.peers.lookup(node, keys)
        except FerrymanError as error:
            self._missed(node, error)
            return []
        self._nodes[node.node_id] = node
        return [PrefetchSource(Tier.PEER, node.node_id, pages)]

    async def _named_by_index(self, keys: Sequence[PageKey]) -> Sequence[NodePrefix]:
        """The nodes and folders that hold some of a chain."""
        if keys and self._host.is_distrusted(keys[0]):
            return []
        shape = ResumeShape.of(self._host.store.manifest)
        return list((await self._tiers.index.usable_pages(keys, shape)).values())

    def _folders(self, prefixes: Sequence[NodePrefix], have: int) -> list[NodeLife]:
        return self._tiers.folders.better(prefixes, have) if self._tiers.folders else []

    def _holders(self, prefixes: Sequence[NodePrefix], have: int) -> list[NodeLife]:
        me = self._host.identity.node_id
        better = [
            prefix
            for prefix in prefixes
            if prefix.node.node_id != me and prefix.node.address and prefix.usable_pages > have
        ]
        better.sort(key=lambda prefix: (-prefix.usable_pages, prefix.node.node_id))
        return [prefix.node for prefix in better[: self._tiers.max_peers]]

    def _missed(self, node: NodeLife, error: FerrymanError) -> None:
        self.num_failed += 1
        if isinstance(error, NotOfThisCluster):
            self.num_forged += 1
            log.warning("a peer is not believed %s: %s", Tail(node=node.node_id), error)
            return
        log.debug("a peer is a miss %s: %s", Tail(node=node.node_id, reason=error.reason), error)

    # Transfers.

    async def fetch(
        self,
        keys: Sequence[PageKey],
        room: Sequence[ReservedUnit],
        sources: Sequence[PrefetchSource],
    ) -> None:
        """Fetches each unit from the first source that really has it.

        Once this has ended, also by an error, nothing writes into the room any more.
        """
        self._keys = keys
        view = self._host.arena.view
        rooms = {(unit.kind, unit.page_index): view(unit.offset, unit.num_bytes) for unit in room}
        self._rooms = {name: rooms[name] for name in in_order(tuple(rooms))}
        for source in sources:
            held = source.names()
            names = [name for name in self._rooms if name in held and not self._has(name)]
            if names and source.name in self._views:
                await self._from_folder(self._views[source.name], names)
            elif names and source.tier is Tier.STORAGE:
                await self._from_storage(names)
            elif names:
                await self._from_peer(self._nodes[source.name], names)

    def _has(self, name: UnitName) -> bool:
        return name in self.digests

    async def _from_storage(self, names: Sequence[UnitName]) -> None:
        storage = self._tiers.storage
        try:
            leased = storage.lease(self._lease_id, self._keys, names)
            units = {(unit.kind, unit.page_index): unit for unit in leased}
            reads = (UnitRead(units[name], self._rooms[name]) for name in names if name in units)
            while batch := tuple(islice(reads, BATCH_UNITS)):
                began = self._clock()
                brought = await storage.read(batch)
                for unit in brought:
                    self._note((unit.kind, unit.page_index), unit.digest, OWN_STORAGE)
                self._took(Tier.STORAGE, self._clock() - began)
                self.num_failed += len(batch) - len(brought)
                storage.renew((self._lease_id,))
        except FerrymanError as error:
            self.num_failed += 1
            log.debug("storage is a miss: %s", error)
        finally:
            storage.release(self._lease_id)
            self._host.flush_storage_effects(self._tags)

    async def _from_folder(self, view: FolderView, names: Sequence[UnitName]) -> None:
        assert self._tiers.folders, "a view is of a folder that was asked"
        origin = UnitOrigin(Tier.STORAGE, view.name)
        reads = (UnitRead(view.units[name], self._rooms[name]) for name in names)
        while batch := tuple(islice(reads, BATCH_UNITS)):
            began = self._clock()
            brought = await self._tiers.folders.read(view, batch)
            for unit in brought:
                self._note((unit.kind, unit.page_index), unit.digest, origin)
            self._took(Tier.STORAGE, self._clock() - began)
            self.num_failed += len(batch) - len(brought)

    async def _from_peer(self, node: NodeLife, names: Sequence[UnitName]) -> None:
        rooms = {name: self._rooms[name] for name in names}
        order = FetchOrder(self._host.store.manifest.digest, self._keys, rooms)
        units = [(kind, self._keys[page]) for kind, page in names]
        self._indexed_digests = await self._tiers.index.digests(node, self._keys[0], units)
        began = self._clock()
        try:
            await self._tiers.peers.fetch(node, order, self, tags=self._tags)
            self.num_failed += sum(not self._has(name) for name in names)
        except FerrymanError as error:
            self._missed(node, error)
        finally:
            self._took(Tier.PEER, self._clock() - began)

    # Results from peers.

    def on_unit(self, name: UnitName, digest: bytes) -> None:
        """The bytes have the digest that came with them; the index may name another one."""
        indexed = self._indexed_digests.get((name[0], self._keys[name[1]]))
        if indexed and digest not in indexed:
            self.num_mismatched += 1
        else:
            self._note(name, digest, UnitOrigin(Tier.PEER))

    def on_corrupt(self, name: UnitName) -> None:
        self.num_corrupt += 1
        key = self._keys[name[1]]
        if self.num_corrupt == 1:  # a peer whose memory is bad may send thousands
            log.error("corrupt unit from a peer %s", Tail(kind=name[0], key=key.hex()))
        facts = {"key": key.hex(), "kind": name[0].value}
        self._host.log_incident(self._tags, "corrupt", tier=Tier.PEER.value, **facts)

    def _note(self, name: UnitName, digest: bytes, origin: UnitOrigin) -> None:
        self.digests[name], self.origins[name] = digest, origin
        unit = Traffic(1, len(self._rooms[name]), 0.0)
        self.traffic[origin.tier] = self.traffic.get(origin.tier, Traffic()) + unit

    def _took(self, tier: Tier, seconds: float) -> None:
        if tier in self.traffic:
            self.traffic[tier] += Traffic(0, 0, seconds)
