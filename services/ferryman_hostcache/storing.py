"""Writes the host tier to storage in the background, chain by chain.

The slots written from are leased meanwhile, so the host tier cannot give them to others; where a
lease is lost all the same, the digest tells the storage tier that the bytes are not those meant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import FerrymanError
from ferryman.tiers.values import LeaseAsk, UnitName
from ferryman.tiers.write_policy import UnitKey
from ferryman.wire.rpc import CallTags
from ferryman_hostcache.backlog import Backlog
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.storage.tier import OfferedUnit

log = logging.getLogger(__name__)


class StorageWriter:
    """Works a backlog off, one group at a time."""

    def __init__(self, host: HostCache, backlog: Backlog, clock: Callable[[], float]) -> None:
        self._host, self._backlog, self._clock = host, backlog, clock
        self._numbers = count(1)
        self._leases: set[str] = set()

    async def run(self) -> None:
        """For ever."""
        while True:
            job = await self._backlog.next_job()
            waiting = set(job.units)
            try:
                while chain := self._host.store.deepest_chain(waiting):
                    path = set(chain)
                    mine = {unit for unit in waiting if unit[1] in path}
                    waiting -= mine
                    await self._write(chain, mine, job.tags)
            finally:
                self._settle(job.units, job.tags)

    def _settle(self, units: Sequence[UnitKey], tags: CallTags) -> None:
        """Those that did not come into storage may be tried again."""
        self._host.tell_storage(tags)
        self._backlog.unsettled(units)

    async def _write(self, chain: tuple[PageKey, ...], units: set[UnitKey], tags: CallTags) -> None:
        lease_id = f"backup.{self._host.identity.epoch:x}.{next(self._numbers)}"
        ask = LeaseAsk(lease_id, self._host.life, chain, self._names(chain, units))
        try:
            leased = self._host.store.lease(ask, self._clock())
            self._leases.add(lease_id)
            view = self._host.arena.view
            offered = [
                OfferedUnit(u.kind, u.page_index, view(u.offset, u.num_bytes), u.digest)
                for u in leased
            ]
            if offered:
                await self._host.storage.store(chain, offered)
        except FerrymanError as error:
            log.warning("not written to storage: %s", error)
        finally:
            self._leases.discard(lease_id)
            self._host.store.release(lease_id)

    def _names(self, chain: tuple[PageKey, ...], units: set[UnitKey]) -> list[UnitName]:
        """The units, and the full pages they stand on, as far as storage lacks them."""
        there = self._host.storage.lookup(chain).pages
        stored = {(kind, page) for kind, pages in there.items() for page in pages}
        self._backlog.written((kind, chain[page]) for kind, page in stored)
        wanted = [
            (kind, page)
            for page, key in enumerate(chain)
            for kind in self._host.store.manifest.kinds
            if kind is Kind.FULL or (kind, key) in units
        ]
        return [name for name in wanted if name not in stored]

    def tick(self) -> None:
        """Prolongs what is being read."""
        self._host.store.renew(self._leases, self._clock())
        for kind in self._host.store.manifest.kinds:
            self._backlog.pressed(
                kind, self._host.store.free_share(kind), self._host.store.next_to_evict(kind)
            )
