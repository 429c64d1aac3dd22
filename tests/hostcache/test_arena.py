"""An arena takes memory as its slots are given, and ends where there is none left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.small_disk import small_disk

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import Holder, Pools, Role
from ferryman.errors import ConfigError
from ferryman.tiers.layout import ArenaLayout, PoolRegion
from ferryman_hostcache.arena import PAGE, STRETCH_BYTES, Arena, ArenaGrowth

NAME = "ferryman-arena-local-local-0000000000000001"
WRITER = Holder(Role.TRANSFER_IN, "writer")
SLOT_BYTES = STRETCH_BYTES // 4


@contextmanager
def arena_in(folder: Path, num_bytes: int) -> Iterator[Arena]:
    arena = Arena.create(folder / NAME, num_bytes)
    try:
        yield arena
    finally:
        arena.remove()


def taken(arena: Arena) -> int:
    """The bytes of memory that the file has for units; the proof behind them takes a page."""
    return arena.path.stat().st_blocks * 512 - PAGE


def two_kinds(arena: Arena, slot_bytes: int, num_slots: int) -> tuple[ArenaLayout, Pools]:
    regions = {
        Kind.FULL: PoolRegion(0, slot_bytes, num_slots),
        Kind.RECURRENT: PoolRegion(slot_bytes * num_slots, slot_bytes, num_slots),
    }
    layout = ArenaLayout(regions)
    return layout, Pools(layout.num_slots, ArenaGrowth(arena, layout).prepare)


def test_memory_is_taken_by_stretches_as_slots_are_given(tmp_path: Path) -> None:
    with arena_in(tmp_path, 20 * SLOT_BYTES) as arena:
        _, pools = two_kinds(arena, SLOT_BYTES, 10)
        assert taken(arena) == 0
        for num_given, num_stretches in ((1, 1), (3, 1), (1, 2), (3, 2), (2, 2.5)):
            assert pools.try_allocate({Kind.RECURRENT: num_given}, WRITER)
            assert taken(arena) == num_stretches * STRETCH_BYTES
        assert pools.try_allocate({Kind.RECURRENT: 1}, WRITER) is None
    assert list(tmp_path.iterdir()) == []


def test_slots_end_where_shared_memory_ends_and_the_rest_are_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "shm", 128) as folder, arena_in(folder, 96 << 10) as arena:
        layout, pools = two_kinds(arena, 12 << 10, 4)
        other = folder / "another"
        other.write_bytes(b"x" * (48 << 10))
        demand = {Kind.FULL: 2, Kind.RECURRENT: 2}
        assert pools.try_allocate(demand, WRITER) is None, "the first kind took what was left"
        assert "has no memory left: 0 of 4 recurrent slots" in caplog.text
        assert [pools[kind].num_slots for kind in layout.regions] == [4, 0]
        full = pools.try_allocate({Kind.FULL: 4}, WRITER)
        assert full
        pools.release(full[Kind.FULL], WRITER)
        pools.check_integrity()
        other.unlink()


def test_slots_that_have_their_memory_are_not_given_it_again(tmp_path: Path) -> None:
    """The first ones have theirs before a pool asks for it."""
    with arena_in(tmp_path, 20 * SLOT_BYTES) as arena:
        layout, _ = two_kinds(arena, SLOT_BYTES, 10)
        growth = ArenaGrowth(arena, layout)
        assert [growth.prepare(Kind.FULL, slot) for slot in (0, 3, 4, 9, 0)] == [4, 4, 8, 10, 10]


@pytest.mark.parametrize("num_bytes", [1 << 20, 128 << 10])
def test_an_arena_that_cannot_fit_is_refused_at_the_start(tmp_path: Path, num_bytes: int) -> None:
    """The proof behind the units needs a page, too."""
    with small_disk(tmp_path / "shm", 128) as folder:
        with pytest.raises(ConfigError, match="FERRYMAN_HOST_MEMORY"):
            Arena.create(folder / NAME, num_bytes)
        assert list(folder.iterdir()) == []
