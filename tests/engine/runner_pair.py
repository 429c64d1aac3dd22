"""The same model twice, to compare two ways to run its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.step import ForwardMaker
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.runner import Runner
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.batch import StepOutcome, StepPlan
from ferryman.schedule.step_sizes import StepSizes

PAGE_SIZE = 16


@dataclass(frozen=True)
class RunnerPair:
    """One runner launches its steps, the other replays them."""

    launched: Runner
    replayed: Runner
    slabs: tuple[Slabs, Slabs]

    def run(self, step: StepPlan) -> StepOutcome:
        """Runs a step by both; they draw the same tokens, and leave the same bits in all slots."""
        expected, found = self.launched.run(step), self.replayed.run(step)
        assert (found.sampled, found.drafts) == (expected.sampled, expected.drafts)
        for kind, slab in self.slabs[0].tensors.items():
            assert slab.equal(self.slabs[1].tensors[kind]), kind
        return found


def runner_pair(
    folder: Path,
    num_slots: Mapping[Kind, int],
    replays: ForwardMaker,
    *,
    dtype: str = "float32",
    max_len: int,
    sizes: StepSizes | None = None,
) -> RunnerPair:
    """Runners of the model in `folder` for four rows, each with slabs of its own."""
    model = load_model(folder, LoadOptions(dtype, page_size=PAGE_SIZE))
    slabs = [Slabs.allocate(model.manifest, num_slots, "cpu") for _ in range(2)]
    launched, replayed = (
        Runner(model, each, max_rows=4, max_len=max_len, sizes=sizes, replays=maker)
        for each, maker in zip(slabs, (None, replays), strict=True)
    )
    return RunnerPair(launched, replayed, (slabs[0], slabs[1]))
