"""A process that owns a prefix of an object store and does what lines on stdin say.

python -m tests.hostcache.doomed_owner URL LEASE_SECONDS

`store N` stores prompt N, `drop N` drops it; both tell of how many units.
"""

from __future__ import annotations

import asyncio
import sys

from tests.hostcache.stored import Bucket, StoredChain, opened, prompt_with
from tests.tiers.state_shapes import chain

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman_hostcache.storage.factory import StorageTier

SLOT_BYTES = 3 << 20  # two of them are more than the buffers of a connection


def manifest() -> StateManifest:
    spec = SectionSpec("key", 0, (SLOT_BYTES // 8,), "float64", 0)
    return StateManifest("large", 4, 4, 0, (lay_out(Kind.FULL, [spec]),))


def prompt(number: int) -> StoredChain:
    return prompt_with(manifest(), chain(number, number + 1))


async def obey(storage: StorageTier, line: str) -> int:
    verb, number = line.split()
    chosen = prompt(int(number))
    if verb == "drop":
        return storage.drop(Kind.FULL, chosen.keys[0])
    return (await storage.store(chosen.keys, chosen.offers())).num_stored


async def main(url: str, lease_seconds: float) -> None:
    async with opened(Bucket(url, lease_seconds=lease_seconds)) as storage:
        storage.attach(manifest())
        tell("owner")
        while line := await asyncio.to_thread(sys.stdin.readline):
            tell(str(await obey(storage, line)))


def tell(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
