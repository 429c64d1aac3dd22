"""The thread that writes a file takes breaks, as long as nothing else waits to be written."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import xxhash

from ferryman.tiers.extents import ALIGNMENT
from ferryman.tiers.storage_values import BlobPart
from ferryman_hostcache.storage.file_blob_store import PIECE_BYTES, FileBlobStore
from ferryman_hostcache.storage.write_breaks import BREAK, LONGEST_SECONDS, WriteBreaks

SIZES = (PIECE_BYTES // 2, 2 * PIECE_BYTES + ALIGNMENT)
TICK = LONGEST_SECONDS / (2 * BREAK)


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
    assert set(breaks_of_a_put(tmp_path, 10.0, is_behind=False)) == {LONGEST_SECONDS}


def test_there_are_no_breaks_while_other_units_wait(tmp_path: Path) -> None:
    assert breaks_of_a_put(tmp_path, TICK, is_behind=True) == []


def test_breaks_end_with_the_process() -> None:
    breaks = WriteBreaks(lambda: False, clock=count().__next__)
    breaks.end()
    for _ in range(1000):  # 50 s of breaks otherwise
        with breaks.piece():
            pass
