"""A slot that is divided among ranks and joined again is unchanged, for any shape and any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ferryman.cache.manifest import (
    DTYPE_BYTES,
    Kind,
    KindLayout,
    Section,
    SectionSpec,
    lay_out,
)
from ferryman.cache.shards import ReshardPlan, ShardRun, reshard

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Cutting:
    """A layout, and the share of each of `num_ranks` ranks: section i has `pieces[i]` pieces."""

    whole: KindLayout
    of_rank: KindLayout
    num_ranks: int
    pieces: tuple[int, ...]

    @property
    def reshard(self) -> ReshardPlan:
        return reshard(self.whole, self.of_rank, self.num_ranks)


@st.composite
def cuttings(draw: st.DrawFn) -> Cutting:
    """Sections of one to four axes, cut along any of them, with fewer pieces than ranks too."""
    num_ranks = draw(st.integers(1, 8))
    divisors = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0]
    whole, of_rank, pieces = [], [], []
    for index in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
        axis = draw(st.none() | st.integers(0, len(shape) - 1))
        count = 1 if axis is None else draw(st.sampled_from(divisors))
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        of_rank.append(SectionSpec(f"s{index}", index, tuple(shape), dtype, axis))
        if axis is not None:
            shape[axis] *= count
        whole.append(SectionSpec(f"s{index}", index, tuple(shape), dtype, axis))
        pieces.append(count)
    return Cutting(lay_out(Kind.FULL, whole), lay_out(Kind.FULL, of_rank), num_ranks, tuple(pieces))


def random_slot(cutting: Cutting, seed: int) -> Bytes:
    """Random bytes in every section, and zeros between them."""
    slot = np.zeros(cutting.whole.slot_bytes, np.uint8)
    rng = np.random.default_rng(seed)
    for section in cutting.whole.sections:
        content_of(slot, section)[:] = rng.integers(0, 256, section.num_bytes, dtype=np.uint8)
    return slot


def content_of(slot: Bytes, section: Section) -> Bytes:
    return slot[section.offset : section.offset + section.num_bytes]


def as_array(slot: Bytes, section: Section) -> NDArray[np.void]:
    """The section by its axes, with elements of its dtype's size."""
    element = np.dtype((np.void, DTYPE_BYTES[section.dtype]))
    return content_of(slot, section).view(element).reshape(section.shape)


def scatter(slot: Bytes, ranks: Sequence[Bytes], runs: Sequence[ShardRun]) -> None:
    for run in runs:
        target = ranks[run.rank][run.rank_offset : run.rank_offset + run.num_bytes]
        target[:] = slot[run.offset : run.end]


def gather(ranks: Sequence[Bytes], reshard: ReshardPlan) -> Bytes:
    slot = np.zeros(reshard.slot_bytes, np.uint8)
    for run in reshard.gathered:
        source = ranks[run.rank][run.rank_offset : run.rank_offset + run.num_bytes]
        slot[run.offset : run.end] = source
    return slot


def empty_ranks(cutting: Cutting) -> list[Bytes]:
    return [np.zeros(cutting.of_rank.slot_bytes, np.uint8) for _ in range(cutting.num_ranks)]


@given(cuttings(), st.integers(0, 2**32 - 1))
def test_a_slot_that_was_scattered_gathers_to_itself(cutting: Cutting, seed: int) -> None:
    slot, ranks = random_slot(cutting, seed), empty_ranks(cutting)
    scatter(slot, ranks, cutting.reshard.scattered)
    assert np.array_equal(gather(ranks, cutting.reshard), slot)


