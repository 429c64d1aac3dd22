"""The contract of every medium of the storage tier: the same tests over all of them.

A new one is added to the fixtures `place` and `small_place` of `conftest.py`, and to each
function of `stored.py` that takes a `Place`.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest
import xxhash
from tests.hostcache.stored import Place, blobs_at, has_holes

from ferryman.errors import ConfigError
from ferryman.tiers.extents import ALIGNMENT
from ferryman.tiers.storage_values import BlobPart
from ferryman_hostcache.storage.blob_store import AlignedBuffer, BlobStore

NAME = "0000000000000001.extent"
OTHER = "0000000000000002.extent"
WAIT_SECONDS = 30.0


@pytest.fixture
def blobs(place: Place) -> Iterator[BlobStore]:
    with closing(blobs_at(place)) as opened:
        yield opened


def part(offset: int, content: bytes) -> BlobPart:
    return BlobPart(offset, memoryview(content), xxhash.xxh3_128_digest(content))


def put(blobs: BlobStore, name: str, content: bytes) -> None:
    blobs.put(name, len(content), [part(0, content)])


def random_bytes(num_bytes: int, seed: int = 7) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def read(blobs: BlobStore, name: str, begin: int, num_bytes: int) -> bytes:
    """Into memory that is aligned for nothing."""
    into = memoryview(bytearray(num_bytes + 1))[1:]
    return bytes(into[: blobs.read(name, begin, into)])


def whole(blobs: BlobStore, name: str) -> bytes:
    return read(blobs, name, 0, blobs.scan()[name])


def test_parts_are_read_back_with_zeros_between_them_in_this_life_and_the_next(
    place: Place,
) -> None:
    first, second = random_bytes(100), random_bytes(5000, seed=8)
    expected = (first.ljust(ALIGNMENT, b"\0") + second).ljust(3 * ALIGNMENT, b"\0")
    with closing(blobs_at(place)) as blobs:
        blobs.put(NAME, len(expected), [part(0, first), part(ALIGNMENT, second)])
        assert whole(blobs, NAME) == expected
    with closing(blobs_at(place)) as blobs:
        assert blobs.scan() == {NAME: len(expected)}
        assert whole(blobs, NAME) == expected


@pytest.mark.parametrize("length", [1, ALIGNMENT - 1, ALIGNMENT, 5 * ALIGNMENT + 17])
def test_any_range_is_read_and_a_read_ends_with_the_blob(blobs: BlobStore, length: int) -> None:
    content, rng, buffer = random_bytes(length), random.Random(length), AlignedBuffer()
    put(blobs, NAME, content)
    for _ in range(30):
        begin, num_bytes = rng.randrange(length + 9), rng.randrange(1, 2 * length + 2)
        expected = content[begin : begin + num_bytes]
        assert read(blobs, NAME, begin, num_bytes) == expected
        assert bytes(buffer.read(partial(blobs.read, NAME), begin, num_bytes)) == expected


def test_a_name_unknown_cannot_be_read_and_is_fine_to_give_up(blobs: BlobStore) -> None:
    with pytest.raises(OSError) as failed:  # noqa: PT011
        read(blobs, NAME, 0, 10)
    assert failed.value.errno == errno.ENOENT
    blobs.delete(NAME)
    blobs.punch(NAME, [(0, ALIGNMENT)])
    assert blobs.scan() == {}


@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_part_that_is_not_what_its_digest_says_leaves_nothing(
    blobs: BlobStore, spoilt: int
) -> None:
    parts = [part(0, random_bytes(100)), part(ALIGNMENT, random_bytes(100))]
    wrong = memoryview(bytes(100))
    parts[spoilt] = BlobPart(parts[spoilt].offset, wrong, parts[spoilt].digest)
    with pytest.raises(OSError) as failed:  # noqa: PT011
        blobs.put(NAME, 2 * ALIGNMENT, parts)
    assert failed.value.errno == errno.EBADMSG
    assert blobs.scan() == {}
    assert blobs.statistics().used_bytes == 0


def test_a_blob_takes_the_place_of_the_one_that_had_its_name(blobs: BlobStore) -> None:
    put(blobs, NAME, random_bytes(3 * ALIGNMENT))
    put(blobs, NAME, b"shorter")
    assert whole(blobs, NAME) == b"shorter"
    assert blobs.statistics().num_blobs == 1


def test_what_is_punched_is_zeros_and_takes_no_room_and_the_rest_stays(place: Place) -> None:
    content = bytearray(random_bytes(4 * ALIGNMENT))
    freed = 2 * ALIGNMENT if has_holes(place) else 0
    with closing(blobs_at(place)) as blobs:
        put(blobs, NAME, bytes(content))
        used = blobs.statistics().used_bytes
        blobs.punch(NAME, [(77, 1), (ALIGNMENT, 2 * ALIGNMENT)])
        content[77:78] = b"\0"
        content[ALIGNMENT : 3 * ALIGNMENT] = bytes(2 * ALIGNMENT)
        assert whole(blobs, NAME) == content
        assert blobs.scan() == {NAME: 4 * ALIGNMENT}
        assert blobs.statistics().used_bytes == used - freed
        blobs.punch(NAME, [(ALIGNMENT, 2 * ALIGNMENT)])
        assert blobs.statistics().used_bytes == used - freed
    with closing(blobs_at(place)) as blobs:
        assert whole(blobs, NAME) == content


def test_what_is_deleted_is_gone_in_the_next_life_too(place: Place) -> None:
    with closing(blobs_at(place)) as blobs:
        put(blobs, NAME, b"one")
        put(blobs, OTHER, b"two")
        blobs.delete(NAME)
        assert blobs.scan() == {OTHER: 3}
    with closing(blobs_at(place)) as blobs:
        assert blobs.scan() == {OTHER: 3}


def test_a_blob_that_finds_no_room_leaves_nothing_and_the_others_whole(small_place: Place) -> None:
    with closing(blobs_at(small_place)) as blobs:
        put(blobs, NAME, b"one")
        with pytest.raises(OSError) as failed:  # noqa: PT011
            put(blobs, OTHER, random_bytes(256 << 10))
        assert failed.value.errno == errno.ENOSPC
        assert blobs.scan() == {NAME: 3}
        put(blobs, OTHER, random_bytes(16 << 10))
        assert (whole(blobs, NAME), whole(blobs, OTHER)) == (b"one", random_bytes(16 << 10))


def test_blobs_have_one_owner(place: Place) -> None:
    with closing(blobs_at(place)), pytest.raises(ConfigError, match="belongs to another"):
        blobs_at(place)
    blobs_at(place).close()


class WatchedParts(list[BlobPart]):
    """Parts that look at what is there whenever a blob store has taken one."""

    def __init__(self, parts: list[BlobPart], blobs: BlobStore) -> None:
        super().__init__(parts)
        self.blobs, self.seen = blobs, list[dict[str, bytes]]()

    def __iter__(self) -> Iterator[BlobPart]:
        for each in super().__iter__():
            yield each
            self.seen.append({name: whole(self.blobs, name) for name in self.blobs.scan()})


def test_a_blob_is_not_visible_before_all_of_it_is_put(blobs: BlobStore) -> None:
    parts = [part(n * ALIGNMENT, random_bytes(ALIGNMENT, seed=n)) for n in range(4)]
    watched = WatchedParts(parts, blobs)
    blobs.put(NAME, 4 * ALIGNMENT, watched)
    assert watched.seen, "the parts were never looked at"
    assert not any(watched.seen)
    assert whole(blobs, NAME) == b"".join(each.memory for each in parts)


def test_threads_that_look_while_blobs_are_put_find_whole_ones(blobs: BlobStore) -> None:
    contents = {f"{n:016x}.extent": random_bytes(9 * ALIGNMENT, seed=n) for n in range(24)}
    is_over, has_looked = threading.Event(), threading.Event()

    def look() -> int:
        num_seen = 0
        while not is_over.is_set():
            for name in blobs.scan():
                assert whole(blobs, name) == contents[name]
                num_seen += 1
            has_looked.set()
        return num_seen

    with ThreadPoolExecutor(2) as threads:
        looking = [threads.submit(look) for _ in range(2)]
        try:
            for name, content in contents.items():
                put(blobs, name, content)
                has_looked.clear()
                assert has_looked.wait(WAIT_SECONDS)
        finally:
            is_over.set()
        assert all(each.result() > 0 for each in looking)
    assert set(blobs.scan()) == set(contents)


@pytest.mark.parametrize("seed", range(3))
def test_after_any_operations_the_blobs_are_those_of_a_dictionary(place: Place, seed: int) -> None:
    rng, expected = random.Random(seed), dict[str, bytearray]()
    blobs = blobs_at(place)
    for step in range(80):
        name = f"{rng.randrange(4)}.extent"
        match rng.choice(["put", "put", "punch", "punch", "delete", "reopen"]):
            case "put":
                expected[name] = bytearray(random_bytes(rng.randrange(1, 20_000), seed=step))
                put(blobs, name, bytes(expected[name]))
            case "punch" if name in expected:
                begin = rng.randrange(len(expected[name]))
                num_bytes = rng.randrange(1, len(expected[name]) - begin + 1)
                expected[name][begin : begin + num_bytes] = bytes(num_bytes)
                blobs.punch(name, [(begin, num_bytes)])
            case "delete":
                expected.pop(name, None)
                blobs.delete(name)
            case "reopen":
                blobs.close()
                blobs = blobs_at(place)
        assert {name: whole(blobs, name) for name in blobs.scan()} == expected
    blobs.close()
