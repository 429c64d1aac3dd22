"""The runs of a hand-off: for units in slots, what goes from which address to which.

A unit has one slot at the writer and one at the receiver, each at all ranks of its side. The cut of
a slot (`cache/rank_runs.py`) is the same for every unit of a kind. So the runs of a batch of units
are one sum of arrays: a slot of many layers and ranks has hundreds of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.cache.rank_runs import CrossRankRun, RankShares
from ferryman.wire.handoff.nixl_library import RunTable
from ferryman.wire.plane_values import RankSlabs


@dataclass(frozen=True, slots=True)
class _CutSlot:
    """The runs of slot 0 to slot 0, and the distance to the next slot: here and there."""

    runs: RunTable
    steps: tuple[int, int]

    def moved(self, here: RunTable, there: RunTable) -> RunTable:
        """The runs of all pairs of slots. Runs of neighbours follow each other, for merging."""
        table = np.repeat(self.runs[:, None, :], len(here), axis=1)
        table[:, :, 0] += here * self.steps[0]
        table[:, :, 1] += there * self.steps[1]
        return table.reshape(-1, self.runs.shape[1])


class SlotRuns:
    """The runs from the slots of one worker to those of another."""

    def __init__(self, here: RankSlabs, there: RankSlabs, shares: RankShares) -> None:
        """`shares` are those of the worker with the slabs `here`. Raises as `RankShares.of`."""
        cuts = shares.runs_to(there.num_ranks)
        ranks = here.num_ranks, there.num_ranks
        self._cuts = {
            kind: _CutSlot(
                _runs_of(cut, kind, here, there),
                (_slot_bytes(shares, ranks[0], kind), _slot_bytes(shares, ranks[1], kind)),
            )
            for kind, cut in cuts.items()
            if kind in there.addresses
        }

    def between(self, kind: Kind, here: Sequence[int], there: Sequence[int]) -> RunTable:
        """The runs from the slots `here` to the slots `there`, pair by pair."""
        return self._cuts[kind].moved(np.array(here, np.int64), np.array(there, np.int64))


def _runs_of(
    cut: Sequence[CrossRankRun], kind: Kind, here: RankSlabs, there: RankSlabs
) -> RunTable:
    """A table with the fields of a WriteRun, from slot 0 to slot 0."""
    ours, theirs = here.addresses[kind], there.addresses[kind]
    rows = [
        (
            ours[run.source_rank] + run.source_offset,
            theirs[run.target_rank] + run.target_offset,
            run.num_bytes,
            here.devices[run.source_rank],
            there.devices[run.target_rank],
        )
        for run in cut
    ]
    return np.array(rows, np.int64)


def _slot_bytes(shares: RankShares, num_ranks: int, kind: Kind) -> int:
    return shares.of(num_ranks).layout(kind).slot_bytes
