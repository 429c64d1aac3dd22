"""What the storage tier's tests share: prompts of random bytes, stored and read back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.tiers.values import UnitName
from ferryman_hostcache.storage.opening import open_storage
from ferryman_hostcache.storage.settings import StorageSettings
from ferryman_hostcache.storage.tier import OfferedUnit, StorageTier, UnitRead


@dataclass(frozen=True)
class StoredPrompt:
    """A chain and the bytes of its units."""

    keys: tuple[PageKey, ...]
    units: Mapping[UnitName, bytes]

    def offers(self) -> list[OfferedUnit]:
        return [
            OfferedUnit(kind, page, memoryview(data), xxhash.xxh3_128_digest(data))
            for (kind, page), data in self.units.items()
        ]


def prompt_with(
    manifest: StateManifest, keys: Sequence[PageKey], snapshots: Sequence[int] = ()
) -> StoredPrompt:
    """Every page of the chain, and recurrent states at the pages named. The bytes are made from
    the keys: the same unit has the same bytes whoever makes it."""
    names: list[UnitName] = []
    for kind in manifest.kinds:
        pages = snapshots if kind is Kind.RECURRENT else range(len(keys))
        names += [(kind, page) for page in pages]
    units = {(kind, page): bytes_of(manifest, kind, keys[page]) for kind, page in names}
    return StoredPrompt(tuple(keys), units)


def bytes_of(manifest: StateManifest, kind: Kind, key: PageKey) -> bytes:
    return random.Random(kind.encode() + key).randbytes(manifest.layout(kind).slot_bytes)


def opened(
    folder: Path, *, clock: Callable[[], float] = time.monotonic, **settings: float
) -> AbstractAsyncContextManager[StorageTier]:
    chosen = StorageSettings.model_validate(
        {"folder": str(folder) if folder.name else "", **settings}
    )
    return open_storage(chosen, clock=clock)


async def read_all(
    storage: StorageTier, prompt: StoredPrompt, names: Sequence[UnitName] = ()
) -> dict[UnitName, bytes]:
    """What is read back of a prompt's units."""
    units = storage.lease("reader", prompt.keys, names or list(prompt.units))
    reads = [UnitRead(unit, memoryview(bytearray(unit.num_bytes))) for unit in units]
    try:
        brought = set(await storage.read(reads))
    finally:
        storage.release("reader")
    return {
        (read.unit.kind, read.unit.page_index): bytes(read.memory)
        for read in reads
        if read.unit in brought
    }
