"""The host tier from a worker's side: what to load is leased before admission, what is cached is
written through afterwards. Both run beside the engine and can only miss, never fail.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from ferryman.cache.slots import Holder, Role, SlotHandle
from ferryman.engine.assembly import Engine
from ferryman.runtime.background import Background
from ferryman.schedule.events import Cached
from ferryman.schedule.request import Request
from ferryman.wire.host_client import MISS, HostCacheClient, HostLease, UnitSource
from ferryman.wire.rpc import CallTags


class HostTierClient(Protocol):
    """What a worker does with the host tier."""

    @property
    def node_id(self) -> str: ...

    async def lease_for(self, request: Request, tags: CallTags) -> HostLease:
        """The units worth loading for a prompt; a miss is empty."""
        ...

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None: ...

    def write_through(self, cached: Cached, tags: CallTags) -> None:
        """Begins to store a prefix that came into the tree; never waits."""
        ...


class NoHostTier:
    """A worker without a host-cache on its node."""

    node_id = ""

    async def lease_for(self, request: Request, tags: CallTags) -> HostLease:
        return MISS

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        """Nothing was leased."""

    def write_through(self, cached: Cached, tags: CallTags) -> None:
        """Nowhere to write."""


class HostTier:
    """A worker with a host-cache. Slots that are being copied out are leased to the copy."""

    def __init__(
        self,
        engine: Engine,
        client: HostCacheClient,
        background: Background,
        freed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._client = client
        self._background = background
        self._freed = freed

    @property
    def node_id(self) -> str:
        return self._client.node_id

    async def lease_for(self, request: Request, tags: CallTags) -> HostLease:
        tree = self._engine.scheduler.residence.tree
        have_pages = tree.match_depth(request.keys)
        depth = next(tree.snapshot_depths(request.keys, have_pages), 0)
        return await self._client.acquire(
            request.keys, request.prompt_len, have_pages, min_pages=depth, tags=tags
        )

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        """A corrupt load reports all units of the lease: which one it was is not known here."""
        units = lease.view.units.values() if was_corrupt else ()
        self._client.release(lease, [(unit.kind, unit.key) for unit in units])

    def write_through(self, cached: Cached, tags: CallTags) -> None:
        units = self._engine.scheduler.chain_units(cached.keys)
        holder = Holder(Role.STORE, cached.request_id)
        handles = [unit.handle for unit in units]
        self._engine.scheduler.lease(handles, holder)
        store = self._engine.transfer.store_unit
        sources = [
            UnitSource(unit.kind, unit.page_index, partial(store, unit.kind, unit.handle.slot))
            for unit in units
        ]
        storing = self._client.store(cached.keys, sources, tags=tags)
        self._background.start(self._store(storing, handles, holder))

    async def _store(
        self, storing: Awaitable[int], handles: list[SlotHandle], holder: Holder
    ) -> None:
        try:
            await storing
        finally:
            self._engine.scheduler.release(handles, holder)
            self._freed()


@asynccontextmanager
async def host_tier_of(
    engine: Engine, client: HostCacheClient, freed: Callable[[], None]
) -> AsyncIterator[HostTier]:
    """The tier for the length of a block; leaving waits for no store."""
    async with Background() as background:
        yield HostTier(engine, client, background, freed)
