"""The thread that writes a file takes breaks, as long as nothing else waits to be written."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import xxhash
from tests.hostcache.attached import prompt_of, until_stored
from tests.hostcache.conftest import StartHostCache
from tests.hostcache.stored import opened
from tests.hostcache.test_prefetch_runner import node
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.tiers.extents import ALIGNMENT
from ferryman.tiers.storage_values import BlobPart
from ferryman_hostcache.storage.file_blob_store import PIECE_BYTES, FileBlobStore
from ferryman_hostcache.storage.threads import WriterThread
from ferryman_hostcache.storage.write_breaks import (
    BREAK,
    FILE_SECONDS,
    LONGEST_SECONDS,
    NO_BREAKS,
    WriteBreaks,
)

SIZES = (PIECE_BYTES // 2, 2 * PIECE_BYTES + ALIGNMENT)
TICK = FILE_SECONDS / (10 * BREAK)
MANIFEST = manifest_of(Kind.FULL)


def parts() -> list[BlobPart]:
    offset, made = 0, []
    for number, size in enumerate(SIZES, start=1):
        content = bytes([number]) * size
        made.append(BlobPart(offset, memoryview(content), xxhash.xxh3_128_digest(content)))
        offset += size
    return made


def breaks_of_a_put(folder: Path, tick: float, *, is_behind: bool) -> list[float]:
    """The breaks of one file whose pieces take a tick each."""
    breaks: list[float] = []
    ticks = count()
    made = WriteBreaks(lambda: is_behind, clock=lambda: tick * next(ticks), wait=breaks.append)
    store = FileBlobStore(folder, made)
    store.put("blob", sum(SIZES), parts())
    read = memoryview(bytearray(sum(SIZES)))
    assert store.read("blob", 0, read) == sum(SIZES)
    assert bytes(read) == b"".join(bytes(part.memory) for part in parts())
    store.close()
    return breaks


def test_a_break_follows_each_piece_that_is_written_or_read_back(tmp_path: Path) -> None:
    """One piece and three, the sync, and both parts once more to be compared."""
    breaks = breaks_of_a_put(tmp_path, TICK, is_behind=False)
    assert len(breaks) == 1 + 3 + 1 + 2
    assert all(abs(seconds - BREAK * TICK) < TICK for seconds in breaks)


def test_a_break_has_an_end_however_long_its_piece_took(tmp_path: Path) -> None:
    assert max(breaks_of_a_put(tmp_path, 10.0, is_behind=False)) == LONGEST_SECONDS


def test_the_breaks_of_a_file_have_an_end_however_large_it_is(tmp_path: Path) -> None:
    """Its units keep their slots until it is written. The next file has breaks again."""
    breaks: list[float] = []
    made = WriteBreaks(lambda: False, clock=map(float, count()).__next__, wait=breaks.append)
    store = FileBlobStore(tmp_path, made)
    for number in (1, 2):
        store.put(f"blob-{number}", sum(SIZES), parts())
        assert sum(breaks) == pytest.approx(number * FILE_SECONDS)
    store.close()


def test_there_are_no_breaks_while_other_units_wait(tmp_path: Path) -> None:
    assert breaks_of_a_put(tmp_path, TICK, is_behind=True) == []


def test_breaks_end_with_the_process() -> None:
    breaks = WriteBreaks(lambda: False, clock=count().__next__)
    breaks.end()
    for _ in range(1000):  # 50 s of breaks otherwise
        with breaks.of_one_file().piece():
            pass


async def test_who_made_the_breaks_ends_them_before_the_writer_is_waited_for(
    start_host_cache: StartHostCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    end, close = WriteBreaks.end, WriterThread.close

    def ending(breaks: WriteBreaks) -> None:
        events.append(breaks)
        end(breaks)

    def closing(writer: WriterThread) -> None:
        events.append("waits")
        close(writer)

    monkeypatch.setattr(WriteBreaks, "end", ending)
    monkeypatch.setattr(WriterThread, "close", closing)
    async with opened(tmp_path / "by itself"):
        pass
    assert events == ["waits"]  # the constant is everybody's
    async with node(start_host_cache, "one", tmp_path / "served", MANIFEST) as (service, worker):
        prompt = prompt_of(MANIFEST, chain(1, 2, 3))
        await worker.client.store(prompt.keys, prompt.sources)
        await until_stored(service, prompt)
    ended, waits = events[1:]
    assert isinstance(ended, WriteBreaks)
    assert ended is not NO_BREAKS
    assert waits == "waits"
