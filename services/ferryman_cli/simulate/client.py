"""A worker's client of a simulated node, under the name and with the calls of the real one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import HostView
from ferryman.schedule.scheduler import Scheduler
from ferryman.tiers.prefetch_values import PrefetchAsk, Prefetched, PrefetchWish
from ferryman.tiers.values import AcquireAsk, ReserveAsk, WorkerLife
from ferryman.wire.host_client import MISS, HostLease, UnitSource
from ferryman.wire.rpc import NO_TAGS, CallTags
from ferryman_cli.simulate.node import SimulatedNode


@dataclass(frozen=True, slots=True)
class NoTransfer:
    """Bytes that nobody copies."""

    def store_unit(self, kind: Kind, slot: int, room: memoryview) -> bytes:
        raise AssertionError("there are no bytes here")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Of an engine, what a worker's host tier uses."""

    manifest: StateManifest
    scheduler: Scheduler
    transfer: NoTransfer = NoTransfer()


class SimulatedClient:
    """What `ferryman.wire.host_client.HostCacheClient` is to a worker."""

    node_id = "node"
    num_attaches = 1

    def __init__(self, node: SimulatedNode, life: WorkerLife, wish: PrefetchWish) -> None:
        self._node, self._life, self._wish = node, life, wish
        self._numbers = count()

    async def prefetch(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        *,
        have_pages: int,
        tags: CallTags,
        patience: float,
    ) -> Prefetched:
        last = self._last_page(prompt_len)
        ask = PrefetchAsk(keys, have_pages, last, self._wish.threshold_tokens)
        return await self._node.prefetch(ask, tags.request_id, patience)

    async def acquire(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        have_pages: int,
        *,
        min_pages: int = 0,
        tags: CallTags = NO_TAGS,
    ) -> HostLease:
        if not keys:
            return MISS
        ask = AcquireAsk(
            lease_id=self._new_name(),
            worker=self._life,
            keys=keys,
            have_pages=have_pages,
            min_pages=min_pages,
            max_pages=self._last_page(prompt_len),
        )
        grant = await self._node.acquire(ask, tags.request_id)
        if not grant.units:
            return MISS
        view = HostView({(unit.kind, unit.page_index): unit for unit in grant.units})
        return HostLease(ask.lease_id, 1, grant.usable_pages, view)

    def _last_page(self, prompt_len: int) -> int:
        return (prompt_len - 1) // self._node.store.manifest.page_size

    def release(self, lease: HostLease, corrupt: Iterable[Any] = ()) -> None:
        if lease.lease_id:
            self._node.store.release(lease.lease_id)

    async def store(
        self, keys: Sequence[PageKey], units: Sequence[UnitSource], *, tags: CallTags = NO_TAGS
    ) -> int:
        pages: dict[Kind, list[int]] = {}
        for unit in units:
            pages.setdefault(unit.kind, []).append(unit.page_index)
        return await self._node.write(ReserveAsk(self._new_name(), self._life, keys, pages))

    def _new_name(self) -> str:
        return f"{self._life.worker_id}-{next(self._numbers)}"
