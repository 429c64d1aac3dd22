"""Connects the tiers below the host tier: storage and its writer, peers, prefetches, fetches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ferryman.runtime.background import Background
from ferryman.settings.hostcache import HostCacheServiceSettings
from ferryman.tiers.prefetch import PrefetchPlanner, Truncate
from ferryman.tiers.prefetch_values import PrefetchOptions, PrefetchPolicy
from ferryman.tiers.writeback import WritebackBacklog
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.grpc.rpc import CallTags, Channels
from ferryman.wire.redis.index import PrefixIndex
from ferryman_hostcache.fetches import Fetches
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.peers import PeerClient, PeerSeals
from ferryman_hostcache.prefetch_io import PrefetchTiers
from ferryman_hostcache.prefetch_runner import PrefetchRunner
from ferryman_hostcache.shared_folders import SharedFolders
from ferryman_hostcache.storage_writeback import StorageWriter

MAX_PEERS = 2


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """The parts, for the server and the gauges."""

    backlog: WritebackBacklog[CallTags]
    writer: StorageWriter
    prefetching: PrefetchRunner
    fetches: Fetches
    seals: PeerSeals
    folders: SharedFolders | None

    def tick(self) -> None:
        """Prolongs the leases of running transfers."""
        self.writer.tick()
        self.prefetching.tick()
        self.fetches.tick()


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
        writer = StorageWriter(host, backlog, has_backlog, time.monotonic)
        yield LowerTiers(backlog, writer, prefetching, fetches, seals, folders)
