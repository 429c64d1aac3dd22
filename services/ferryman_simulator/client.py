"""A worker's client of a simulated node, under the name and with the calls of the real one."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import HostView, max_resume_pages
from ferryman.tiers.prefetch_values import Prefetched, PrefetchOptions, PrefetchRequest
from ferryman.tiers.unit_group import by_kind
from ferryman.tiers.values import AcquireRequest, ReserveRequest, WorkerLife
from ferryman.tiers.write_policy import write_policy_named
from ferryman.wire.grpc.rpc import NO_TAGS, CallTags
from ferryman.wire.hostcache.arena_copy import UnitSource
from ferryman.wire.hostcache.client import MISS, HostLease
from ferryman.wire.hostcache.copy_pace import ALL_AT_ONCE, CopyPace, StepPace
from ferryman.worker.backup import DeviceBackup
from ferryman.worker.host import HostTierBridge
from ferryman_simulator.node import SimulatedNode
from ferryman_simulator.setup import Setup
from ferryman_simulator.worker import SimulatedWorker

if TYPE_CHECKING:
    from ferryman.wire.hostcache.client import HostCacheClient

Job = Coroutine[Any, Any, None]


def _store_unit(kind: Kind, slot: int, room: memoryview) -> bytes:
    raise AssertionError("there are no bytes here")


class SimulatedClient:
    """A worker's view of `ferryman.wire.hostcache.client.HostCacheClient`, simulated."""

    node_id = "node"
    num_attaches = num_times_usable = 1

    def __init__(self, node: SimulatedNode, life: WorkerLife, wish: PrefetchOptions) -> None:
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
        ask = PrefetchRequest(keys, have_pages, last, self._wish.threshold_tokens)
        return await self._node.prefetch(ask, tags, patience)

    async def acquire(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        have_pages: int,
        *,
        min_pages: int = 0,
        tags: CallTags = NO_TAGS,
        patience: float = 0.0,
    ) -> HostLease:
        """Does not wait: a trace's next turn comes later than a store takes."""
        if not keys:
            return MISS
        ask = AcquireRequest(
            lease_id=self._new_name(),
            worker=self._life,
            keys=keys,
            have_pages=have_pages,
            min_pages=min_pages,
            max_pages=self._last_page(prompt_len),
        )
        grant = await self._node.acquire(ask, tags)
        if not grant.units:
            return MISS
        view = HostView({(unit.kind, unit.page_index): unit for unit in grant.units})
        return HostLease(ask.lease_id, 1, grant.usable_pages, view)

    def _last_page(self, prompt_len: int) -> int:
        return max_resume_pages(prompt_len, self._node.store.manifest.page_size)

    def release(self, lease: HostLease, corrupt: Iterable[Any] = ()) -> None:
        if lease.lease_id:
            self._node.store.release(lease.lease_id)

    async def store(
        self,
        keys: Sequence[PageKey],
        units: Sequence[UnitSource],
        *,
        tags: CallTags = NO_TAGS,
        pace: CopyPace = ALL_AT_ONCE,
    ) -> int:
        pages = by_kind((unit.kind, unit.page_index) for unit in units)
        # Simulated workers have one role each, and such copies take no breaks.
        return await self._node.write(ReserveRequest(self._new_name(), self._life, keys, pages))

    def _new_name(self) -> str:
        return f"{self._life.worker_id}-{next(self._numbers)}"


def join_node(
    setup: Setup, node: SimulatedNode, workers: Iterable[SimulatedWorker]
) -> tuple[Job, ...]:
    """Gives workers their host tier; returns the jobs to run as long as the workers."""
    return (node.work(), *(_join(setup, node, worker) for worker in workers))


def _join(setup: Setup, node: SimulatedNode, worker: SimulatedWorker) -> Job:
    """The simulated client has all members of the real one that a host tier uses."""
    client = cast("HostCacheClient", SimulatedClient(node, worker.life, setup.wish))
    policy = write_policy_named(setup.write_policy)
    backup = DeviceBackup(worker.scheduler, _store_unit, client, policy, worker.ring, StepPace())
    worker.host = HostTierBridge(worker.scheduler, client, backup, setup.wish)
    return backup.run()
