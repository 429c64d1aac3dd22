"""Media that fail: a miss or nothing stored, always reported, never an error to the caller."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.doubles.memory_blob_store import BlobMedium
from tests.hostcache.stored import (
    Bucket,
    Place,
    bytes_at,
    extents_at,
    opened,
    prompt_with,
    read_all,
)
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError, InvalidRequest, ManifestMismatch
from ferryman.tiers.storage_values import (
    NOTHING_STORED,
    OfferedUnit,
    StorageFailed,
    StorageSuspended,
    UnitRead,
)
from ferryman_hostcache.storage.blob_storage import MAX_FAILURES_IN_A_ROW
from ferryman_hostcache.storage.factory import StorageTier

HYBRID = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
PROMPT = prompt_with(HYBRID, chain(1, 2, 3, 4), snapshots=[1, 3])
OTHER = prompt_with(HYBRID, chain(5, 6, 7, 8), snapshots=[3])


class StorageClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def named(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*{suffix}"))


def failures(storage: StorageTier) -> list[tuple[str, str]]:
    effects = storage.drain_effects()
    return [(e.operation, e.error) for e in effects if isinstance(e, StorageFailed)]


async def test_a_full_disk_stores_nothing_and_serves_on(small_place: Place) -> None:
    async with opened(small_place) as storage:
        storage.attach(HYBRID)
        assert (await storage.store(PROMPT.keys, PROMPT.offers())).num_stored
        big = prompt_with(HYBRID, chain(*[9] * 60), snapshots=[59])
        used = storage.statistics().used_bytes
        stored = await storage.store(big.keys, big.offers())
        assert (stored.num_stored, stored.num_bytes) == (0, 0)
        assert failures(storage) == [("store", "ENOSPC")]
        assert storage.statistics().used_bytes == used, "what is not there is charged"
        assert bytes_at(small_place) == used, "a part was left behind"
        if isinstance(small_place, Path):
            assert not named(small_place, ".writing"), "a part was left behind"
        assert await read_all(storage, PROMPT) == PROMPT.units
        assert (await storage.store(OTHER.keys, OTHER.offers())).num_stored


@pytest.fixture
def closable(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder, and what takes the right to change it away, from root too."""
    folder = tmp_path / "storage"
    folder.mkdir()

    def close() -> None:
        if os.geteuid():
            folder.chmod(0o500)
        elif subprocess.run(["chattr", "+i", str(folder)], check=False).returncode:
            pytest.skip("needs a filesystem with immutable folders")

    yield folder, close
    subprocess.run(["chattr", "-i", str(folder)], check=False)
    folder.chmod(0o700)


async def test_a_folder_that_became_read_only_is_read_on(
    closable: tuple[Path, Callable[[], None]],
) -> None:
    folder, close = closable
    async with opened(folder) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        close()
        assert (await storage.store(OTHER.keys, OTHER.offers())).num_stored == 0
        assert failures(storage) in ([("store", "EPERM")], [("store", "EACCES")])
        assert await read_all(storage, PROMPT) == PROMPT.units
        assert storage.drop(Kind.FULL, PROMPT.keys[0]) == len(PROMPT.units)
        assert storage.lookup(PROMPT.keys).usable_pages == 0


