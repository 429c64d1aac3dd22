"""Another node's extents read where they lie: the bytes stored, or a miss the index hears of."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from tests.cluster_keys import STORED, STRANGERS_STORED
from tests.doubles.memory_blob_store import BlobMedium
from tests.doubles.memory_index import MemoryIndex
from tests.hostcache.corruptions import CORRUPTIONS
from tests.hostcache.stored import StoredChain, content_at, opened, prompt_with
from tests.hostcache.test_storage_corruption import HYBRID, Spoiler
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind, ResumeShape, StateManifest
from ferryman.cache.units import Tier
from ferryman.security.cluster_key import MacKey
from ferryman.settings.hostcache import StorageSettings
from ferryman.tiers.extents import DropUnit
from ferryman.tiers.storage_values import UnitRead
from ferryman.tiers.values import StoredUnit, UnitName
from ferryman.wire.redis.bucket_folders import BucketFolder
from ferryman.wire.redis.index import IndexedUnit
from ferryman_hostcache import folder_headers, shared_folders
from ferryman_hostcache.shared_folders import FolderView, SharedFolders
from ferryman_hostcache.storage.blob_storage import MAX_FAILURES_IN_A_ROW
from ferryman_hostcache.storage.extent import dead_ranges, extent_name
from ferryman_hostcache.storage.factory import StorageTier

ONE, TWO = (BucketFolder("0" * 16, name) for name in ("one", "two"))
LIFE = ONE.life(1)
PROMPT = prompt_with(HYBRID, chain(1, 2, 3, 4), snapshots=[1, 3])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a header takes its time."""
    monkeypatch.setattr(folder_headers, "LOOKUP_SECONDS", 120.0)


@dataclass
class MediumReader:
    """Reads the blobs of a medium whose owner is another. `before` hears of each read."""

    medium: BlobMedium
    error: int = 0
    reads: list[str] = field(default_factory=list)
    before: Callable[[int], None] = lambda number: None

    def read(self, name: str, begin: int, into: memoryview) -> int:
        self.reads.append(name)
        self.before(len(self.reads))
        number = self.error or (0 if name in self.medium.blobs else errno.ENOENT)
        if number:
            raise OSError(number, os.strerror(number))
        found = self.medium.blobs[name].content[begin : begin + len(into)]
        into[: len(found)] = found
        return len(found)


class FolderScene:
    """Node one has stored in its folder, and has told the index; node two reads."""

    def __init__(self) -> None:
        self.medium, self.index = BlobMedium(), MemoryIndex()
        self.reader = MediumReader(self.medium)

    async def tell(self, storage: StorageTier) -> None:
        """As the publisher of node one does."""
        await self.index.claim(LIFE, 60.0)
        for unit in storage.holdings():
            entry = IndexedUnit(unit.kind, unit.key, unit.num_bytes, unit.digest, unit.generation)
            await self.index.commit(LIFE, unit.root, Tier.STORAGE, [entry])

    @asynccontextmanager
    async def folders(self, key: MacKey = STORED) -> AsyncIterator[SharedFolders]:
        settings, clock = StorageSettings(), asyncio.get_running_loop().time
        found = SharedFolders(TWO, lambda name: self.reader, self.index, key, settings, clock)
        try:
            yield found
        finally:
            await asyncio.to_thread(found.close)

    async def named(self, prompt: StoredChain) -> set[UnitName]:
        """The units that the index still says to be there."""
        units = {(kind, prompt.keys[page]): (kind, page) for kind, page in prompt.units}
        found = await self.index.stored_units(LIFE, prompt.keys[0], list(units))
        return {units[unit] for unit in found}


@pytest.fixture
def scene() -> FolderScene:
    return FolderScene()


@asynccontextmanager
async def stored(scene: FolderScene, *prompts: StoredChain) -> AsyncIterator[StorageTier]:
    async with opened(scene.medium) as storage:
        storage.attach(HYBRID)
        for prompt in prompts or (PROMPT,):
            assert (await storage.store(prompt.keys, prompt.offers())).num_stored
        await scene.tell(storage)
        yield storage


async def view_of(
    folders: SharedFolders, prompt: StoredChain = PROMPT, manifest: StateManifest = HYBRID
) -> FolderView:
    return await folders.lookup(LIFE, prompt.keys, manifest)


async def bytes_in(folders: SharedFolders, view: FolderView) -> dict[UnitName, bytes]:
    """The bytes of all that a view shows and that can be read; the memory of others stays as it
    was."""
    reads = [
        UnitRead(unit, memoryview(bytearray(b"\xee" * unit.num_bytes)))
        for unit in view.units.values()
    ]
    brought = set(await folders.read(view, reads))
    assert all(
        bytes(read.memory) == b"\xee" * read.unit.num_bytes
        for read in reads
        if read.unit not in brought
    )
    return {_name(read.unit): bytes(read.memory) for read in reads if read.unit in brought}


