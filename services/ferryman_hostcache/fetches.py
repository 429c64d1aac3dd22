"""The holder's side of a fetch: sends units of its host tier or storage as frames."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.units import HostUnit
from ferryman.errors import InvalidRequest, ManifestMismatch, QueueFull
from ferryman.tiers.storage_values import UnitRead
from ferryman.tiers.values import LeaseRequest, StoredUnit, UnitName
from ferryman_hostcache.host import HostCache

FRAME_BYTES = 1 << 20
AHEAD_BYTES = 8 << 20  # for one fetch, the bytes read from storage at once, unless a unit is larger


@dataclass(frozen=True, slots=True)
class FetchedUnit:
    """One unit. Its bytes are valid until the next unit is requested."""

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
    ) -> AsyncGenerator[FetchedUnit]:
        """The units that are here, in the order of `names`.

        Raises ManifestMismatch, Stale before a worker has attached, QueueFull, and InvalidRequest
        for a kind of state that the model does not have.
        """
        store = self._host.store
        if store.manifest.digest != manifest_digest:
            raise ManifestMismatch(
                (f"digest: {store.manifest.digest} here, {manifest_digest} there",)
            )
        check_kinds((kind for kind, _ in names), store.manifest)
        with self._lease() as lease_id:
            in_host = self._in_host(lease_id, keys, names)
            rest = [name for name in names if name not in in_host]
            waiting = deque(self._host.storage.lease(lease_id, keys, rest))
            ahead: dict[UnitName, FetchedUnit] = {}
            for name in names:
                if waiting and _name_of(waiting[0]) == name:
                    ahead = await self._read(waiting)
                if held := in_host.get(name) or ahead.pop(name, None):
                    yield self._counted(held)

    async def _read(self, waiting: deque[StoredUnit]) -> dict[UnitName, FetchedUnit]:
        """Reads the next units that wait, at least one: neighbours are read together."""
        reads: list[UnitRead] = []
        num_bytes = 0
        while waiting and (not reads or num_bytes + waiting[0].num_bytes <= AHEAD_BYTES):
            unit = waiting.popleft()
            reads.append(UnitRead(unit, memoryview(bytearray(unit.num_bytes))))
            num_bytes += unit.num_bytes
        brought = set(await self._host.storage.read(reads))
        return {
            _name_of(read.unit): FetchedUnit(_name_of(read.unit), read.unit.digest, read.memory)
            for read in reads
            if read.unit in brought
        }

    def _in_host(
        self, lease_id: str, keys: Sequence[PageKey], names: Sequence[UnitName]
    ) -> dict[UnitName, FetchedUnit]:
        ask = LeaseRequest(lease_id, self._host.life, keys, names)
        view = self._host.arena.view
        return {
            _name_of(unit): FetchedUnit(
                _name_of(unit), unit.digest, view(unit.offset, unit.num_bytes)
            )
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

    def _counted(self, held: FetchedUnit) -> FetchedUnit:
        self.num_units, self.num_bytes = self.num_units + 1, self.num_bytes + len(held.content)
        return held

    def tick(self) -> None:
        """Prolongs the leases of running fetches."""
        self._host.store.renew(self._leases, self._clock())
        self._host.storage.renew(self._leases)


def check_kinds(kinds: Iterable[Kind], manifest: StateManifest) -> None:
    """Raises InvalidRequest for a kind of state that the model does not have."""
    for kind in kinds:
        if kind not in manifest.kinds:
            raise InvalidRequest(f"this model has no {kind} state", "kind")


def _name_of(unit: HostUnit | StoredUnit) -> UnitName:
    return unit.kind, unit.page_index


def frames_of(content: memoryview) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of frames of at most FRAME_BYTES."""
    for offset in range(0, len(content), FRAME_BYTES):
        yield offset, bytes(content[offset : offset + FRAME_BYTES])
