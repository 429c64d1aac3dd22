"""The ledger of a host-cache: all that its readers, writers and transfers take.

A call of the wiring that gives something back fails no test of the parts if it is left out. So
every host-cache of these tests ends here, and every storage tier: prefetches are ended, then
nothing is held but for workers that are still attached. `held_by_process` compares descriptors and
threads with those from before the test.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ferryman.tiers.leases import HostReservation, ReadLease
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.lower_tiers import LowerTiers
from ferryman_hostcache.service import RunningHostCache
from ferryman_hostcache.storage.blob_storage import BlobStorage

SETTLING_SECONDS = 20.0
# Names of descriptors that a host-cache opens, but for the map of an arena: the last view ends it.
OPENED = ("/storage/", ".extent", "memfd:")
THREADS = ("storage-reader", "storage-writer")

Held = dict[str, Any]


async def settle(service: RunningHostCache) -> None:
    """Ends all prefetches; fails with what the host-cache holds then for nobody. No lease ends by
    its time alone."""
    for store in (service.host._store, getattr(service.host.storage, "_store", None)):
        if store is not None:
            setattr(store, "expire", _keeps_all)  # noqa: B010  # a method of this store alone
    await _until_back(lambda: _held(service), f"by {service.worker_id}")
    if service.host.is_laid_out:
        service.host.store.check_integrity()


async def settle_storage(storage: object) -> None:
    """Fails with what a storage tier goes on with though nobody reads or writes."""
    if isinstance(storage, BlobStorage):
        await _until_back(lambda: _some(_of_storage(storage)), "by the storage tier")
        if storage._store is not None:
            storage._store.check_integrity()


async def _until_back(held: Callable[[], Held], by: str) -> None:
    end = time.monotonic() + SETTLING_SECONDS
    while taken := held():
        assert time.monotonic() < end, f"not given back {by}: {taken}"
        await asyncio.sleep(0.002)


def _held(service: RunningHostCache) -> Held:
    for job in service.lower_tiers.prefetching._running.values():
        job.stop.set()
    service.host.tick()
    entries = _of_transfers(service.lower_tiers)
    if service.host.is_laid_out:
        entries |= _of_host(service.host)
    if isinstance(service.host.storage, BlobStorage):
        entries |= _of_storage(service.host.storage)
        entries["leases in storage"] = _leases_in(service.host.storage)
    return _some(entries)


def _keeps_all(_now: float) -> tuple[str, ...]:
    return ()


def _some(entries: Held) -> Held:
    return {holder: taken for holder, taken in entries.items() if taken}


def _of_transfers(tiers: LowerTiers) -> Held:
    runner = tiers.prefetching
    return {
        "prefetches": list(runner._running),
        "bytes under way": runner.bytes_under_way,
        "jobs of prefetches": len(runner._background),
        "fetches": list(tiers.fetches._leases),
        "leases of the storage writer": list(tiers.writer._leases),
    }


def _of_host(host: HostCache) -> Held:
    store, living = host.store, {entry.life for entry in host.workers._attached}
    leases: list[tuple[str, ReadLease | HostReservation]] = []
    leases += store._readers.items()
    leases += store._writers.items()
    ledgers = store._slots.pools.ledgers()
    entries: Held = {
        "leases of nobody": [name for name, lease in leases if lease.worker not in living],
        "slots that are neither free nor leased": [
            str(kind) for kind, ledger in ledgers.items() if not ledger.balances
        ],
    }
    if not leases:
        entries["slots"] = {
            str(kind): roles
            for kind, ledger in ledgers.items()
            if (roles := set(ledger.by_role) - {"tree"})
        }
        entries["tags of ended leases"] = list(host._requests)
    return entries


def _of_storage(storage: BlobStorage) -> Held:
    return {
        "reads": storage._readers.num_in_flight,
        "stores that wait": storage._waiting,
        "a store under way": storage._turn.locked(),
        "extents that are written": list(storage._store._writing) if storage._store else [],
    }


def _leases_in(storage: BlobStorage) -> list[str]:
    return [name for name, _ in storage._store._readers.items()] if storage._store else []


@contextmanager
def held_by_process() -> Iterator[None]:
    """The block leaves neither descriptors of host-caches nor threads of their storage."""
    before = set(_descriptors())
    yield
    end = time.monotonic() + SETTLING_SECONDS
    while taken := _some({"descriptors": set(_descriptors()) - before, "threads": _threads()}):
        assert time.monotonic() < end, f"not given back by the process: {taken}"
        time.sleep(0.01)


def _descriptors() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(descriptor.readlink())
            if any(name in target for name in OPENED):
                yield f"{descriptor.name} → {target}"


def _threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(THREADS)]
