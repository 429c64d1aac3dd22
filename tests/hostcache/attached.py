"""Workers that have attached to a host-cache, and prompts whose bytes tell where they belong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash
from tests.tiers.state_shapes import PAGE_SIZE
from tests.waiting import until

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.units import HostUnit
from ferryman.tiers.prefetch_values import DEFAULT_WISH, PrefetchOptions
from ferryman.wire.grpc.role_tokens import NO_TOKEN
from ferryman.wire.hostcache.arena_copy import UnitSource
from ferryman.wire.hostcache.attachment import HostCacheOptions
from ferryman.wire.hostcache.client import HostCacheClient, HostLease, host_cache_client
from ferryman_hostcache.service import RunningHostCache


def source_of(kind: Kind, page_index: int, content: bytes | memoryview) -> UnitSource:
    """A unit whose bytes are at hand."""
    return UnitSource(kind, page_index, partial(_copy_bytes, content))


def _copy_bytes(content: bytes | memoryview, room: memoryview) -> bytes:
    # numpy lets other threads run while it copies; a memoryview does not.
    np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(content, np.uint8))
    return xxhash.xxh3_128_digest(room)


class AttachedTestWorker:
    """A client, and the arena that it was given last."""

    def __init__(self) -> None:
        self.arena = memoryview(b"")
        self.client: HostCacheClient

    async def take(self, arena: memoryview) -> None:
        self.arena = arena

    def read(self, unit: HostUnit) -> bytes:
        return bytes(self.arena[unit.offset : unit.offset + unit.num_bytes])


@asynccontextmanager
async def worker_at(
    address: str,
    manifest: StateManifest,
    worker_id: str = "prefill-00000001",
    *,
    call_seconds: float = 10.0,
    wish: PrefetchOptions = DEFAULT_WISH,
    token: str = NO_TOKEN,
) -> AsyncIterator[AttachedTestWorker]:
    """A worker that has attached; a locked host-cache asks for its role's `token`."""
    worker = AttachedTestWorker()
    asked = HostCacheOptions(
        address, worker_id, 7, call_seconds=call_seconds, prefetch=wish, token=token
    )
    async with host_cache_client(asked, manifest, worker.take) as client:
        worker.client = client
        await client.attachment.attached()
        yield worker


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A chain of pages with the units it should be stored with."""

    manifest: StateManifest
    keys: tuple[PageKey, ...]
    names: tuple[tuple[Kind, int], ...]

    def content(self, kind: Kind, page: int) -> bytes:
        """Bytes that only this unit has: numbers from 0 to 2, whichever float type they are of.

        A model that resumes from them answers nonsense, not NaN, which would be noticed.
        """
        seed = xxhash.xxh3_64_intdigest(kind.encode() + self.keys[page])
        size = self.manifest.layout(kind).slot_bytes
        return np.random.default_rng(seed).integers(0, 64, size, dtype=np.uint8).tobytes()

    @property
    def sources(self) -> list[UnitSource]:
        return [source_of(kind, page, self.content(kind, page)) for kind, page in self.names]

    @property
    def prompt_len(self) -> int:
        """One token more than the pages hold, so that all of them may be reused."""
        return len(self.keys) * PAGE_SIZE + 1


def prompt_of(
    manifest: StateManifest,
    keys: tuple[PageKey, ...],
    snapshots: Sequence[int] = (),
    *,
    with_windows: bool = False,
) -> StoredPrompt:
    """All full pages, and recurrent states at the ends of the pages `snapshots`."""
    pages = range(len(keys))
    full = [(Kind.FULL, page) for page in pages]
    window = [(Kind.WINDOW, page) for page in pages if with_windows]
    states = [(Kind.RECURRENT, page) for page in snapshots]
    return StoredPrompt(manifest, keys, (*full, *window, *states))


async def load(worker: AttachedTestWorker, prompt: StoredPrompt, have_pages: int = 0) -> HostLease:
    return await worker.client.acquire(prompt.keys, prompt.prompt_len, have_pages)


def read_all(worker: AttachedTestWorker, prompt: StoredPrompt, lease: HostLease) -> int:
    """Checks every unit byte for byte, and its digest; how many there were."""
    for (kind, page), unit in lease.view.units.items():
        content = worker.read(unit)
        assert content == prompt.content(kind, page)
        assert xxhash.xxh3_128_digest(content) == unit.digest
    return len(lease.view.units)


async def until_flushed(service: RunningHostCache, prompt: StoredPrompt) -> None:
    """Flushes until the host tier is rid of a prompt: the storage writer releases it last."""
    async with asyncio.timeout(120):
        while any(service.host.store.lookup(prompt.keys).pages.values()):
            service.host.flush()
            await asyncio.sleep(0.01)


async def until_stored(service: RunningHostCache, prompt: StoredPrompt) -> None:
    """Waits until storage has all of a prompt; the writer sends no event."""
    storage = service.host.storage
    await until(lambda: storage.lookup(prompt.keys).usable_pages >= len(prompt.keys))
