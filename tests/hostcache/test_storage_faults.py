"""Folders that fail: always a miss or nothing stored, always told, never an error to the caller."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hostcache.stored import opened, prompt_with, read_all
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError, InvalidRequest, ManifestMismatch
from ferryman.tiers.storage_values import NOTHING_STORED, StorageFailed, StorageRests
from ferryman_hostcache.storage.folder_storage import MAX_FAILURES_IN_A_ROW
from ferryman_hostcache.storage.tier import OfferedUnit, StorageTier, UnitRead

HYBRID = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
PROMPT = prompt_with(HYBRID, chain(1, 2, 3, 4), snapshots=[1, 3])
OTHER = prompt_with(HYBRID, chain(5, 6, 7, 8), snapshots=[3])


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def named(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*{suffix}"))


def failures(storage: StorageTier) -> list[tuple[str, str]]:
    effects = storage.drain_effects()
    return [(e.operation, e.error) for e in effects if isinstance(e, StorageFailed)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 128 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs the right to mount a small filesystem")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_stores_nothing_and_serves_on(small_disk: Path) -> None:
    async with opened(small_disk) as storage:
        storage.attach(HYBRID)
        assert (await storage.store(PROMPT.keys, PROMPT.offers())).num_stored
        big = prompt_with(HYBRID, chain(*[9] * 60), snapshots=[59])
        used = storage.statistics().used_bytes
        stored = await storage.store(big.keys, big.offers())
        assert (stored.num_stored, stored.num_bytes) == (0, 0)
        assert failures(storage) == [("store", "ENOSPC")]
        assert storage.statistics().used_bytes == used, "what is not there is charged"
        assert not named(small_disk, ".writing"), "a part was left behind"
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


async def test_after_failures_in_a_row_the_folder_is_left_alone(tmp_path: Path) -> None:
    folder, clock = tmp_path / "storage", Clock()
    async with opened(folder, clock=clock, rest_seconds=30.0) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        shutil.move(folder, tmp_path / "away")
        for _ in range(MAX_FAILURES_IN_A_ROW):
            assert not storage.statistics().is_resting
            await storage.store(OTHER.keys, OTHER.offers())
        effects = storage.drain_effects()
        assert effects[-1] == StorageRests(MAX_FAILURES_IN_A_ROW, 30.0)
        assert storage.statistics().is_resting
        assert storage.lookup(PROMPT.keys).usable_pages == 0
        assert storage.lease("reader", PROMPT.keys, PROMPT.units) == ()
        assert await storage.store(OTHER.keys, OTHER.offers()) == NOTHING_STORED
        shutil.move(tmp_path / "away", folder)
        clock.now += 30.0
        assert await read_all(storage, PROMPT) == PROMPT.units
        assert (await storage.store(OTHER.keys, OTHER.offers())).num_stored


async def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(ConfigError, match="belongs to another host-cache"):
            async with opened(tmp_path):
                pass
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)


async def test_a_folder_that_cannot_be_made_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="storage folder"):
        async with opened(tmp_path / "file"):
            pass


async def test_bytes_that_are_not_those_of_their_digest_are_not_stored(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        offers = PROMPT.offers()
        first = offers[0]
        spoilt = memoryview(bytes(first.memory.nbytes))
        offers[0] = OfferedUnit(first.kind, first.page_index, spoilt, first.digest)
        assert (await storage.store(PROMPT.keys, offers)).num_stored == 0
        assert failures(storage) == [("store", "EBADMSG")]
        assert not named(tmp_path, ".extent")


async def test_a_unit_of_another_length_is_refused_at_the_door(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        offer = OfferedUnit(Kind.FULL, 0, memoryview(b"short"), b"0" * 16)
        with pytest.raises(InvalidRequest):
            await storage.store(PROMPT.keys, [offer])


async def test_another_model_cannot_attach_to_the_same_tier(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        storage.attach(HYBRID)
        with pytest.raises(ManifestMismatch):
            storage.attach(manifest_of(Kind.FULL))


async def test_a_reader_that_gives_up_finds_its_memory_untouched(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        units = storage.lease("reader", PROMPT.keys, PROMPT.units)
        reads = [UnitRead(unit, memoryview(bytearray(unit.num_bytes))) for unit in units]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await storage.read(reads)
        as_left = [bytes(read.memory) for read in reads]
    assert [bytes(read.memory) for read in reads] == as_left


async def test_a_store_whose_caller_gave_up_is_finished(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await storage.store(PROMPT.keys, PROMPT.offers())
        await storage.store(OTHER.keys, OTHER.offers())
        assert await read_all(storage, PROMPT) == PROMPT.units
        assert await read_all(storage, OTHER) == OTHER.units