async def test_a_folder_that_vanished_is_all_misses(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    async with opened(folder) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        shutil.rmtree(folder)
        assert await read_all(storage, PROMPT) == {}
        assert storage.lookup(PROMPT.keys).usable_pages == 0
        assert (await storage.store(OTHER.keys, OTHER.offers())).num_stored == 0
        assert {error for _, error in failures(storage)} == {"ENOENT"}
        assert storage.statistics().num_failures >= 2


async def test_nothing_is_written_to_a_folder_that_took_the_place_of_ours(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    async with opened(folder) as storage:
        storage.attach(HYBRID)
        await storage.store(OTHER.keys, OTHER.offers())
        folder.rename(tmp_path / "moved")
        async with opened(folder) as owner:
            owner.attach(HYBRID)
            assert (await storage.store(PROMPT.keys, PROMPT.offers())).num_stored == 0
            assert failures(storage) == [("store", "ESTALE")]
            assert (await owner.store(PROMPT.keys, PROMPT.offers())).num_stored


async def test_a_file_that_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        (path,) = named(tmp_path, ".extent")
        path.unlink()
        path.mkdir()
        assert await read_all(storage, PROMPT) == {}
        assert ("read", "EISDIR") in failures(storage)


def break_down(place: Place) -> None:
    """Everything fails as if it were gone, until `mend`."""
    if isinstance(place, BlobMedium):
        place.errors.update(put=errno.ENOENT, read=errno.ENOENT, punch=errno.ENOENT)
    elif isinstance(place, Bucket):
        gone = (404, "NoSuchBucket")
        place.faults.refusals.update(PUT=gone, GET=gone, HEAD=gone, DELETE=gone)
    else:
        assert isinstance(place, Path)
        shutil.move(place, place.with_name("away"))


def mend(place: Place) -> None:
    if isinstance(place, BlobMedium):
        assert place.num_failed["put"], "nothing failed"
        place.errors.clear()
    elif isinstance(place, Bucket):
        assert place.faults.num_met["PUT"], "nothing failed"
        place.faults.refusals.clear()
    else:
        assert isinstance(place, Path)
        shutil.move(place.with_name("away"), place)


async def test_after_failures_in_a_row_the_folder_is_left_alone(place: Place) -> None:
    clock = StorageClock()
    async with opened(place, clock=clock, rest_seconds=30.0) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        break_down(place)
        for _ in range(MAX_FAILURES_IN_A_ROW):
            assert not storage.statistics().is_resting
            await storage.store(OTHER.keys, OTHER.offers())
        effects = storage.drain_effects()
        assert effects[-1] == StorageSuspended(MAX_FAILURES_IN_A_ROW, 30.0)
        assert storage.statistics().is_resting
        assert storage.lookup(PROMPT.keys).usable_pages == 0
        assert storage.lease("reader", PROMPT.keys, PROMPT.units) == ()
        assert await storage.store(OTHER.keys, OTHER.offers()) == NOTHING_STORED
        mend(place)
        clock.now += 30.0
        assert await read_all(storage, PROMPT) == PROMPT.units
        assert (await storage.store(OTHER.keys, OTHER.offers())).num_stored


@pytest.mark.parametrize("success", ["read", "store"])
async def test_a_success_between_failures_keeps_the_folder_in_use(
    success: str, place: Place
) -> None:
    """Failures in a row are meant: a disk that works now and then is asked now and then."""
    async with opened(place, clock=StorageClock(), rest_seconds=30.0) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        for number in range(4):
            break_down(place)
            for _ in range(MAX_FAILURES_IN_A_ROW - 1):
                await storage.store(OTHER.keys, OTHER.offers())
            assert len(failures(storage)) == MAX_FAILURES_IN_A_ROW - 1
            mend(place)
            if success == "read":
                assert await read_all(storage, PROMPT) == PROMPT.units
            else:
                another = prompt_with(HYBRID, chain(100 + number), snapshots=[0])
                assert (await storage.store(another.keys, another.offers())).num_stored
            assert not storage.statistics().is_resting


@pytest.fixture(params=["memory", "s3"])
def slow_place(request: pytest.FixtureRequest) -> tuple[Place, threading.Event]:
    """A medium, and what its requests wait for."""
    if request.param == "memory":
        medium = BlobMedium()
        return medium, medium.is_quick
    bucket: Bucket = request.getfixturevalue("bucket")
    return bucket, bucket.faults.is_quick


async def test_a_slow_medium_is_waited_for_and_a_reader_that_gave_up_is_left_alone(
    slow_place: tuple[Place, threading.Event],
) -> None:
    place, is_quick = slow_place
    async with opened(place) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        units = storage.lease("reader", PROMPT.keys, PROMPT.units)
        reads = [UnitRead(unit, memoryview(bytearray(unit.num_bytes))) for unit in units]
        is_quick.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await storage.read(reads)
        assert storage.statistics().num_in_flight > 0, "nothing was slow"
        storage.release("reader")
        is_quick.set()
        assert await read_all(storage, PROMPT) == PROMPT.units
    assert not any(any(read.memory) for read in reads)


async def test_what_cannot_be_given_up_is_told_and_comes_back_at_most_whole() -> None:
    medium = BlobMedium()
    async with opened(medium) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        medium.errors["punch"] = errno.EIO
        assert storage.drop(Kind.RECURRENT, PROMPT.keys[3]) == 1
        await storage.store(OTHER.keys, OTHER.offers())
        assert medium.num_failed == {"punch": 1}
        assert failures(storage) == [("drop", "EIO")]
        assert set(await read_all(storage, PROMPT)) == set(PROMPT.units) - {(Kind.RECURRENT, 3)}
    async with opened(medium) as storage:
        storage.attach(HYBRID)
        assert await read_all(storage, PROMPT) == PROMPT.units


async def test_a_second_owner_is_refused(place: Place) -> None:
    async with opened(place):
        with pytest.raises(ConfigError, match="belongs to another host-cache"):
            async with opened(place):
                pass
    async with opened(place) as storage:
        storage.attach(HYBRID)


async def test_a_folder_that_cannot_be_made_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="storage folder"):
        async with opened(tmp_path / "file"):
            pass


async def test_bytes_that_are_not_those_of_their_digest_are_not_stored(place: Place) -> None:
    async with opened(place) as storage:
        storage.attach(HYBRID)
        offers = PROMPT.offers()
        first = offers[0]
        spoilt = memoryview(bytes(first.memory.nbytes))
        offers[0] = OfferedUnit(first.kind, first.page_index, spoilt, first.digest)
        assert (await storage.store(PROMPT.keys, offers)).num_stored == 0
        assert failures(storage) == [("store", "EBADMSG")]
        assert not extents_at(place)


async def test_a_unit_of_another_length_is_refused_at_the_door(place: Place) -> None:
    async with opened(place) as storage:
        storage.attach(HYBRID)
        offer = OfferedUnit(Kind.FULL, 0, memoryview(b"short"), b"0" * 16)
        with pytest.raises(InvalidRequest):
            await storage.store(PROMPT.keys, [offer])


async def test_another_model_cannot_attach_to_the_same_tier(place: Place) -> None:
    async with opened(place) as storage:
        storage.attach(HYBRID)
        storage.attach(HYBRID)
        with pytest.raises(ManifestMismatch):
            storage.attach(manifest_of(Kind.FULL))


async def test_a_reader_that_gives_up_finds_its_memory_untouched(place: Place) -> None:
    async with opened(place) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        units = storage.lease("reader", PROMPT.keys, PROMPT.units)
        reads = [UnitRead(unit, memoryview(bytearray(unit.num_bytes))) for unit in units]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await storage.read(reads)
        as_left = [bytes(read.memory) for read in reads]
    assert [bytes(read.memory) for read in reads] == as_left


async def test_a_store_whose_caller_gave_up_is_finished(place: Place) -> None:
    async with opened(place) as storage:
        storage.attach(HYBRID)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await storage.store(PROMPT.keys, PROMPT.offers())
        await storage.store(OTHER.keys, OTHER.offers())
        assert await read_all(storage, PROMPT) == PROMPT.units
        assert await read_all(storage, OTHER) == OTHER.units
