"""Writes the host tier to storage in the background, group by group.

The source slots are leased meanwhile, so the host tier cannot reuse them. If a lease is lost
nevertheless, the digest shows the storage tier that the bytes have changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count

from ferryman.errors import FerrymanError
from ferryman.tiers.values import LeaseRequest
from ferryman.tiers.writeback import WritebackBacklog, WritebackGroup, WritebackJob
from ferryman.wire.grpc.rpc import CallTags
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.storage.interface import OfferedUnit

log = logging.getLogger(__name__)


class StorageWriter:
    """Writes the groups of a backlog, one at a time. `wake` is set when the backlog gets a job."""

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
