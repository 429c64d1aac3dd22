"""kill -9 of a process that stores: what the next life finds is whole.

200 by hand: `python -m tests.hostcache.test_storage_kills 200` in the repository.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster_keys import STORED
from tests.hostcache import doomed_storage
from tests.hostcache.stored import (
    Bucket,
    Place,
    bytes_of,
    content_at,
    extents_at,
    opened,
    remove_at,
)

from ferryman.cache.keys import PageKey
from ferryman.tiers.storage_values import FoundExtent, StorageFailed, UnitCorrupt, UnitRead
from ferryman_hostcache.storage.extent import generation_of, header_from_bytes
from ferryman_hostcache.storage.factory import StorageTier
from ferryman_hostcache.storage.object_owner import OWNER_NAME

HYBRID = doomed_storage.HYBRID


@contextmanager
def nursery(place: Place) -> Iterator[subprocess.Popen[str]]:
    where = place.url if isinstance(place, Bucket) else str(place)
    command = [sys.executable, "-m", doomed_storage.__name__, where]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def live_and_die(process: subprocess.Popen[str], seed: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{seed}\n")
    process.stdin.flush()
    assert int(process.stdout.readline()) == signal.SIGKILL


async def check_what_is_left(place: Place) -> Counter[str]:
    """Every unit that the next life shows is read, and is what it should be."""
    unfinished = unfinished_at(place)
    if isinstance(place, Bucket) and content_at(place, OWNER_NAME) is not None:
        remove_at(place, OWNER_NAME)  # its owner is dead for sure: nobody needs to wait for that
    async with opened(place, capacity_bytes=doomed_storage.CAPACITY_BYTES) as storage:
        storage.attach(HYBRID)
        counts = storage.statistics()
        assert counts.num_removed_at_start == len(unfinished), "a file with its name was not whole"
        assert counts.used_bytes <= doomed_storage.CAPACITY_BYTES
        num_units = await check_every_unit(storage, place)
        effects = storage.drain_effects()
        assert not [e for e in effects if isinstance(e, (UnitCorrupt, StorageFailed))]
    assert not unfinished_at(place)
    return Counter(units=num_units, extents=counts.num_extents, unfinished=len(unfinished))


def unfinished_at(place: Place) -> list[Path]:
    return sorted(place.glob("*.writing")) if isinstance(place, Path) else []


async def check_every_unit(storage: StorageTier, place: Place) -> int:
    found = set()
    for keys in chains_at(place):
        names = [(kind, page) for kind in HYBRID.kinds for page in range(len(keys))]
        units = storage.lease("look", keys, names)
        storage.release("look")
        reads = [UnitRead(unit, memoryview(bytearray(unit.num_bytes))) for unit in units]
        assert set(await storage.read(reads)) == set(units)
        for read in reads:
            unit = read.unit
            assert bytes(read.memory) == bytes_of(HYBRID, unit.kind, unit.key)
        found |= {(unit.kind, unit.key) for unit in units}
    assert found == {(unit.kind, unit.key) for unit in storage.holdings()}
    return len(found)


def chains_at(place: Place) -> set[Sequence[PageKey]]:
    """The keys in every extent. One that goes meanwhile, because the extent that the dead process
    had not yet counted leaves it no room, is in nobody's holdings."""
    contents = {name: content_at(place, name) for name in extents_at(place)}
    return {scanned(name, bytes(data)).keys for name, data in contents.items() if data is not None}


def scanned(name: str, data: bytes) -> FoundExtent:
    return header_from_bytes(data, STORED, generation=generation_of(name), file_bytes=len(data))


async def kill(place: Place, times: int) -> Counter[str]:
    found: Counter[str] = Counter()
    with nursery(place) as process:
        for seed in range(times):
            live_and_die(process, seed)
            found += await check_what_is_left(place)
    return found


async def test_what_a_killed_process_leaves_is_whole(tmp_path: Path) -> None:
    found = await kill(tmp_path, 20)
    assert found["units"] > 0


async def test_what_a_killed_process_leaves_in_a_bucket_is_whole(bucket: Bucket) -> None:
    found = await kill(bucket, 4)
    assert found["units"] > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(asyncio.run(kill(Path(name), int(sys.argv[1]))))  # noqa: T201
