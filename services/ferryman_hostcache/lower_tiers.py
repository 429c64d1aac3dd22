"""Connects the tiers below the host tier: storage and its writer, peers, prefetches, fetches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from ferryman.errors import FerrymanError
from ferryman.runtime.background import Background
from ferryman.settings.hostcache import HostCacheServiceSettings
from ferryman.tiers.prefetch import PrefetchPlanner, Truncate
from ferryman.tiers.prefetch_values import PrefetchOptions, PrefetchPolicy
from ferryman.tiers.storage_values import OfferedUnit
from ferryman.tiers.values import LeaseRequest
from ferryman.tiers.writeback import WritebackBacklog, WritebackGroup, WritebackJob
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.grpc.rpc import CallTags, Channels
from ferryman.wire.redis.index import PrefixIndex
from ferryman_hostcache.deposits import Deposits
from ferryman_hostcache.fetches import Fetches
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.peers import PeerClient, PeerSeals
from ferryman_hostcache.prefetch_io import PrefetchTiers
from ferryman_hostcache.prefetch_runner import PrefetchRunner
from ferryman_hostcache.shared_folders import SharedFolders

log = logging.getLogger(__name__)

MAX_PEERS = 2


class StorageWriter:
    """Writes the host tier to storage in the background, one group of the backlog at a time. `wake`
    is set when the backlog gets a job.

    The source slots are leased meanwhile, so the host tier cannot reuse them. If a lease is lost
    nevertheless, the digest shows the storage tier that the bytes have changed.
    """

    def __init__(
        self,
        host: HostCache,
        backlog: WritebackBacklog[CallTags],
        wake: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        self._host, self._backlog, self._wake, self._clock = host, backlog, wake, clock
        self._numbers = count(1)
        self._leases: set[str] = set()

    async def run(self) -> None:
        """Writes jobs, for ever."""
        while True:
            while (job := self._backlog.take()) is not None:
                await self._write_job(job)
            self._wake.clear()
            await self._wake.wait()

    async def _write_job(self, job: WritebackJob[CallTags]) -> None:
        try:
            for group in self._backlog.groups(job, self._host.store, self._host.storage.lookup):
                await self._write(group)
        finally:
            self._host.flush_storage_effects(job.tags)
            self._backlog.settle(job)

    async def _write(self, group: WritebackGroup) -> None:
        lease_id = f"backup.{self._host.identity.epoch:x}.{next(self._numbers)}"
        ask = LeaseRequest(lease_id, self._host.life, group.chain, group.names)
        try:
            leased = self._host.store.lease(ask, self._clock())
            self._leases.add(lease_id)
            view = self._host.arena.view
            offered = [
                OfferedUnit(u.kind, u.page_index, view(u.offset, u.num_bytes), u.digest)
                for u in leased
            ]
            if offered:
                await self._host.storage.store(group.chain, offered)
        except FerrymanError as error:
            log.warning("not written to storage: %s", error)
        finally:
            self._leases.discard(lease_id)
            self._host.store.release(lease_id)

    def tick(self) -> None:
        """Prolongs the leases of units being read; writes ahead if little of the host tier is
        free."""
        self._host.store.renew(self._leases, self._clock())
        self._backlog.on_pressure(self._host.store, CallTags())


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """The parts, for the server and the gauges."""

    backlog: WritebackBacklog[CallTags]
    writer: StorageWriter
    prefetching: PrefetchRunner
    fetches: Fetches
    deposits: Deposits
    seals: PeerSeals
    folders: SharedFolders | None

    def tick(self) -> None:
        """Prolongs the leases of running transfers."""
        self.writer.tick()
        self.prefetching.tick()
        self.fetches.tick()
        self.deposits.tick()


@asynccontextmanager
async def open_lower_tiers(
    settings: HostCacheServiceSettings,
    host: HostCache,
    backlog: WritebackBacklog[CallTags],
    has_backlog: asyncio.Event,
    index: PrefixIndex,
    seals: PeerSeals,
    access: GrpcAccess,
    folders: SharedFolders | None,
) -> AsyncIterator[LowerTiers]:
    """The parts for the length of a block; at its end running transfers are ended and freed. Calls
    to other nodes show the role of `access`."""
    wish = PrefetchOptions(PrefetchPolicy(settings.prefetch_policy), settings.prefetch_threshold)
    async with Channels(access) as channels, Background() as background:
        peers = PeerClient(channels, seals, lookup_seconds=settings.peer_lookup_seconds)
        prefetching = PrefetchRunner(
            host,
            PrefetchTiers(host.storage, index, peers, MAX_PEERS, folders),
            PrefetchPlanner(host.life, Truncate, settings.prefetch_share),
            background,
            wish=wish,
            max_running=settings.max_prefetches,
            clock=time.monotonic,
        )
        fetches = Fetches(host, max_running=settings.max_fetches, clock=time.monotonic)
        deposits = Deposits(host, clock=time.monotonic)
        writer = StorageWriter(host, backlog, has_backlog, time.monotonic)
        yield LowerTiers(backlog, writer, prefetching, fetches, deposits, seals, folders)
