"""A slot that goes from the ranks of one worker to those of another arrives where it belongs.

The model cuts each section as an array, byte by byte; the runs must move the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.test_shards import Bytes, as_array, content_of

from ferryman.cache.manifest import (
    DTYPE_BYTES,
    Kind,
    KindLayout,
    SectionSpec,
    StateManifest,
    lay_out,
)
from ferryman.cache.rank_runs import MAX_RANKS, CrossRankRun, RankShares, rank_runs
from ferryman.cache.shards import ReshardPlan, reshard

RANKS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 6), (3, 2)]


@dataclass(frozen=True, slots=True)
class CutSide:
    """A worker's ranks: section i is in `pieces[i]` pieces, each kept by as many ranks."""

    of_rank: KindLayout
    num_ranks: int
    pieces: tuple[int, ...]

    def plan(self, whole: KindLayout) -> ReshardPlan:
        return reshard(whole, self.of_rank, self.num_ranks)

    def cut(self, whole: KindLayout, slot: Bytes) -> list[Bytes]:
        """The slots of all ranks, each section divided as an array along its axis."""
        ranks = [np.zeros(self.of_rank.slot_bytes, np.uint8) for _ in range(self.num_ranks)]
        for section, share, pieces in zip(
            whole.sections, self.of_rank.sections, self.pieces, strict=True
        ):
            parts = np.split(as_array(slot, section), pieces, axis=section.shard_axis or 0)
            for rank, kept in enumerate(ranks):
                part = parts[rank * pieces // self.num_ranks]
                content_of(kept, share)[:] = np.frombuffer(part.tobytes(), np.uint8)
        return ranks


@dataclass(frozen=True, slots=True)
class TwoCuts:
    """One layout, kept by the ranks of two workers."""

    whole: KindLayout
    source: CutSide
    target: CutSide

    @property
    def runs(self) -> tuple[CrossRankRun, ...]:
        return rank_runs(self.source.plan(self.whole), self.target.plan(self.whole))


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


@st.composite
def two_cuts(draw: st.DrawFn) -> TwoCuts:
    """Sections cut along any axis or kept whole, and with fewer pieces than ranks."""
    ranks = draw(st.sampled_from(RANKS))
    specs: tuple[list[SectionSpec], ...] = ([], [], [])
    pieces: tuple[list[int], ...] = ([], [])
    for index in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
        axis = draw(st.none() | st.integers(0, len(shape) - 1))
        counts = [1 if axis is None else draw(st.sampled_from(divisors(n))) for n in ranks]
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        if axis is not None:
            shape[axis] *= lcm(*counts)
        for kept, count in zip(specs, (1, *counts), strict=True):
            share = list(shape)
            if axis is not None:
                share[axis] //= count
            kept.append(SectionSpec(f"s{index}", index, tuple(share), dtype, axis))
        for side, count in zip(pieces, counts, strict=True):
            side.append(count)
    whole, *shares = (lay_out(Kind.FULL, each) for each in specs)
    source, target = (
        CutSide(share, num_ranks, tuple(counts))
        for share, num_ranks, counts in zip(shares, ranks, pieces, strict=True)
    )
    return TwoCuts(whole, source, target)


def moved(runs: Sequence[CrossRankRun], source: Sequence[Bytes], target: CutSide) -> list[Bytes]:
    """The slots of the target's ranks, which were empty, after the runs."""
    found = [np.zeros(target.of_rank.slot_bytes, np.uint8) for _ in range(target.num_ranks)]
    for run in runs:
        content = source[run.source_rank][run.source_offset : run.source_offset + run.num_bytes]
        found[run.target_rank][run.target_offset : run.target_offset + run.num_bytes] = content
    return found


def filled(whole: KindLayout, seed: int) -> Bytes:
    slot, rng = np.zeros(whole.slot_bytes, np.uint8), np.random.default_rng(seed)
    for section in whole.sections:
        content_of(slot, section)[:] = rng.integers(0, 256, section.num_bytes, dtype=np.uint8)
    return slot


@given(two_cuts(), st.integers(0, 2**32 - 1))
def test_every_rank_gets_what_it_keeps_also_what_others_keep_too(cuts: TwoCuts, seed: int) -> None:
    slot = filled(cuts.whole, seed)
    found = moved(cuts.runs, cuts.source.cut(cuts.whole, slot), cuts.target)
    expected = cuts.target.cut(cuts.whole, slot)
    assert [rank.tobytes() for rank in found] == [rank.tobytes() for rank in expected]


@given(two_cuts())
def test_no_byte_of_a_rank_is_written_twice(cuts: TwoCuts) -> None:
    written = np.zeros((cuts.target.num_ranks, cuts.target.of_rank.slot_bytes), np.int64)
    for run in cuts.runs:
        assert run.source_offset + run.num_bytes <= cuts.source.of_rank.slot_bytes
        assert run.num_bytes > 0
        written[run.target_rank, run.target_offset : run.target_offset + run.num_bytes] += 1
    assert written.max() == 1


def heads(count: int) -> KindLayout:
    """Keys of `count` heads, and a latent that no rank divides."""
    keys = SectionSpec("key", 0, (count, 4, 8), "float32", 0)
    return lay_out(Kind.FULL, [keys, SectionSpec("latent", 0, (4, 8), "float32", None)])


def keys(count: int) -> KindLayout:
    """Keys of `count` heads and nothing else, with a gap behind them."""
    return lay_out(Kind.FULL, [SectionSpec("key", 0, (count, 5, 3), "float32", 0)])


def test_workers_that_are_cut_alike_move_whole_slots_rank_by_rank() -> None:
    plan = reshard(keys(2), keys(1), 2)
    assert rank_runs(plan, plan) == (CrossRankRun(0, 0, 0, 0, 64), CrossRankRun(1, 0, 1, 0, 64))


def test_what_is_kept_twice_comes_from_the_rank_whose_bytes_are_hashed() -> None:
    plan = reshard(heads(2), heads(1), 2)
    latent = heads(1).section("latent", 0).offset
    sources = {run.source_rank for run in rank_runs(plan, plan) if run.target_offset >= latent}
    assert sources == {0}


@pytest.mark.parametrize(
    ("sides", "targets"),
    [
        pytest.param((1, 2), {0, 1}, id="one to two"),
        pytest.param((2, 2), {0, 1}, id="two to two"),
        pytest.param((2, 4), {0, 1, 2, 3}, id="two to four, heads fewer than ranks"),
    ],
)
def test_what_no_rank_divides_goes_to_every_rank(sides: tuple[int, int], targets: set[int]) -> None:
    source, target = (reshard(heads(2), heads(max(1, 2 // n)), n) for n in sides)
    latent = heads(max(1, 2 // sides[1])).section("latent", 0).offset
    ends = [
        (run.target_rank, run.target_offset + run.num_bytes) for run in rank_runs(source, target)
    ]
    assert {rank for rank, end in ends if end > latent} == targets


def manifest_of(num_ranks: int) -> StateManifest:
    if 4 % num_ranks:
        raise ValueError(f"{num_ranks} ranks do not divide 4 heads")
    return StateManifest("four heads", 4, 4, 0, (heads(4 // num_ranks),))


def test_shares_say_the_layout_of_any_number_of_ranks_and_the_runs_to_it() -> None:
    shares = RankShares(manifest_of(1), 2, manifest_of)
    assert shares.digest == manifest_of(2).digest != manifest_of(4).digest
    assert {run.target_rank for run in shares.runs_to(4)[Kind.FULL]} == {0, 1, 2, 3}


@pytest.mark.parametrize("num_ranks", [-1, 0, 3, MAX_RANKS + 1])
def test_numbers_of_ranks_that_cannot_be_are_refused(num_ranks: int) -> None:
    with pytest.raises(ValueError, match="ranks"):
        RankShares(manifest_of(1), 2, manifest_of).runs_to(num_ranks)
    with pytest.raises(ValueError, match="ranks"):
        RankShares.undivided(manifest_of(1)).runs_to(num_ranks)
