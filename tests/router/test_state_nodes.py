"""The units of a conversation that are worth saving: those from which a request could resume."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.errors import CorruptState, InvalidRequest
from ferryman_router.request.state_files import StateBytes
from ferryman_router.request.state_nodes import MAX_POINTS, UnitHash, resumable_units

FULL, WINDOW, RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT
# A window of 21 tokens meets two or three pages of 16.
HYBRID = ResumeShape(16, 21, frozenset((FULL, WINDOW, RECURRENT)))
ATTENTION = ResumeShape(16, 0, frozenset((FULL,)))


def pages(**held: range | tuple[int, ...]) -> dict[Kind, frozenset[int]]:
    return {Kind(kind): frozenset(some) for kind, some in held.items()}


def test_attention_resumes_after_every_page_that_has_all_before_it() -> None:
    depth, names = resumable_units(ATTENTION, pages(full=(0, 1, 2, 4, 5)), 6)
    assert (depth, names) == (3, ((FULL, 0), (FULL, 1), (FULL, 2)))
    assert resumable_units(ATTENTION, pages(full=(1, 2)), 3) == (0, ())
    assert resumable_units(ATTENTION, {}, 3) == (0, ())


def test_a_hybrid_resumes_at_snapshots_with_their_windows() -> None:
    held = pages(full=range(8), recurrent=(1, 3, 5, 7), window=(0, 1, 4, 5, 6))
    # At 8 pages page 7 of the window is missing, at 4 pages 2 and 3 are.
    depth, names = resumable_units(HYBRID, held, 8)
    assert depth == 6
    assert names == (
        *((FULL, page) for page in range(6)),
        *((RECURRENT, page) for page in (1, 5)),
        *((WINDOW, page) for page in (0, 1, 4, 5)),
    )


def test_the_deepest_points_are_kept() -> None:
    recurrent = ResumeShape(16, 0, frozenset((RECURRENT,)))
    depth, names = resumable_units(recurrent, pages(recurrent=range(100)), 100)
    assert depth == 100
    assert names == tuple((RECURRENT, page) for page in range(100 - MAX_POINTS, 100))


async def _chunks(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_bytes_are_cut_where_units_end() -> None:
    content = StateBytes(_chunks(b"abc", b"", b"defgh", b"i"), 9)
    assert b"".join([piece async for piece in content.pieces(4)]) == b"abcd"
    assert b"".join([piece async for piece in content.pieces(4)]) == b"efgh"
    with pytest.raises(InvalidRequest, match="was cut"):
        async for _ in content.pieces(2):
            pass


async def test_a_unit_has_its_digests_when_it_is_whole_and_takes_no_more() -> None:
    unit = UnitHash(6)
    assert not (await unit.add(FULL, b"abc")).digest
    whole = await unit.add(FULL, b"def")
    # By `b2sum -l 256`, and by `xxh128sum`.
    blake2b = "755b8c020bf6b81a3e1d069e177e19e3892c256595c1a94ddb5a902b9e3c6212"
    assert whole.digest.hex() == blake2b
    assert whole.xxh3.hex() == "389197a55db2b2e4da35a6714d34f8a2"
    with pytest.raises(CorruptState):
        await unit.add(FULL, b"g")
    with pytest.raises(CorruptState):
        await UnitHash(6).add(FULL, b"")
