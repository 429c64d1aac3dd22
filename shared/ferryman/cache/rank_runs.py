"""A slot from the ranks of one worker to those of another, without joining it on the way.

Both sides are cut from one whole (`shards.py`), so a run of the one meets runs of the other:

    whole       │ head 0 · head 1 · head 2 · head 3 │      of two ranks     to four ranks
    rank 0      │ head 0 · head 1 │                    →   head 0 → rank 0, head 1 → rank 1
    rank 1      │ head 2 · head 3 │                    →   head 2 → rank 2, head 3 → rank 3

Each worker knows its own number of ranks, gets the other's, and computes the rest from its model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.shards import ReshardPlan, reshard

# Numbers of ranks come from other workers, and what is computed for each of them is kept.
MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class CrossRankRun:
    """Bytes contiguous in the slots of two ranks: one of the source's, one of the target's."""

    source_rank: int
    source_offset: int
    target_rank: int
    target_offset: int
    num_bytes: int


def rank_runs(source: ReshardPlan, target: ReshardPlan) -> tuple[CrossRankRun, ...]:
    """The runs that fill the slots of all ranks of `target` from those of `source`.

    Bytes that several ranks of `target` keep go to each of them, from the first rank of `source`
    that keeps them: so all get the bytes that the writer takes its digest of. Workers that are cut
    alike, with nothing kept twice, move whole slots, each rank to the same rank.
    """
    if source == target and not source.repeated:
        size = source.rank_slot_bytes
        return tuple(CrossRankRun(rank, 0, rank, 0, size) for rank in range(source.num_ranks))
    return tuple(_runs_between(source, target))


def _runs_between(source: ReshardPlan, target: ReshardPlan) -> Iterator[CrossRankRun]:
    kept = sorted(source.gathered, key=lambda run: run.offset)
    ends = [run.end for run in kept]
    for run in target.scattered:
        for index in range(bisect_right(ends, run.offset), len(kept)):
            if kept[index].offset >= run.end:
                break
            part = kept[index].clipped(run.offset, run.end)
            at = run.rank_offset + part.offset - run.offset
            yield CrossRankRun(part.rank, part.rank_offset, run.rank, at, part.num_bytes)


class RankShares:
    """The shares that ranks keep of one model's slots, for any number of ranks."""

    def __init__(
        self, whole: StateManifest, num_ranks: int, share_of: Callable[[int], StateManifest]
    ) -> None:
        """A worker of `num_ranks` ranks. `share_of` gives the manifest of one of so many ranks; it
        raises an error of its own if the model cannot be divided among them."""
        self._whole, self.num_ranks, self._share_of = whole, num_ranks, share_of
        self._shares: dict[int, StateManifest] = {}
        self._runs: dict[int, Mapping[Kind, tuple[CrossRankRun, ...]]] = {}

    @classmethod
    def undivided(cls, whole: StateManifest) -> RankShares:
        """The shares of a model that one rank keeps, and only one can keep."""

        def share_of(num_ranks: int) -> StateManifest:
            raise ValueError(f"this state is not divided among {num_ranks} ranks")

        return cls(whole, 1, share_of)

    def of(self, num_ranks: int) -> StateManifest:
        """The share of each of `num_ranks` ranks. Raises ValueError, or the error of `share_of`."""
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(f"{num_ranks} ranks are not from 1 to {MAX_RANKS}")
        if num_ranks not in self._shares:
            whole = self._whole
            self._shares[num_ranks] = whole if num_ranks == 1 else self._share_of(num_ranks)
        return self._shares[num_ranks]

    @property
    def digest(self) -> str:
        """The digest of the own ranks' layout: workers with equal digests cut alike."""
        return self.of(self.num_ranks).digest

    def runs_to(self, num_ranks: int) -> Mapping[Kind, tuple[CrossRankRun, ...]]:
        """The runs from the own ranks to `num_ranks` of another worker, by kind. Raises as `of`."""
        if num_ranks not in self._runs:
            self._runs[num_ranks] = {
                kind: rank_runs(self._plan(kind, self.num_ranks), self._plan(kind, num_ranks))
                for kind in self._whole.kinds
            }
        return self._runs[num_ranks]

    def _plan(self, kind: Kind, num_ranks: int) -> ReshardPlan:
        share = self.of(num_ranks).layout(kind)
        return reshard(self._whole.layout(kind), share, num_ranks)
