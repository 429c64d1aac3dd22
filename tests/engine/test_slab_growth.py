"""Slabs that grow: a slot is poison when it is given, and memory behind it is not touched."""

from __future__ import annotations

from threading import Thread

import pytest

from ferryman.cache.manifest import Kind, KindLayout, SectionSpec, StateManifest, lay_out
from ferryman.cache.slots import Holder, Pools, Role
from ferryman.engine.memory.slabs import POISON, STRETCH_BYTES, SlabGrowth, Slabs

REQUEST = Holder(Role.REQUEST, "r")
FULL = lay_out(Kind.FULL, [SectionSpec("key", 0, (2, 64, 512), "float32", 0)])
# A slot that does not divide a stretch, with a gap at its end.
RECURRENT = lay_out(Kind.RECURRENT, [SectionSpec("ssm", 1, (100_003,), "float64", 0)])
MANIFEST = StateManifest("f", 64, 64, 0, (FULL, RECURRENT))
SIZES = {Kind.FULL: 1024, Kind.RECURRENT: 11}


@pytest.fixture
def slabs() -> Slabs:
    return Slabs.allocate(MANIFEST, SIZES, "cpu", is_filled=False)


@pytest.fixture
def pools(slabs: Slabs) -> Pools:
    return Pools(SIZES, SlabGrowth(MANIFEST, slabs).prepare)


def fresh(layout: KindLayout) -> bytes:
    (section,) = layout.sections
    return (bytes([POISON]) * section.num_bytes).ljust(layout.slot_bytes, b"\0")


@pytest.mark.parametrize("layout", [FULL, RECURRENT], ids=["full", "recurrent"])
def test_each_slot_is_poison_when_it_is_given_and_keeps_what_is_written(
    slabs: Slabs, pools: Pools, layout: KindLayout
) -> None:
    kind = layout.kind
    written = b"\x07" * layout.slot_bytes
    for _ in range(SIZES[kind]):
        ((handle,),) = (pools.try_allocate({kind: 1}, REQUEST) or {}).values()
        assert bytes(slabs.bytes_of(kind, handle.slot)) == fresh(layout)
        slabs.bytes_of(kind, handle.slot)[:] = written
    assert all(bytes(slabs.bytes_of(kind, slot)) == written for slot in range(SIZES[kind]))


def test_a_slot_that_is_given_again_is_as_it_was_left(slabs: Slabs, pools: Pools) -> None:
    (handles,) = (pools.try_allocate({Kind.RECURRENT: 11}, REQUEST) or {}).values()
    slabs.bytes_of(Kind.RECURRENT, 5)[:] = b"\x07" * RECURRENT.slot_bytes
    pools.release(handles, REQUEST)
    pools.try_allocate({Kind.RECURRENT: 11}, REQUEST)
    assert set(slabs.bytes_of(Kind.RECURRENT, 5)) == {7}


def test_the_first_slot_is_ready_before_any_is_given(slabs: Slabs) -> None:
    """The warm-up runs on it."""
    SlabGrowth(MANIFEST, slabs)
    for layout in (FULL, RECURRENT):
        assert bytes(slabs.bytes_of(layout.kind, 0)) == fresh(layout)


def test_memory_behind_the_last_stretch_is_not_touched(slabs: Slabs, pools: Pools) -> None:
    """Memory that was never written reads as zero, and takes no room."""
    slab = slabs.by_kind[Kind.FULL]
    stretch = STRETCH_BYTES // slab.slot_bytes
    assert (slab.tensor[stretch:] == 0).all()
    pools.try_allocate({Kind.FULL: stretch + 1}, REQUEST)
    assert (slab.tensor[stretch : 2 * stretch] == POISON).all()
    assert (slab.tensor[2 * stretch :] == 0).all()


def test_memory_is_prepared_ahead_on_another_thread_while_slots_are_given(slabs: Slabs) -> None:
    """The first of both fills a stretch, and nobody fills one again."""
    growth = SlabGrowth(MANIFEST, slabs)
    pools, written = Pools(SIZES, growth.prepare), b"\x07" * FULL.slot_bytes
    ahead = Thread(target=growth.prepare_ahead, args=(pools.last_fresh({Kind.FULL: 1024}),))
    ahead.start()
    for slot in range(1024):
        assert pools.try_allocate({Kind.FULL: 1}, REQUEST)
        assert bytes(slabs.bytes_of(Kind.FULL, slot)) == fresh(FULL)
        slabs.bytes_of(Kind.FULL, slot)[:] = written
    ahead.join()
    assert (slabs.by_kind[Kind.FULL].tensor == 7).all()
    assert pools.last_fresh({Kind.FULL: 1024}) == {}


def test_only_slots_that_nobody_had_are_fresh(slabs: Slabs) -> None:
    pools = Pools(SIZES, SlabGrowth(MANIFEST, slabs).prepare)
    stretch = STRETCH_BYTES // FULL.slot_bytes
    assert pools.last_fresh({Kind.FULL: 3, Kind.RECURRENT: 2}) == {Kind.FULL: 2, Kind.RECURRENT: 1}
    (handles,) = (pools.try_allocate({Kind.FULL: 3}, REQUEST) or {}).values()
    pools.release(handles, REQUEST)
    assert pools.last_fresh({Kind.FULL: stretch}) == {}, "the first stretch is there"
    assert pools.last_fresh({Kind.FULL: stretch + 1}) == {Kind.FULL: stretch}
    assert pools.last_fresh({Kind.FULL: 1025}) == {}, "it cannot be met"
