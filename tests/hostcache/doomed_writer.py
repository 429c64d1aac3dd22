"""A worker process that reserves room, says so, and waits to be killed with the room in its hands.

python doomed_writer.py ADDRESS WORKER_ID
"""

from __future__ import annotations

import asyncio
import sys

from tests.hostcache.attached import prompt_of
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.wire.hostcache.arena_copy import UnitSource
from ferryman.wire.hostcache.attachment import HostCacheOptions
from ferryman.wire.hostcache.client import host_cache_client

MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)


def copy_forever(_room: memoryview) -> bytes:
    sys.stdout.write("writing\n")
    sys.stdout.flush()
    sys.stdin.read()
    return b""


async def take(_arena: memoryview) -> None:
    """Nothing is loaded here."""


async def main(address: str, worker_id: str) -> None:
    options = HostCacheOptions(address, worker_id, 1, call_seconds=5.0)
    prompt = prompt_of(MANIFEST, chain(5, 6), snapshots=[1])
    sources = [UnitSource(kind, page, copy_forever) for kind, page in prompt.names]
    async with host_cache_client(options, MANIFEST, take) as client:
        await client.attachment.attached()
        await client.store(prompt.keys, sources)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
