"""The holder's side of a fetch: units of its host tier, or straight from its storage, as frames."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from ferryman.cache.keys import PageKey
from ferryman.cache.units import HostUnit
from ferryman.errors import ManifestMismatch, QueueFull
from ferryman.tiers.storage_values import StorageUnit
from ferryman.tiers.values import LeaseAsk, UnitName
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.storage.tier import UnitRead

FRAME_BYTES = 1 << 20
AHEAD_BYTES = 8 << 20  # read from storage at once for one fetch, or one unit


@dataclass(frozen=True, slots=True)
class Held:
    """One unit whose bytes are at hand until the next is asked for."""

    name: UnitName
    digest: bytes
    content: memoryview


class Fetches:
    """Serves other nodes, at most `max_running` at once."""

    def __init__(self, host: HostCache, *, max_running: int, clock: Callable[[], float]) -> None:
        self._host, self._max_running, self._clock = host, max_running, clock
        self._numbers = count(1)
        self._leases: set[str] = set()
        self.num_units = self.num_bytes = 0

    async def units(
        self, manifest_digest: str, keys: Sequence[PageKey], names: Sequence[UnitName]
    ) -> AsyncGenerator[Held]:
        """Those of the units that are here, in that order.

        Raises ManifestMismatch, Stale before a worker has attached, QueueFull.
        """
        store = self._host.store
        if store.manifest.digest != manifest_digest:
            raise ManifestMismatch(
                (f"digest: {store.manifest.digest} here, {manifest_digest} there",)
            )
        with self._lease() as lease_id:
            in_host = self._in_host(lease_id, keys, names)
            rest = [name for name in names if name not in in_host]
            waiting = deque(self._host.storage.lease(lease_id, keys, rest))
            ahead: dict[UnitName, Held] = {}
            for name in names:
                if waiting and _name_of(waiting[0]) == name:
                    ahead = await self._read(waiting)
                if held := in_host.get(name) or ahead.pop(name, None):
                    yield self._counted(held)

    async def _read(self, waiting: deque[StorageUnit]) -> dict[UnitName, Held]:
        """The next units that wait, one at least: what lies together is read together."""
        reads: list[UnitRead] = []
        num_bytes = 0
        while waiting and (not reads or num_bytes + waiting[0].num_bytes <= AHEAD_BYTES):
            unit = waiting.popleft()
            reads.append(UnitRead(unit, memoryview(bytearray(unit.num_bytes))))
            num_bytes += unit.num_bytes
        brought = set(await self._host.storage.read(reads))
        return {
            _name_of(read.unit): Held(_name_of(read.unit), read.unit.digest, read.memory)
            for read in reads
            if read.unit in brought
        }

    def _in_host(
        self, lease_id: str, keys: Sequence[PageKey], names: Sequence[UnitName]
    ) -> dict[UnitName, Held]:
        ask = LeaseAsk(lease_id, self._host.life, keys, names)
        view = self._host.arena.view
        return {
            _name_of(unit): Held(_name_of(unit), unit.digest, view(unit.offset, unit.num_bytes))
            for unit in self._host.store.lease(ask, self._clock())
        }

    @contextmanager
    def _lease(self) -> Iterator[str]:
        """One name for the leases in both tiers, which end with the block."""
        if len(self._leases) >= self._max_running:
            raise QueueFull(f"{self._max_running} fetches are under way")
        lease_id = f"fetch.{self._host.identity.epoch:x}.{next(self._numbers)}"
        self._leases.add(lease_id)
        try:
            yield lease_id
        finally:
            self._leases.discard(lease_id)
            self._host.store.release(lease_id)
            self._host.storage.release(lease_id)

    def _counted(self, held: Held) -> Held:
        self.num_units, self.num_bytes = self.num_units + 1, self.num_bytes + len(held.content)
        return held

    def tick(self) -> None:
        """Prolongs what is being streamed."""
        self._host.store.renew(self._leases, self._clock())
        self._host.storage.renew(self._leases)


def _name_of(unit: HostUnit | StorageUnit) -> UnitName:
    return unit.kind, unit.page_index


def frames_of(content: memoryview) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of frames of at most FRAME_BYTES."""
    for offset in range(0, len(content), FRAME_BYTES):
        yield offset, bytes(content[offset : offset + FRAME_BYTES])