def _name(unit: StoredUnit) -> UnitName:
    return unit.kind, unit.page_index


async def test_every_unit_is_read_as_it_was_stored_and_a_header_once(scene: FolderScene) -> None:
    async with stored(scene), scene.folders() as folders:
        for _ in range(2):
            assert await bytes_in(folders, await view_of(folders)) == PROMPT.units
        counts = folders.statistics()
        assert (counts.num_headers, counts.num_gone, counts.num_failures) == (1, 0, 0)
        assert counts.num_units == 2 * len(PROMPT.units)
        assert counts.num_bytes == 2 * sum(map(len, PROMPT.units.values()))


async def test_the_owner_may_be_gone(scene: FolderScene) -> None:
    async with stored(scene):
        pass
    async with scene.folders() as folders:
        assert await bytes_in(folders, await view_of(folders)) == PROMPT.units


@pytest.mark.parametrize("is_known", [True, False], ids=["behind its header", "before it"])
@pytest.mark.parametrize("name", CORRUPTIONS)
async def test_a_spoilt_unit_of_another_node_is_a_miss(
    name: str, is_known: bool, scene: FolderScene
) -> None:
    rng = random.Random(name)
    async with opened(scene.medium) as storage, scene.folders() as folders:
        storage.attach(HYBRID)
        spoiler = Spoiler(scene.medium, storage, rng)
        for _ in range(3):
            prompt, stranger = rng.sample(spoiler.prompts, 2)
            spoilt = await spoiler.scene(prompt, stranger)
            await scene.tell(storage)
            view = await view_of(folders, prompt) if is_known else None
            before = spoilt.file(spoilt.unit)
            CORRUPTIONS[name](spoilt)
            left = content_at(scene.medium, extent_name(spoilt.unit.generation))
            assert left != before, "nothing was spoilt"
            found = await bytes_in(folders, view or await view_of(folders, prompt))
            assert _name(spoilt.unit) not in found
            assert _name(spoilt.unit) not in await scene.named(prompt)
            assert found.items() <= prompt.units.items(), "other bytes than were stored"
        assert folders.statistics().num_gone > 0
        assert folders.statistics().num_failures == 0, "it is no failure of the medium"


@pytest.mark.parametrize("at", [1, 2, 3], ids=["header", "entries", "bytes"])
@pytest.mark.parametrize("is_whole", [True, False], ids=["removed", "one unit dropped"])
async def test_the_owner_drops_while_another_node_reads(
    at: int, is_whole: bool, scene: FolderScene
) -> None:
    """Before the header is read, before the entries of the neighbours, before their bytes."""
    async with stored(scene), scene.folders() as folders:
        name = extent_name(next(iter((await view_of(folders)).units.values())).generation)
        gone = (await view_of(folders)).units[Kind.FULL, 1]
        scene.reader.reads.clear()
        drop = DropUnit(gone.generation, gone.index, gone.offset, gone.num_bytes)

        def before(number: int) -> None:
            if number == at and is_whole:
                del scene.medium.blobs[name]
            elif number == at:
                for hole in dead_ranges(drop):
                    scene.medium.blobs[name].punch(*hole)

        scene.reader.before = before
        async with scene.folders() as anew:
            brought = await bytes_in(anew, await view_of(anew))
            assert len(scene.reader.reads) >= at, "nothing was dropped"
            left = set() if is_whole else set(PROMPT.units) - {_name(gone)}
            assert brought == {unit: PROMPT.units[unit] for unit in left}
            assert await scene.named(PROMPT) == left
            assert anew.statistics().num_gone == len(PROMPT.units) - len(left)
            assert anew.statistics().num_failures == 0


async def test_a_reader_gets_what_was_stored_or_nothing_while_the_owner_evicts(
    scene: FolderScene,
) -> None:
    """The index hears of what is stored, and never of what is evicted, but from the reader."""
    rng = random.Random(7)
    prompts = [prompt_with(HYBRID, chain(n, 2, 3, 4), snapshots=[1, 3]) for n in range(40)]
    num_found, is_over = 0, False

    async def own(storage: StorageTier) -> None:
        nonlocal is_over
        for prompt in rng.choices(prompts, k=150):
            await storage.store(prompt.keys, prompt.offers())
            await scene.tell(storage)
        is_over = True

    async def read(folders: SharedFolders, prompt: StoredChain) -> None:
        nonlocal num_found
        found = await bytes_in(folders, await view_of(folders, prompt))
        assert found.items() <= prompt.units.items(), "other bytes than were stored"
        num_found += len(found)

    async def read_on(folders: SharedFolders) -> None:
        while not is_over:
            await read(folders, rng.choice(prompts))
            await asyncio.sleep(0)

    async with opened(scene.medium, capacity_bytes=1 << 20) as storage, scene.folders() as folders:
        storage.attach(HYBRID)
        async with asyncio.TaskGroup() as group:
            group.create_task(own(storage))
            for _ in range(2):
                group.create_task(read_on(folders))
        for prompt in prompts:  # each once more, however far the tasks came
            await read(folders, prompt)
    counts = folders.statistics()
    assert num_found > 0
    assert counts.num_gone > 0, "nothing was evicted under the reader"
    assert counts.num_refused == counts.num_failures == 0


