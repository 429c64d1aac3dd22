"""What stands behind the host tier, joined: storage and its writer, peers, prefetches, fetches."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ferryman.runtime.background import Background
from ferryman.tiers.prefetch import Prefetcher, Truncate
from ferryman.tiers.prefetch_values import PrefetchPolicy, PrefetchWish
from ferryman.wire.index import PrefixIndex
from ferryman.wire.rpc import Channels
from ferryman_hostcache.backlog import Backlog
from ferryman_hostcache.bringing import SlowTiers
from ferryman_hostcache.fetching import Fetches
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.peers import GrpcPeers
from ferryman_hostcache.prefetching import Prefetching
from ferryman_hostcache.settings import Settings
from ferryman_hostcache.storing import StorageWriter

MAX_PEERS = 2


@dataclass(frozen=True, slots=True)
class Behind:
    """The parts, for who serves and who shows them."""

    backlog: Backlog
    writer: StorageWriter
    prefetching: Prefetching
    fetches: Fetches

    def tick(self) -> None:
        """Prolongs the leases under which bytes are on their way."""
        self.writer.tick()
        self.prefetching.tick()
        self.fetches.tick()


@asynccontextmanager
async def joined(
    settings: Settings, host: HostCache, backlog: Backlog, index: PrefixIndex
) -> AsyncIterator[Behind]:
    """The parts for the length of a block; at its end what is under way is ended and freed."""
    wish = PrefetchWish(PrefetchPolicy(settings.prefetch_policy), settings.prefetch_threshold)
    async with Channels() as channels, Background() as background:
        peers = GrpcPeers(channels, lookup_seconds=settings.peer_lookup_seconds)
        prefetching = Prefetching(
            host,
            SlowTiers(host.storage, index, peers, MAX_PEERS),
            Prefetcher(host.life, Truncate, settings.prefetch_share),
            background,
            wish=wish,
            max_running=settings.max_prefetches,
            clock=time.monotonic,
        )
        fetches = Fetches(host, max_running=settings.max_fetches, clock=time.monotonic)
        writer = StorageWriter(host, backlog, time.monotonic)
        yield Behind(backlog, writer, prefetching, fetches)