@given(cuttings(), st.integers(0, 2**32 - 1))
def test_a_rank_keeps_what_splitting_each_section_gives_it(cutting: Cutting, seed: int) -> None:
    slot, ranks = random_slot(cutting, seed), empty_ranks(cutting)
    scatter(slot, ranks, cutting.reshard.scattered)
    pairs = zip(cutting.whole.sections, cutting.of_rank.sections, cutting.pieces, strict=True)
    for section, share, pieces in pairs:
        parts = np.split(as_array(slot, section), pieces, axis=section.shard_axis or 0)
        for rank, kept in enumerate(ranks):
            expected = parts[rank * pieces // cutting.num_ranks]
            assert as_array(kept, share).tobytes() == expected.tobytes(), (section.name, rank)


@given(cuttings())
def test_gathered_runs_cover_every_byte_once_and_come_from_the_first_that_keeps_it(
    cutting: Cutting,
) -> None:
    covered = np.zeros(cutting.whole.slot_bytes, np.int64)
    for run in cutting.reshard.gathered:
        covered[run.offset : run.end] += 1
    for section in cutting.whole.sections:
        assert (covered[section.offset : section.offset + section.num_bytes] == 1).all()
        covered[section.offset : section.offset + section.num_bytes] = 0
    assert not covered.any(), "padding travels with nobody"
    if set(cutting.pieces) == {1}:
        assert {run.rank for run in cutting.reshard.gathered} == {0}


@given(cuttings())
def test_every_byte_of_a_rank_is_gathered_or_repeats_one_that_is(cutting: Cutting) -> None:
    plan = cutting.reshard
    kept = np.zeros((cutting.num_ranks, cutting.of_rank.slot_bytes), np.int64)
    for run in (*plan.gathered, *plan.repeated):
        kept[run.rank, run.rank_offset : run.rank_offset + run.num_bytes] += 1
    for run in plan.scattered:
        kept[run.rank, run.rank_offset : run.rank_offset + run.num_bytes] -= 1
    assert not kept.any()


@given(cuttings(), st.integers(0, 2**32 - 1), st.data())
def test_bytes_that_come_in_frames_land_where_the_whole_would(
    cutting: Cutting, seed: int, data: st.DataObject
) -> None:
    slot, ranks = random_slot(cutting, seed), empty_ranks(cutting)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(slot)), max_size=4)) | {0, len(slot)})
    for begin, end in pairwise(cuts):
        runs = list(cutting.reshard.scattered_within(begin, end))
        assert all(begin <= run.offset and run.end <= end for run in runs)
        scatter(slot, ranks, runs)
    assert np.array_equal(gather(ranks, cutting.reshard), slot)


def test_fewer_heads_than_ranks_are_kept_by_neighbours() -> None:
    """Defect row 46: the replication factor is at least one, so nothing is divided by zero."""
    whole = lay_out(Kind.FULL, [SectionSpec("key", 0, (2, 4, 8), "float32", 0)])
    of_rank = lay_out(Kind.FULL, [SectionSpec("key", 0, (1, 4, 8), "float32", 0)])
    found = reshard(whole, of_rank, 4)
    assert [run.offset for run in found.scattered] == [0, 0, 128, 128]
    assert [run.rank for run in found.gathered] == [0, 2]


def test_sections_side_by_side_in_both_slots_travel_as_one_run() -> None:
    specs = [SectionSpec("key", i, (2, 8), "float64", None) for i in range(3)]
    layout = lay_out(Kind.FULL, specs)
    found = reshard(layout, layout, 3)
    assert found.gathered == (ShardRun(0, 0, 0, layout.slot_bytes),)
    assert len(found.scattered) == 3


def test_what_is_no_cut_is_refused_by_section() -> None:
    whole = lay_out(Kind.FULL, [SectionSpec("key", 0, (4, 8), "float32", 0)])
    with pytest.raises(ValueError, match="is no cut of"):
        reshard(whole, lay_out(Kind.FULL, [SectionSpec("key", 0, (3, 8), "float32", 0)]), 4)
    with pytest.raises(ValueError, match="is no cut of"):
        reshard(whole, lay_out(Kind.FULL, [SectionSpec("value", 0, (4, 8), "float32", 0)]), 1)
    with pytest.raises(ValueError, match="4 pieces cannot be kept by 2 ranks"):
        reshard(whole, lay_out(Kind.FULL, [SectionSpec("key", 0, (1, 8), "float32", 0)]), 2)
    with pytest.raises(ValueError, match="sections are no cut"):
        reshard(whole, replace(whole, sections=()), 1)
