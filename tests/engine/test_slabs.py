"""Slabs: poisoned, aligned, and one with the bytes that the host sees."""

from __future__ import annotations

import pytest
import torch

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.engine.memory.slabs import POISON, Slabs

NUM_SLOTS = {Kind.FULL: 7, Kind.RECURRENT: 3}


@pytest.fixture
def slabs() -> Slabs:
    full = lay_out(Kind.FULL, [SectionSpec("key", 0, (2, 16, 8), "float32", 0)])
    recurrent = lay_out(Kind.RECURRENT, [SectionSpec("ssm", 1, (5, 3), "float64", 0)])
    return Slabs.allocate(StateManifest("f", 16, 16, 0, (full, recurrent)), NUM_SLOTS, "cpu")


@pytest.mark.parametrize("kind", list(NUM_SLOTS))
def test_a_fresh_slab_is_poison_to_every_float(slabs: Slabs, kind: Kind) -> None:
    slab = slabs.by_kind[kind]
    assert slab.tensor.shape == (NUM_SLOTS[kind], slab.slot_bytes)
    held = {Kind.FULL: 2 * 16 * 8 * 4, Kind.RECURRENT: 5 * 3 * 8}[kind]
    assert (slab.tensor[:, :held] == POISON).all()
    assert (slab.tensor[:, held:] == 0).all(), "what lies between sections is the same everywhere"
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert slab.tensor.view(dtype)[:, : held // dtype.itemsize].isnan().all()


def test_slots_are_aligned_to_cache_lines(slabs: Slabs) -> None:
    for slab in slabs.by_kind.values():
        assert slab.tensor.data_ptr() % 64 == 0
        assert slab.slot_bytes % 64 == 0


def test_the_host_sees_and_writes_the_tensor_itself(slabs: Slabs) -> None:
    slab = slabs.by_kind[Kind.FULL]
    slab.tensor[4] = 9
    assert set(slabs.bytes_of(Kind.FULL, 4)) == {9}
    slabs.bytes_of(Kind.FULL, 5)[:] = b"\x07" * slab.slot_bytes
    assert (slab.tensor[5] == 7).all()
    assert (slab.tensor[6] == POISON).all()


@pytest.mark.parametrize("slot", [-1, 7])
def test_a_slot_that_does_not_exist_has_no_bytes(slabs: Slabs, slot: int) -> None:
    with pytest.raises(IndexError, match=f"no slot {slot} of 7"):
        slabs.bytes_of(Kind.FULL, slot)


def test_bytes_outlive_the_slabs(slabs: Slabs) -> None:
    full = lay_out(Kind.FULL, [SectionSpec("key", 0, (1, 16, 16), "float32", 0)])
    held = Slabs.allocate(StateManifest("f", 16, 16, 0, (full,)), {Kind.FULL: 2}, "cpu").bytes_of(
        Kind.FULL, 1
    )
    assert set(held) == {POISON}


def test_the_size_is_what_was_asked_for(slabs: Slabs) -> None:
    assert slabs.num_bytes == 7 * 2 * 16 * 8 * 4 + 3 * 128


def test_a_pool_without_slots_is_empty_not_an_error() -> None:
    full = lay_out(Kind.FULL, [SectionSpec("key", 0, (1, 16, 16), "float32", 0)])
    empty = Slabs.allocate(StateManifest("f", 16, 16, 0, (full,)), {Kind.FULL: 0}, "cpu")
    assert empty.by_kind[Kind.FULL].num_slots == 0