async def test_objects_of_another_cluster_are_not_read(scene: FolderScene) -> None:
    async with stored(scene), scene.folders(STRANGERS_STORED) as folders:
        assert not (await view_of(folders)).units
        assert folders.statistics().num_refused == 1


async def test_units_of_another_model_are_not_read(scene: FolderScene) -> None:
    other = manifest_of(*HYBRID.kinds, fingerprint="another model")
    async with stored(scene), scene.folders() as folders:
        assert not (await view_of(folders, manifest=other)).units
        assert folders.statistics().num_headers == 1


async def test_entries_that_come_late_or_twice_or_are_wrong_do_no_harm(scene: FolderScene) -> None:
    async with opened(scene.medium) as storage, scene.folders() as folders:
        storage.attach(HYBRID)
        other = prompt_with(HYBRID, chain(9, 8, 7), snapshots=[2])
        for prompt in (PROMPT, other):
            await storage.store(prompt.keys, prompt.offers())
        assert not (await view_of(folders)).units, "the index says nothing yet"
        assert not scene.reader.reads
        for _ in range(2):
            await scene.tell(storage)
        assert await bytes_in(folders, await view_of(folders)) == PROMPT.units
        (wrong,) = {unit.generation for unit in (await view_of(folders, other)).units.values()}
        unit = (Kind.FULL, PROMPT.keys[2])
        for generation in (wrong, 1 << 40):  # another prompt's extent, and one that never was
            entry = IndexedUnit(*unit, 1, b"f" * 16, generation)
            await scene.index.commit(LIFE, PROMPT.keys[0], Tier.STORAGE, [entry])
            view = await view_of(folders)
            assert set(view.units) == set(PROMPT.units) - {(Kind.FULL, 2)}
            assert (Kind.FULL, 2) not in await scene.named(PROMPT)
        entry = replace(entry, generation=view.units[Kind.FULL, 1].generation)
        await scene.index.commit(LIFE, PROMPT.keys[0], Tier.STORAGE, [entry])
        assert await bytes_in(folders, await view_of(folders)) == PROMPT.units, (
            "size and digest are those of the header"
        )


async def test_a_bucket_that_refuses_is_left_alone_and_nothing_is_forgotten(
    scene: FolderScene,
) -> None:
    async with stored(scene), scene.folders() as folders:
        view = await view_of(folders)
        scene.reader.error = errno.EACCES
        found = (await scene.index.usable_pages(PROMPT.keys, ResumeShape.of(HYBRID))).values()
        assert folders.better(found, 0) == [LIFE]
        for _ in range(MAX_FAILURES_IN_A_ROW):
            assert await bytes_in(folders, view) == {}
        counts = folders.statistics()
        assert counts.is_resting
        assert counts.num_failures >= MAX_FAILURES_IN_A_ROW
        assert counts.num_gone == 0
        assert await scene.named(PROMPT) == set(PROMPT.units)
        assert folders.better(found, 0) == []


async def test_so_many_headers_are_read_for_one_prompt_and_the_next_one_reads_more(
    scene: FolderScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [prompt_with(HYBRID, PROMPT.keys[:depth], [depth - 1]) for depth in (1, 2, 3, 4)]
    monkeypatch.setattr(folder_headers, "MAX_HEADERS", 2)
    async with stored(scene, *turns), scene.folders() as folders:
        assert len(scene.medium.blobs) == 5, "an extent a turn, and the manifest"
        seen: Sequence[int] = [len((await view_of(folders, turns[3])).pages[Kind.FULL])]
        assert seen == [2]
        assert folders.statistics().num_headers == 2
        assert len((await view_of(folders, turns[3])).pages[Kind.FULL]) == 4
    monkeypatch.setattr(shared_folders, "MAX_UNITS", 3)
    async with scene.folders() as folders:
        assert len((await view_of(folders, turns[3])).units) <= 3


async def test_a_folder_that_is_no_deeper_is_not_asked(scene: FolderScene) -> None:
    async with stored(scene), scene.folders() as folders:
        found = (await scene.index.usable_pages(PROMPT.keys, ResumeShape.of(HYBRID))).values()
        assert folders.better(found, 3) == [LIFE]
        assert folders.better(found, 4) == []
