"""A mixed step has the bits of its halves: what a chunk and a decode step compute one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.engine.plans import Guest, decode, prefill, with_snapshots
from tests.engine.runner_pair import PAGE_SIZE
from tests.model.comparison import swept
from tests.model.telling import ALL_FAMILIES, save_telling

from ferryman.cache.manifest import Kind
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.runner import Runner
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.batch import (
    DecodeStep,
    MixedStep,
    PrefillStep,
    Sampled,
    SlotOps,
    SlotSnapshot,
)
from ferryman.schedule.request import SamplingParams

SLOTS = {Kind.FULL: 24, Kind.WINDOW: 24, Kind.RECURRENT: 16}
PAGES = 6
NAMED = SamplingParams(temperature=0.0, logprobs=3)


@dataclass(frozen=True)
class MixedPair:
    """One runner computes mixed steps, the other their halves."""

    mixed: Runner
    halves: Runner
    slabs: tuple[Slabs, Slabs]

    def run_both(self, step: PrefillStep) -> None:
        for runner in (self.mixed, self.halves):
            runner.run(step)

    def run(self, prompts: PrefillStep, tokens: DecodeStep) -> tuple[Sampled, ...]:
        """Both ways draw the same tokens with the same log probabilities, and leave the same bits
        in all slots."""
        step = MixedStep(prompts, replace(tokens, step_id=prompts.step_id))
        mixed = self.mixed.run(step).sampled
        of_prompts = self.halves.run(prompts).sampled
        assert mixed == of_prompts + self.halves.run(tokens).sampled
        for kind, slab in self.slabs[0].tensors.items():
            assert slab.equal(self.slabs[1].tensors[kind]), kind
        return mixed


def pair_of(folder: Path, dtype: str) -> MixedPair:
    model = load_model(folder, LoadOptions(dtype, page_size=PAGE_SIZE))
    slabs = [Slabs.allocate(model.manifest, SLOTS, "cpu") for _ in range(2)]
    mixed, halves = (Runner(model, own, max_rows=4, max_len=PAGES * PAGE_SIZE) for own in slabs)
    return MixedPair(mixed, halves, (slabs[0], slabs[1]))


def guests(pair: MixedPair, lens: Sequence[int]) -> list[Guest]:
    kinds = tuple(pair.slabs[0].by_kind)
    paged = [kind for kind in kinds if kind is not Kind.RECURRENT]
    asked = []
    for row, length in enumerate(lens):
        tokens = [(7 * i * i + 3 * i + row) % 40 + 3 for i in range(length)]
        working = row if Kind.RECURRENT in kinds else -1
        pages = range(PAGES * row, PAGES * row + PAGES)
        asked.append(Guest(f"{row}", tokens, row, working, dict.fromkeys(paged, pages), NAMED))
    return asked


def cleared(*guests: Guest) -> SlotOps:
    return SlotOps(clears=tuple(g.working_slot for g in guests if g.working_slot >= 0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", swept(ALL_FAMILIES))
def test_a_mixed_step_has_the_bits_of_its_halves(family: str, dtype: str, tmp_path: Path) -> None:
    pair = pair_of(save_telling(tmp_path, family, PAGE_SIZE, 64), dtype)
    anna, bert, carl = guests(pair, (18, 5, 41))
    pair.run_both(prefill(1, [(anna, 0, 18), (bert, 0, 5)], cleared(anna, bert)))
    # The second chunk begins in a page's midst for no other family than those without state.
    spans = [(0, 16), (16, 32), (32, 41)]
    for index, (start, end) in enumerate(spans):
        chunk = prefill(2 + 2 * index, [(carl, start, end)], cleared(carl) if start == 0 else NONE)
        pair.run(chunk, decode(3 + 2 * index, [(bert, 5 + index), (anna, 18 + index)]))
    last = decode(20, [(carl, 41), (bert, 8), (anna, 21)])
    assert pair.mixed.run(last).sampled == pair.halves.run(last).sampled


NONE = SlotOps()


def test_both_halves_keep_their_snapshots(tmp_path: Path) -> None:
    pair = pair_of(save_telling(tmp_path, "bamba", PAGE_SIZE, 64), "bfloat16")
    anna, _, carl = guests(pair, (15, 5, 41))
    pair.run_both(prefill(1, [(anna, 0, 15)], cleared(anna)))
    chunk = with_snapshots(prefill(2, [(carl, 0, 32)], cleared(carl)), (16, 8), (32, 9))
    kept = SlotOps(snapshots=(SlotSnapshot(anna.working_slot, 10, 16),))
    pair.run(chunk, decode(3, [(anna, 15)], kept))
    states = pair.slabs[0].tensors[Kind.RECURRENT]
    assert all(states[slot].any() for slot in (8, 9, 10))
