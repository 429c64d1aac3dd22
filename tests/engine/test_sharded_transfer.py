"""Slots that ranks share read, write and hash as the one slot of the whole model that they are."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.model.cuttable import cuttable

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.cache.shards import reshard
from ferryman.engine.memory.slabs import POISON, Slabs
from ferryman.engine.memory.transfer import HostTransfer, digest_of
from ferryman.engine.tensor_parallel.shared_slabs import ShardedTransfer
from ferryman.errors import CorruptState, InvalidRequest
from ferryman.model.config import load_config
from ferryman.model.shapes.manifest import state_manifest

NUM_RANKS = 2
FAMILIES = ("falcon_h1", "gpt_oss", "granite")
SLOT = 1


@pytest.fixture(params=FAMILIES)
def manifests(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[StateManifest, StateManifest]:
    """Of a whole model, and of a rank of it. bfloat16: sections that leave gaps behind them."""
    next(cuttable(request.param, NUM_RANKS, tmp_path))
    config = load_config(tmp_path)
    whole = state_manifest(config, "bfloat16", 4, "some model")
    return whole, state_manifest(config, "bfloat16", 4, "some model", NUM_RANKS)


@pytest.fixture
def cut(manifests: tuple[StateManifest, StateManifest]) -> ShardedTransfer:
    whole, of_rank = manifests
    recuts = {k: reshard(whole.layout(k), of_rank.layout(k), NUM_RANKS) for k in whole.kinds}
    ranks = [Slabs.allocate(of_rank, sizes(of_rank), "cpu") for _ in range(NUM_RANKS)]
    return ShardedTransfer(recuts, [slabs.tensors for slabs in ranks])


def sizes(manifest: StateManifest) -> Mapping[Kind, int]:
    return dict.fromkeys(manifest.kinds, 3)


def contents(manifest: StateManifest) -> Mapping[Kind, bytes]:
    """The bytes of a slot of a single-rank worker, with gaps: random bytes in every section."""
    slabs = Slabs.allocate(manifest, sizes(manifest), "cpu")
    rng = np.random.default_rng(7)
    for kind in manifest.kinds:
        slot = np.frombuffer(slabs.bytes_of(kind, SLOT), np.uint8)
        for section in manifest.layout(kind).sections:
            begin, num_bytes = section.offset, section.num_bytes
            slot[begin : begin + num_bytes] = rng.integers(0, 256, num_bytes, dtype=np.uint8)
    return {kind: bytes(slabs.bytes_of(kind, SLOT)) for kind in manifest.kinds}


def test_what_is_written_in_frames_reads_and_hashes_as_it_was(
    manifests: tuple[StateManifest, StateManifest], cut: ShardedTransfer
) -> None:
    rng = random.Random(3)
    for kind, content in contents(manifests[0]).items():
        frames = sorted({0, len(content), *(rng.randrange(len(content)) for _ in range(3))})
        for begin, end in pairwise(frames):
            cut.write(kind, SLOT, begin, content[begin:end])
        assert bytes(cut.read(kind, SLOT)) == content
        assert cut.digest(kind, SLOT) == digest_of(content)
        for other in (SLOT - 1, SLOT + 1):
            assert set(bytes(cut.read(kind, other))) <= {0, POISON}, "a neighbour was written"


def test_units_come_from_an_arena_and_go_to_one(
    manifests: tuple[StateManifest, StateManifest], cut: ShardedTransfer
) -> None:
    for kind, content in contents(manifests[0]).items():
        digest = digest_of(content)
        cut.load_unit(kind, SLOT, memoryview(bytearray(content)), digest)
        arena = bytearray(len(content))
        assert cut.store_unit(kind, SLOT, memoryview(arena)) == digest
        assert arena == content


def test_bytes_that_are_not_what_was_stored_reach_no_rank(
    manifests: tuple[StateManifest, StateManifest], cut: ShardedTransfer
) -> None:
    for kind, content in contents(manifests[0]).items():
        before = bytes(cut.read(kind, SLOT))
        spoilt = bytearray(content)
        spoilt[0] ^= 1
        with pytest.raises(CorruptState):
            cut.load_unit(kind, SLOT, memoryview(spoilt), digest_of(content))
        assert bytes(cut.read(kind, SLOT)) == before


def test_a_rank_that_keeps_other_bytes_of_a_shared_head_is_noticed() -> None:
    """A direct writer writes what several ranks keep to each of them, one after the other."""
    specs = [
        SectionSpec("key", 0, (2, 8), "float32", 0),
        SectionSpec("latent", 0, (8,), "float32", None),
    ]
    whole = lay_out(Kind.FULL, specs)
    of_rank = lay_out(Kind.FULL, [replace(specs[0], shape=(1, 8)), specs[1]])
    ranks = [torch.zeros((2, of_rank.slot_bytes), dtype=torch.uint8) for _ in range(4)]
    plan = reshard(whole, of_rank, 4)
    slots = ShardedTransfer({Kind.FULL: plan}, [{Kind.FULL: slab} for slab in ranks])
    content = bytes(range(128))
    slots.write(Kind.FULL, SLOT, 0, content)
    right = slots.digest(Kind.FULL, SLOT)
    assert right == digest_of(bytes(slots.read(Kind.FULL, SLOT)))
    for rank in range(4):
        for section in of_rank.sections:
            ranks[rank][SLOT, section.offset] ^= 1
            assert slots.digest(Kind.FULL, SLOT) != right, (rank, section.name)
            ranks[rank][SLOT, section.offset] ^= 1
    assert slots.digest(Kind.FULL, SLOT) == right


def test_slots_and_bytes_that_are_not_there_are_refused(
    manifests: tuple[StateManifest, StateManifest], cut: ShardedTransfer
) -> None:
    kind = manifests[0].kinds[0]
    slot_bytes = manifests[0].layout(kind).slot_bytes
    with pytest.raises(IndexError):
        cut.read(kind, 3)
    with pytest.raises(InvalidRequest):
        cut.write(kind, SLOT, slot_bytes - 1, b"ab")
    with pytest.raises(CorruptState):
        cut.load_unit(kind, SLOT, memoryview(bytes(slot_bytes - 1)), bytes(16))


def test_a_fresh_slot_is_poisoned_in_its_sections_and_zero_between_them(
    manifests: tuple[StateManifest, StateManifest], cut: ShardedTransfer
) -> None:
    """So the digest of a slot is the same however it is cut, before and after it was written."""
    whole = manifests[0]
    uncut = HostTransfer(Slabs.allocate(whole, sizes(whole), "cpu"))
    for kind in whole.kinds:
        expected = np.zeros(whole.layout(kind).slot_bytes, np.uint8)
        for section in whole.layout(kind).sections:
            expected[section.offset : section.offset + section.num_bytes] = POISON
        assert bytes(uncut.read(kind, SLOT)) == bytes(cut.read(kind, SLOT)) == expected.tobytes()
