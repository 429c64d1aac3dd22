"""A node's host tier without an arena: the host-cache's own store, calls and copies as seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import EMPTY_HOST, HostView
from ferryman.cache.slots import Holder, Role
from ferryman.schedule.events import Cached, CachedUnit
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import AcquireAsk, ReserveAsk, ReservedUnit, StoreLimits
from ferryman_cli.simulate.clock import VirtualClock
from ferryman_cli.simulate.setup import Setup
from ferryman_cli.simulate.worker import SimulatedWorker

# Readers and writers renew here as they do there; nobody dies.
_LIMITS = StoreLimits(lease_seconds=math.inf)
# As many as a worker's client lets wait before it drops stores.
MAX_STORES = 8
_NO_BYTES = b"simulated"

OnGrant = Callable[[str, HostView], None]


class HostTier(Protocol):
    """What a worker does with the host tier of its node."""

    def acquire(self, keys: tuple[PageKey, ...], prompt_len: int, then: OnGrant) -> None:
        """Calls `then` with a lease's name and what it holds; both are empty on a miss."""
        ...

    def release(self, lease_id: str) -> None: ...

    def cached(self, cached: Cached) -> None:
        """A prefix came into the worker's tree."""
        ...


class NoHostTier:
    """A node without host memory."""

    def acquire(self, keys: tuple[PageKey, ...], prompt_len: int, then: OnGrant) -> None:
        then("", EMPTY_HOST)

    def release(self, lease_id: str) -> None:
        """Nothing was leased."""

    def cached(self, cached: Cached) -> None:
        """Nowhere to write."""


@dataclass(frozen=True, slots=True)
class _Store:
    """Units of one chain on their way to the host, leased on the device until they are there."""

    keys: tuple[PageKey, ...]
    units: tuple[CachedUnit, ...]
    holder: Holder


class SimulatedHostTier:
    """One worker's client and the store behind it. Stores run one after the other."""

    def __init__(
        self, setup: Setup, store: HostStore, worker: SimulatedWorker, clock: VirtualClock
    ) -> None:
        self.num_dropped = 0
        self._setup, self._costs = setup, setup.costs
        self._store, self._worker, self._clock = store, worker, clock
        self._waiting: deque[_Store] = deque()
        self._is_storing = False
        self._numbers = count()

    # Loading.

    def acquire(self, keys: tuple[PageKey, ...], prompt_len: int, then: OnGrant) -> None:
        tree = self._worker.scheduler.residence.tree
        have_pages = tree.match_depth(keys)
        ask = AcquireAsk(
            lease_id=self._new_name(),
            worker=self._worker.life,
            keys=keys,
            have_pages=have_pages,
            min_pages=next(tree.snapshot_depths(keys, have_pages), 0),
            max_pages=(prompt_len - 1) // self._setup.manifest.page_size,
        )
        if keys:
            self._clock.after(self._costs.call_seconds, partial(self._acquire, ask, then))
        else:
            then("", EMPTY_HOST)

    def _acquire(self, ask: AcquireAsk, then: OnGrant) -> None:
        grant = self._store.acquire(ask, self._clock.now)
        view = HostView({(unit.kind, unit.page_index): unit for unit in grant.units})
        then(ask.lease_id if grant.units else "", view)

    def release(self, lease_id: str) -> None:
        if lease_id:
            self._clock.after(self._costs.call_seconds, partial(self._store.release, lease_id))

    # Storing.

    def cached(self, cached: Cached) -> None:
        units = self._worker.scheduler.chain_units(cached.keys)
        holder = Holder(Role.STORE, cached.request_id)
        self._worker.scheduler.lease([unit.handle for unit in units], holder)
        store = _Store(cached.keys, units, holder)
        if len(self._waiting) + self._is_storing >= MAX_STORES:
            self.num_dropped += 1
            self._clock.after(0.0, partial(self._over, store))
            return
        self._waiting.append(store)
        self._begin_next()

    def _begin_next(self) -> None:
        if self._waiting and not self._is_storing:
            self._is_storing = True
            begin = partial(self._begin, self._waiting.popleft())
            self._clock.after(self._costs.call_seconds, begin)

    def _begin(self, store: _Store) -> None:
        ask = ReserveAsk(self._new_name(), self._worker.life, store.keys, _by_kind(store.units))
        room = self._store.reserve(ask, self._clock.now)
        if not room:
            self._next(store)
            return
        seconds = sum(unit.num_bytes for unit in room) * self._costs.store_seconds_per_byte
        commit = partial(self._commit, ask.lease_id, room, store)
        self._clock.after(seconds + self._costs.call_seconds, commit)

    def _commit(self, lease_id: str, room: Iterable[ReservedUnit], store: _Store) -> None:
        digests = {(unit.kind, unit.page_index): _NO_BYTES for unit in room}
        self._store.commit(lease_id, digests, self._clock.now)
        self._next(store)

    def _next(self, store: _Store) -> None:
        self._store.drain_effects()
        self._is_storing = False
        self._begin_next()
        self._over(store)

    def _over(self, store: _Store) -> None:
        """The device is read no more: its slots may be evicted again."""
        self._worker.scheduler.release([unit.handle for unit in store.units], store.holder)
        self._worker.ring()

    def _new_name(self) -> str:
        return f"{self._worker.life.worker_id}-{next(self._numbers)}"


def make_store(setup: Setup) -> HostStore:
    """The store of the node's host-cache; its leases do not end with time."""
    return HostStore(setup.manifest, setup.arena, _LIMITS)


def _by_kind(units: Iterable[CachedUnit]) -> dict[Kind, list[int]]:
    found: dict[Kind, list[int]] = {}
    for unit in units:
        found.setdefault(unit.kind, []).append(unit.page_index)
    return found
